#!/bin/sh
# Build deploy/Dockerfile without a registry: build_image.sh STORAGE [SOURCE]. As root on Debian: the base is made by mmdebstrap.
# Prints the two images' names; STORAGE holds the base's file system and buildah's own. SOURCE is this checkout, or a copy of it.
# All times in the images are that of the last commit, so that two builds are equal while Debian's packages are.
set -eu
storage=$1
here=$(cd "$(dirname "$0")/.." && pwd)
source=${2:-$here}
"$here/tools/setup_debian.sh" buildah=buildah mmdebstrap=mmdebstrap
mkdir -p "$storage"
SOURCE_DATE_EPOCH=$(git -C "$here" log -1 --format=%ct)
export SOURCE_DATE_EPOCH
rootfs=$storage/base.tar
if [ ! -e "$rootfs" ]; then
    # Compiled modules hold their source's time, which layers change; a changed time would have them compiled at each start.
    # shellcheck disable=SC2016 # mmdebstrap's own $1
    mmdebstrap --quiet --variant=essential --include=python3,python3-venv,ca-certificates,libstdc++6 \
        --customize-hook='chroot "$1" python3 -m compileall -q -f --invalidation-mode unchecked-hash /usr/lib/python3 /usr/lib/python3.*' \
        bookworm "$rootfs.new.tar" >"$storage/mmdebstrap.log" 2>&1
    mv "$rootfs.new.tar" "$rootfs"
fi
stored() {
    buildah --root "$storage/root" --runroot "$storage/run" --storage-driver vfs "$@"
}
build() {
    stored bud --isolation chroot --pull-never --quiet --timestamp "$SOURCE_DATE_EPOCH" "$@" >/dev/null
}
base=localhost/sidestep-base image=localhost/sidestep
printf 'FROM scratch\nADD base.tar /\n' >"$storage/Dockerfile"
stored inspect --type image "$base" >/dev/null 2>&1 || build --file "$storage/Dockerfile" --tag "$base" "$storage"
# The certificates that this host trusts, while pip runs.
certificates=/etc/ssl/certs/ca-certificates.crt
build --build-arg BASE="$base" --build-arg REVISION="$(git -C "$here" rev-parse HEAD)" \
    --build-arg VERSION="$(sed -n 's/^__version__ = "\(.*\)"/\1/p' "$source/exporter/sidestep/__init__.py")" \
    --build-arg PIP_CERT=$certificates --volume $certificates:$certificates:ro \
    --file "$source/deploy/Dockerfile" --tag "$image" "$source"
echo "$base" "$image"
