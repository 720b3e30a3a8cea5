#!/bin/sh
# Unpack a Prometheus 3, which Debian 12 does not have, from a later Debian: setup_prometheus.sh DIRECTORY
# apt checks its signature; nothing is installed. Without it tests run with Debian 12's alone.
set -eu
target=$1
suite=forky
[ ! -x "$target/usr/bin/prometheus" ] || exit 0
key=/usr/share/keyrings/debian-archive-keyring.gpg
skip() {
    echo "no Prometheus 3 ($1); tests run with the installed one only" >&2
    exit 0
}
command -v apt-get >/dev/null 2>&1 && [ -r "$key" ] || skip "this is no Debian"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
# The archive is whichever this machine's own apt takes its present release from.
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
apt-get --print-uris update 2>/dev/null |
    sed -n "s|^'\(.*\)/dists/$release/InRelease'.*|deb [signed-by=$key] \1 $suite main|p" >"$work/sources.list"
[ -s "$work/sources.list" ] || skip "apt knows no archive of Debian $release"
apt() {
    apt-get -qq -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- \
        -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" \
        -o Acquire::Languages=none -o APT::Sandbox::User="" "$@"
}
apt update >/dev/null 2>&1 || skip "Debian $suite is out of reach"
(cd "$work" && apt download prometheus promtool) >/dev/null 2>&1 || skip "Debian $suite has none"
mkdir -p "$work/root"
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$work/root"
done
# Too new a C library is found out here, not in the tests.
"$work/root/usr/bin/prometheus" --version >/dev/null 2>&1 || skip "it does not run here"
mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$work/root" "$target"
