#!/bin/sh
# Unpack programs that Debian 12 lacks or has in an old version, from a later Debian:
# setup_later_debian.sh DIRECTORY SUITE PROGRAM [PACKAGE...]
# apt checks the signature; nothing is installed. Without the programs, tests that need them are skipped.
set -eu
target=$1
suite=$2
program=$3
shift 2
[ ! -x "$target/usr/bin/$program" ] || exit 0
key=/usr/share/keyrings/debian-archive-keyring.gpg
skip() {
    echo "no $program of Debian $suite ($1); the tests that need it are skipped" >&2
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
apt update >/dev/null 2>&1 || skip "it is out of reach"
(cd "$work" && apt download "$@") >/dev/null 2>&1 || skip "it has none"
mkdir -p "$work/root"
for package in "$work"/*.deb; do
    dpkg-deb -x "$package" "$work/root"
done
# Too new a C library is found out here, not in the tests.
"$work/root/usr/bin/$program" --version >/dev/null 2>&1 || skip "it does not run here"
mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$work/root" "$target"
