#!/bin/sh
# Build deploy/Dockerfile without a registry: build_image.sh STORAGE. As root on Debian: the base is made by debootstrap.
# Prints the two images' names; STORAGE holds the base's file system and buildah's own.
set -eu
storage=$1
here=$(cd "$(dirname "$0")/.." && pwd)
"$here/tools/setup_debian.sh" buildah=buildah debootstrap=debootstrap
mkdir -p "$storage"
rootfs=$storage/base.tar
if [ ! -e "$rootfs" ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work" >"$storage/debootstrap.log" 2>&1
    rm -rf "$work"/var/cache/apt/*.bin "$work"/var/cache/apt/archives/*.deb "$work"/var/lib/apt/lists/*
    # What this host needs to reach PyPI, so does the build.
    cp /etc/ssl/certs/ca-certificates.crt "$work/etc/ssl/certs/"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$work/etc/pip.conf"
    tar -C "$work" -cf "$rootfs.new" .
    mv "$rootfs.new" "$rootfs"
fi
build() {
    buildah --root "$storage/root" --runroot "$storage/run" --storage-driver vfs \
        bud --isolation chroot --pull-never --quiet "$@" >/dev/null
}
base=localhost/sidestep-test-base image=localhost/sidestep-test
printf 'FROM scratch\nADD base.tar /\n' >"$storage/Dockerfile"
[ -e "$storage/base.made" ] || build --file "$storage/Dockerfile" --tag "$base" "$storage"
touch "$storage/base.made"
revision=$(git -C "$here" rev-parse HEAD 2>/dev/null || echo unknown)
build --build-arg BASE="$base" --build-arg REVISION="$revision" --file "$here/deploy/Dockerfile" --tag "$image" "$here"
echo "$base" "$image"
