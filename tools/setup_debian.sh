#!/bin/sh
# Install Debian packages whose command is missing: setup_debian.sh PACKAGE=COMMAND...
# Only as root; otherwise says what the tests will skip.
set -eu
missing=""
for pair in "$@"; do
    command -v "${pair#*=}" >/dev/null 2>&1 || missing="$missing ${pair%%=*}"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "missing:$missing; the tests that need them are skipped (apt-get install$missing)" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # a list of package names
apt-get install -y -qq --no-install-recommends $missing >/dev/null
