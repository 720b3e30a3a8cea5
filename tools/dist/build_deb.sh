#!/bin/sh
# Write the Debian package: build_deb.sh SOURCE TREE VERSION TARGET.
# TREE has opt/sidestep, as in the image, and man/ and completions/ of tools/dist/manual.py; it becomes the package's file system.
set -eu
source=$1 tree=$2 version=$3 target=$4
units=$source/deploy/systemd
architecture=$(dpkg --print-architecture)
# Modules with compiled parts are those of one minor version.
python=$(basename "$tree"/opt/sidestep/venv/lib/python3.*)
minor=${python#python3.}
put() {
    install -D -m "${3:-644}" "$1" "$tree/$2"
}
put "$units/sidestep.service" usr/lib/systemd/system/sidestep.service
put "$units/sysusers.conf" usr/lib/sysusers.d/sidestep.conf
put "$units/sidestep.toml" etc/sidestep/sidestep.toml
put "$tree/completions/sidestep" usr/share/bash-completion/completions/sidestep
put "$tree/completions/_sidestep" usr/share/zsh/vendor-completions/_sidestep
put "$tree/completions/sidestep.fish" usr/share/fish/vendor_completions.d/sidestep.fish
put "$tree/man/sidestep.1" usr/share/man/man1/sidestep.1
put "$source/LICENSE" usr/share/doc/sidestep/copyright
put "$source/CHANGELOG.md" usr/share/doc/sidestep/changelog
gzip -9n "$tree/usr/share/man/man1/sidestep.1" "$tree/usr/share/doc/sidestep/changelog"
rm -r "$tree/completions" "$tree/man"
mkdir -p "$tree/usr/bin"
ln -s /opt/sidestep/venv/bin/sidestep "$tree/usr/bin/sidestep"
put "$units/postinst" DEBIAN/postinst 755
put "$units/prerm" DEBIAN/prerm 755
put "$units/postrm" DEBIAN/postrm 755
echo /etc/sidestep/sidestep.toml >"$tree/DEBIAN/conffiles"
cat >"$tree/DEBIAN/control" <<END
Package: sidestep
Version: $version
Architecture: $architecture
Maintainer: The authors of sidestep <sidestep@localhost>
Installed-Size: $(du -sk --exclude DEBIAN "$tree" | cut -f1)
Depends: libstdc++6, procps, python3 (>= 3.$minor), python3 (<< 3.$((minor + 1))), systemd | systemd-sysusers
Section: net
Priority: optional
Description: Prometheus metrics of LLM inference engines
 An exporter that vLLM, SGLang and Triton send their statistics to, instead of
 computing metrics on the loop that serves requests.
END
# Of any umask; dpkg-deb itself sets times to SOURCE_DATE_EPOCH.
chmod -R u=rwX,go=rX "$tree"
# gzip takes a tenth of the time of xz.
dpkg-deb -Zgzip --root-owner-group --build "$tree" "$target/sidestep_${version}_$architecture.deb" >/dev/null
