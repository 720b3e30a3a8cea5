#!/bin/sh
# Make receivers of OTLP for `make test-otlp`: setup_otlp.sh DIRECTORY [collector] [prometheus] [phoenix]; without names, all.
# Collector and Prometheus 3 are compiled from Debian's Go sources (2 minutes, 4 GB while it works), since Debian has no
# Collector and leaves the receiver out of its Prometheus; Phoenix is from PyPI (850 MB). Nothing is installed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
target=$(cd "$1" && pwd)
shift
suite=sid
go=1.27
key=/usr/share/keyrings/debian-archive-keyring.gpg
work=$target/work

apt() { # TOOL ARGUMENT...
    tool=$1
    shift
    "$tool" -qq -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" \
        -o Acquire::Languages=none -o APT::Sandbox::User="" "$@"
}

lists() {
    [ ! -s "$work/sources.list" ] || return 0
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
    # The archive is whichever this machine's own apt takes its present release from.
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    apt-get --print-uris update 2>/dev/null |
        sed -n "s|^'\(.*\)/dists/$release/InRelease'.*|deb [signed-by=$key] \1 $suite main\ndeb-src [signed-by=$key] \1 $suite main|p" \
            >"$work/sources.list"
    [ -s "$work/sources.list" ] || { echo "apt knows no archive of Debian $release" >&2; exit 1; }
    apt apt-get update
}

sources() { # Go, and all that the two programs are made of
    [ ! -d "$work/tree" ] || return 0
    lists
    apt apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
        --no-enhances golang-opentelemetry-collector-dev golang-github-prometheus-prometheus-dev \
        golang-$go-go golang-$go-src 2>/dev/null | grep '^golang-' | sort -u >"$work/packages"
    # shellcheck disable=SC2046 # a list of package names
    (cd "$work/debs" && apt apt-get download $(cat "$work/packages"))
    mkdir "$work/unpacked"
    for package in "$work"/debs/golang-*.deb; do
        dpkg-deb -x "$package" "$work/unpacked"
    done
    mv "$work/unpacked" "$work/tree"
}

compile() { # GOPATH PACKAGE OUTPUT
    GOROOT=$work/tree/usr/lib/go-$go GOPATH=$1:$work/tree/usr/share/gocode GO111MODULE=off GOTOOLCHAIN=local \
        GOCACHE=$work/gocache CGO_ENABLED=0 "$work/tree/usr/lib/go-$go/bin/go" \
        build -trimpath -ldflags '-s -w' -o "$3" "$2"
}

collector() {
    [ ! -x "$target/collector" ] || return 0
    sources
    mkdir -p "$work/collector/src/collector"
    cp "$here/otlp/collector.go" "$work/collector/src/collector/main.go"
    (cd "$work/collector/src/collector" && compile "$work/collector" collector "$target/collector")
}

prometheus() {
    [ ! -x "$target/prometheus" ] || return 0
    sources
    # The library package lacks the receiver; the original source has it.
    apt apt-get source --print-uris prometheus >"$work/uris"
    uri=$(sed -n "s/^'\([^']*\.orig\.tar\.xz\)'.*/\1/p" "$work/uris")
    sum=$(sed -n "s/.*\.orig\.tar\.xz [0-9]* SHA256:\([0-9a-f]*\).*/\1/p" "$work/uris")
    /usr/lib/apt/apt-helper download-file "$uri" "$work/prometheus.orig.tar.xz" "SHA256:$sum" >/dev/null
    mkdir -p "$work/original"
    tar -xf "$work/prometheus.orig.tar.xz" -C "$work/original" --strip-components=1
    tree=$work/prometheus/src/github.com/prometheus/prometheus
    rm -rf "$tree"
    mkdir -p "$(dirname "$tree")"
    cp -rL "$work/tree/usr/share/gocode/src/github.com/prometheus/prometheus" "$tree"
    "${PYTHON:-python3}" "$here/otlp/restore_receiver.py" "$tree" "$work/original"
    (cd "$tree" && compile "$work/prometheus" github.com/prometheus/prometheus/cmd/prometheus "$target/prometheus")
}

phoenix() {
    [ ! -x "$target/phoenix/bin/phoenix" ] || return 0
    "${PYTHON:-python3}" -m venv "$target/phoenix"
    "$target/phoenix/bin/pip" install --quiet arize-phoenix
}

[ $# -gt 0 ] || set -- collector prometheus phoenix
for what in "$@"; do
    case $what in
    collector | prometheus | phoenix) $what ;;
    *) echo "unknown: $what" >&2; exit 2 ;;
    esac
done
rm -rf "$work"
