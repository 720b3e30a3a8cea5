"""Workers that nobody scrapes send to their leader's exporter, as the manifest of a LeaderWorkerSet says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from manifests import KUSTOMIZE, ROOT, Resource, defaults, environ, kustomized, named, settings
from sidestep.transport.keys import CLIENT_KEY, SERVER_KEY

LEADER_ADDRESS = {"LWS_LEADER_ADDRESS": "sglang-0.sglang.llm"}


@pytest.fixture(scope="module")
def pods() -> dict[str, Resource]:
    """Return the pods of leader and workers."""
    (group,) = kustomized(KUSTOMIZE / "overlays" / "leaderworkerset-tcp")
    templates = group["spec"]["leaderWorkerTemplate"]
    return {name: templates[f"{name}Template"]["spec"] for name in ("leader", "worker")}


def exporter(pods: dict[str, Resource]) -> Resource:
    """Return the container of the leader's exporter."""
    return named(pods["leader"]["initContainers"], "sidestep")


def engine(pod: Resource, name: str) -> dict[str, str]:
    """Return the variables of a pod's engine."""
    return environ(pod["containers"][0], {"metadata.name": name}, LEADER_ADDRESS)


def secret(pod: Resource, name: str) -> Resource:
    """Return the secret that a volume of a pod has."""
    found: Resource = named(pod["volumes"], name)["secret"]
    return found


def test_keys_are_those_of_the_documented_commands(pods: dict[str, Resource]) -> None:
    """Each end finds in its secret the files that the commands in docs/fleet.md put there."""
    made = {
        line.split()[4]: set(re.findall(r"--from-file=(\S+)", line))
        for line in (ROOT / "docs" / "fleet.md").read_text().splitlines()
        if line.startswith("kubectl create secret generic")
    }
    copying = named(pods["leader"]["initContainers"], "sidestep-keys")
    target, *copied = map(Path, copying["command"][4:])
    used = engine(pods["worker"], "sglang-0-1")
    read = {Path(used[SERVER_KEY]), Path(used[CLIENT_KEY])}
    config = settings(exporter(pods), defaults())
    mounts = {one["name"]: Path(one["mountPath"]) for one in copying["volumeMounts"]}

    assert made == {
        secret(pods["leader"], "sidestep-key")["secretName"]: {one.name for one in copied},
        secret(pods["worker"], "sidestep-worker")["secretName"]: {one.name for one in read},
    }
    assert mounts == {"sidestep-keys": target, "sidestep-key": copied[0].parent}
    assert Path(config.ingest_curve_key).parent == Path(config.ingest_authorized_keys) == target
    (mount,) = {one.parent for one in read}
    assert named(pods["worker"]["containers"][0]["volumeMounts"], "sidestep-worker")[
        "mountPath"
    ] == str(mount)
    # Another user's secret key is refused; the copy is the exporter's own.
    assert copying["command"][1:3] == ["-m", "0400"]
    assert secret(pods["worker"], "sidestep-worker")["defaultMode"] == 0o400


def test_workers_send_to_the_leaders_port(pods: dict[str, Resource]) -> None:
    """The leader listens for them, and its own engine sends over the path that both mount."""
    own, remote = settings(exporter(pods), defaults()).ingest_endpoint
    port = remote.rpartition(":")[2]

    assert engine(pods["leader"], "sglang-0")["SIDESTEP_ENDPOINT"] == own
    assert engine(pods["worker"], "sglang-0-1")["SIDESTEP_ENDPOINT"] == (
        f"tcp://{LEADER_ADDRESS['LWS_LEADER_ADDRESS']}:{port}"
    )


def test_all_containers_are_hardened(pods: dict[str, Resource]) -> None:
    """All have the same security context, requests that are limits, and one image."""
    containers = pods["leader"]["initContainers"]

    assert all(one["securityContext"] == exporter(pods)["securityContext"] for one in containers)
    assert all(one["resources"]["requests"] == one["resources"]["limits"] for one in containers)
    assert len({one["image"] for one in containers}) == 1
