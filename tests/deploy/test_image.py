"""The container image, built without privileges: what it adds to its base, and its labels."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from manifests import ROOT
from sidestep import __version__

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

STORAGE = ROOT / "build" / "image"
LIMIT_MB = 120
"""Most megabytes that the image adds to its base."""


def buildah(*arguments: str) -> str:
    """Run buildah and return its output."""
    places = f"--root={STORAGE}/root --runroot={STORAGE}/run --storage-driver=vfs".split()
    done = subprocess.run(
        ["buildah", *places, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image() -> str:
    """Build the image from this checkout and return its name."""
    if os.getuid() != 0:
        pytest.skip("buildah's chroot isolation and mounts need root")
    done = subprocess.run(
        [ROOT / "tools" / "build_image.sh", STORAGE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.fixture(scope="module")
def config(image: str) -> dict[str, Any]:
    """Return the image's configuration."""
    found: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", image))
    settings: dict[str, Any] = found["OCIv1"]["config"]
    return settings


def test_the_image_is_small(image: str) -> None:
    """The image adds at most ``LIMIT_MB`` to its base."""
    base, built = (
        sum(one.lstat().st_blocks for one in path.rglob("*")) * 512 / 1e6
        for path in _mounted("localhost/sidestep-base", image)
    )
    print(f"\n{built - base:.0f} MB over its base of {base:.0f} MB")

    assert built - base <= LIMIT_MB


def _mounted(*images: str) -> Iterator[Path]:
    for one in images:
        container = buildah("from", "--pull-never", one)
        try:
            yield Path(buildah("mount", container))
        finally:
            buildah("rm", container)


def test_the_image_is_labelled(config: dict[str, Any]) -> None:
    """The image has OCI labels, and an unprivileged user."""
    labels = config["Labels"]

    assert labels["org.opencontainers.image.version"] == __version__
    assert len(labels["org.opencontainers.image.revision"]) == 40
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert (config["User"], "9857/tcp" in config["ExposedPorts"]) == ("65532:65532", True)
