"""Build a release into dist/.

``python -m tools.dist [PART...]`` builds the parts, or without any all of them. ``image`` also writes the Debian package and
the bill of materials, which are made of the image; it needs root on Debian.
``--into DIR`` names another directory. ``--tag TAG`` only checks that a tag is this release's, and that CHANGELOG.md has it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.dist import image
from tools.dist.manual import manual
from tools.dist.notes import release_notes, sections
from tools.dist.release import ROOT, Release, files, prepared

from sidestep import __version__

SUMS = "SHA256SUMS"


def packages(release: Release) -> None:
    """Write the wheel and the source distribution."""
    command = sys.executable, "-m", "hatchling", "build", "--directory", release.target
    release.run(*command, cwd=release.source)


def charts(release: Release) -> None:
    """Write the Helm charts, as ``helm package`` does."""
    for chart in (release.source / "deploy" / "helm").iterdir():
        members = {f"{chart.name}/{name}": path for name, path in files(chart).items()}
        members = {name: path for name, path in members.items() if "/ci/" not in name}
        release.archive(f"{chart.name}-{release.version}.tgz", {**members})


def kustomize(release: Release) -> None:
    """Write the kustomize components and overlays, and the examples of manifests."""
    _folders(release, "kustomize", kustomize="deploy/kustomize", examples="deploy/examples")


def dashboards(release: Release) -> None:
    """Write the dashboards and the rules."""
    _folders(release, "dashboards-and-rules", dashboards="grafana", rules="deploy/rules")


def _folders(release: Release, what: str, **folders: str) -> None:
    name = f"sidestep-{what}-{release.version}"
    members: dict[str, Path | str] = {}
    for folder, source in folders.items():
        for path, file in files(release.source / source).items():
            members[f"{name}/{folder}/{path}"] = file
    release.archive(f"{name}.tar.gz", members)


def man(release: Release) -> None:
    """Write the man page and the completions."""
    name = f"sidestep-man-and-completions-{release.version}"
    members = {f"{name}/{path}": text for path, text in manual(release).items()}
    release.archive(f"{name}.tar.gz", members)


def notes(release: Release) -> None:
    """Write the release notes."""
    text = release_notes(release.source / "CHANGELOG.md", release.version)
    (release.target / "RELEASE-NOTES.md").write_text(text)


def container(release: Release) -> None:
    """Write the image's archive, the bill of materials, and the Debian package."""
    with image.built(release) as root, TemporaryDirectory(dir=ROOT / "build") as made:
        bill = release.target / f"sidestep-{release.version}.cdx.json"
        bill.write_text(image.bill_of_materials(release, root))
        tree = Path(made, "tree")
        shutil.copytree(root / image.PLACE, tree / image.PLACE, symlinks=True)
        for name, text in manual(release).items():
            (tree / name).parent.mkdir(exist_ok=True)
            (tree / name).write_text(str(text))
        script = release.source / "tools" / "dist" / "build_deb.sh"
        release.run(script, release.source, tree, release.version, release.target)


PARTS: dict[str, Callable[[Release], None]] = {
    "packages": packages,
    "charts": charts,
    "kustomize": kustomize,
    "dashboards": dashboards,
    "man": man,
    "notes": notes,
    "image": container,
}


def sums(target: Path) -> None:
    """Write the sums of all files, in the form that ``sha256sum --check`` reads."""
    paths = [path for path in sorted(target.iterdir()) if path.name != SUMS]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in paths]
    (target / SUMS).write_text("".join(lines))


def check_tag(tag: str) -> str | None:
    """Return what is wrong with the tag of a release."""
    if tag != f"v{__version__}":
        return f"{tag} is not the tag of this release: v{__version__}"
    if __version__ not in sections(ROOT / "CHANGELOG.md"):
        return f"CHANGELOG.md has no section {__version__}"
    return None


def main() -> str | None:
    """Build what the arguments name and return what is wrong."""
    parser = argparse.ArgumentParser(prog="tools.dist")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--into", type=Path, default=ROOT / "dist", metavar="DIR")
    parser.add_argument("--tag")
    given = parser.parse_args()
    if given.tag:
        return check_tag(given.tag)
    parts = given.parts or [*PARTS]
    if "image" in parts and os.geteuid() != 0:
        others = " ".join(part for part in PARTS if part != "image")
        return f"the image needs root on Debian; without it: make dist DIST='{others}'"
    shutil.rmtree(given.into, ignore_errors=True)
    with prepared(given.into) as release:
        for part in parts:
            print(f"{part} ...", flush=True)
            PARTS[part](release)
    sums(given.into)
    return None


if __name__ == "__main__":
    sys.exit(main())
