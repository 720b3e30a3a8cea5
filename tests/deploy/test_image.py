"""The container image, built and run without privileges, on a read-only file system."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from manifests import KUSTOMIZE, ROOT, Resource, kustomized, named, template
from ports import free_port
from sidestep import __version__
from sidestep.transport import keys

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

STORAGE = ROOT / "build" / "image"
LIMIT_MB = 120
"""Most megabytes that the image adds to its base."""
SIDECAR = named(template()["initContainers"], "sidestep")
MOUNTS = {one["name"]: one["mountPath"] for one in SIDECAR["volumeMounts"]}
CONTAINER = r"""
set -eu
root=$1 user=$2 groups=$3 volumes=$4; shift 4
mount --make-rprivate /
mount --bind "$root" "$root"
mount --bind /proc "$root/proc"
for pair in $volumes; do mount --bind "${pair%%=*}" "$root${pair#*=}"; done
mount -o remount,ro,bind "$root"
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all,+sys_chroot,+setuid,+setgid \
    chroot --userspec="$user" --groups="$groups" "$root" "$@"
"""
"""A shell's approximation of what a runtime does with a hardened container."""


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


@pytest.fixture(scope="module")
def root(image: str) -> Iterator[Path]:
    """Mount the image's file system."""
    container = buildah("from", "--pull-never", image)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("rm", container)


@pytest.fixture
def volumes(tmp_path: Path) -> dict[str, Path]:
    """Make empty directories that everybody may write to, as emptyDir volumes are."""
    found = {}
    for name in (*MOUNTS, "sidestep-plugin"):
        found[name] = tmp_path / name
        found[name].mkdir()
        found[name].chmod(0o777)
    return found


def container_command(
    root: Path, config: dict[str, Any], mounts: dict[Path, str], command: list[str], user: str = ""
) -> list[str | Path]:
    """Return the command that runs ``command`` in a mount namespace of its own."""
    # The environment has the image's variables only.
    pairs = " ".join(f"{source}={target}" for source, target in mounts.items())
    user = user or config["User"]
    return [
        "env", "-i", *config["Env"], "unshare", "--mount", "sh", "-c", CONTAINER, "sh",
        root, user, "65532", pairs, *command,
    ]  # fmt: skip


@contextlib.contextmanager
def running(
    root: Path,
    config: dict[str, Any],
    volumes: dict[str, Path],
    manifest: Resource,
    more: Mapping[Path, str] = {},
) -> Iterator[tuple[subprocess.Popen[bytes], float, str]]:
    """Run the sidecar of a manifest on a free port; yield its process, the seconds until ready, and its URL."""
    mounts = {**{volumes[name]: path for name, path in MOUNTS.items()}, **more}
    command = [*config["Entrypoint"], *manifest.get("args", config["Cmd"])]
    port = free_port()
    environ = [*config["Env"], f"SIDESTEP_WEB_LISTEN_ADDRESS=127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}"
    started = time.monotonic()
    process = subprocess.Popen(container_command(root, {**config, "Env": environ}, mounts, command))
    try:
        while time.monotonic() < started + 60 and process.poll() is None:
            with contextlib.suppress(OSError):
                with urllib.request.urlopen(f"{url}/-/ready", timeout=1) as answer:
                    assert answer.status == 200
                break
            time.sleep(0.01)
        yield process, time.monotonic() - started, url
    finally:
        process.terminate()
        process.wait()


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


def test_keys_of_a_secret_are_copied(
    root: Path, config: dict[str, Any], volumes: dict[str, Path], tmp_path: Path
) -> None:
    """Keys of a secret are usable once copied, and refused as they are mounted."""
    (group,) = kustomized(KUSTOMIZE / "overlays" / "leaderworkerset-tcp")
    pod = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]
    copying, leader = (named(pod["initContainers"], name) for name in ("sidestep-keys", "sidestep"))
    secret, copied = tmp_path / "secret", tmp_path / "copied"
    secret.mkdir()
    copied.mkdir()
    copied.chmod(0o777)
    for name in ("exporter", "worker"):
        keys.generate(secret, name)
    for path in secret.iterdir():
        path.chmod(named(pod["volumes"], "sidestep-key")["secret"]["defaultMode"])
    places = {one["name"]: one["mountPath"] for one in copying["volumeMounts"]}
    # The image lacks the mount points, which a runtime would create, so others serve for them.
    sources = {secret: "/mnt", copied: "/media"}

    def here(text: str, ours: str = "/media") -> str:
        found = text.replace(places["sidestep-key"], "/mnt").replace(places["sidestep-keys"], ours)
        return found.replace("tcp://*:9858", f"tcp://127.0.0.1:{free_port()}")

    copy = [here(one) for one in copying["command"]]
    subprocess.run(container_command(root, config, sources, copy), check=True)
    modes = {
        path.name: (path.stat().st_uid, path.stat().st_mode & 0o777) for path in copied.iterdir()
    }
    started = {"args": [here(one) for one in leader["args"]]}
    with running(root, config, volumes, started, {copied: "/media"}) as (process, _, _):
        process.terminate()
        code = process.wait(20)
    command = [*config["Entrypoint"], *(here(one, "/mnt") for one in leader["args"])]
    mounts = {secret: "/mnt", **{volumes[name]: path for name, path in MOUNTS.items()}}
    refused = subprocess.run(
        container_command(root, config, mounts, command),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert modes == {"exporter.key": (65532, 0o400), "worker.pub": (65532, 0o400)}
    assert code == 0
    assert refused.returncode == 2
    assert "this secret key is accessible to other users" in refused.stderr
