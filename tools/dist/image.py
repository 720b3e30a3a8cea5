"""The container image as an OCI archive, and what is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import quote

from tools.dist.release import ROOT, Release, files

PLACE = "opt/sidestep"
"""Directory of the image with the exporter's environment and the plugin."""


@contextmanager
def built(release: Release) -> Iterator[Path]:
    """Build the image, write its archive, and yield its file system."""
    with TemporaryDirectory(prefix="sidestep-image-", dir=_place()) as made:
        storage = Path(made)
        _, image = release.run(ROOT / "tools/build_image.sh", storage, release.source).split()
        layout = storage / "layout"
        _buildah(
            release, storage, "push", "--quiet", image, f"oci:{layout}:sidestep:{release.version}"
        )
        release.archive(f"sidestep-{release.version}-image.tar", {**files(layout)})
        container = _buildah(release, storage, "from", "--pull-never", image)
        yield Path(_buildah(release, storage, "mount", container))
        _buildah(release, storage, "rm", container)


def _place() -> Path:
    """Return a directory for gigabytes, which /tmp may not have."""
    place = ROOT / "build"
    place.mkdir(exist_ok=True)
    return place


def _buildah(release: Release, storage: Path, *arguments: str) -> str:
    places = f"--root={storage}/root --runroot={storage}/run --storage-driver=vfs".split()
    return release.run("buildah", *places, *arguments).strip()


def bill_of_materials(release: Release, root: Path) -> str:
    """Return the image's packages, of Python and of Debian, in the form of CycloneDX."""
    (site,) = (root / PLACE).glob("venv/lib/python3.*/site-packages")
    listed = release.run(
        "dpkg-query", f"--admindir={root}/var/lib/dpkg", "--show",
        "--showformat=${Package} ${Version} ${Architecture}\\n",
    )  # fmt: skip
    found = sorted(distributions(path=[str(site)]), key=lambda one: one.name.lower())
    components = [_python_package(one) for one in found]
    for name, version, architecture in map(str.split, listed.splitlines()):
        address = f"pkg:deb/debian/{name}@{quote(version)}?arch={architecture}"
        components.append(_component(name, version, address))
    (ours,) = [one for one in components if one["name"] == "sidestep"]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours},
        "components": [one for one in components if one is not ours],
    }
    return json.dumps(bill, indent=1) + "\n"


def _python_package(found: Distribution) -> dict[str, object]:
    name = found.name.lower().replace("_", "-")
    package = _component(name, found.version, f"pkg:pypi/{name}@{quote(found.version)}")
    licence = found.metadata.json.get("license_expression")
    return {**package, **({"licenses": [{"expression": licence}]} if licence else {})}


def _component(name: str, version: str, address: str) -> dict[str, object]:
    return {
        "type": "library",
        "bom-ref": address,
        "name": name,
        "version": version,
        "purl": address,
    }
