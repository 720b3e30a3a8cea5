"""Workers that nobody scrapes send to their leader's exporter, as the manifest of a LeaderWorkerSet says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import pytest

from manifests import KUSTOMIZE, ROOT, Resource, defaults, environ, kustomized, named, settings
from pages import parse
from peers import count
from ports import free_ports
from sidestep.protocol.messages import EngineInfo
from sidestep.transport import keys
from sidestep.transport.keys import CLIENT_KEY, SERVER_KEY
from sidestep_adapters.publisher.publisher import Publisher

TOKENS = "vllm:generation_tokens"
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


def test_all_containers_are_hardened(pods: dict[str, Resource]) -> None:
    """All have the same security context, requests that are limits, and one image."""
    containers = pods["leader"]["initContainers"]

    assert all(one["securityContext"] == exporter(pods)["securityContext"] for one in containers)
    assert all(one["resources"]["requests"] == one["resources"]["limits"] for one in containers)
    assert len({one["image"] for one in containers}) == 1


class Group:
    """Directories in place of volumes and secrets, and a process in place of the exporter's container."""

    def __init__(self, pods: dict[str, Resource], directory: Path) -> None:
        self.pods = pods
        self.directory = directory
        self.ports = free_ports(2)
        for name in ("run-keys", "etc/sidestep/key", "etc/sidestep/worker"):
            (directory / name).mkdir(parents=True)
        for name, holders in (("exporter", ("key", "worker")), ("worker", ("worker", "key"))):
            keys.generate(directory, name)
            for suffix, holder in zip((".key", ".pub"), holders, strict=True):
                (directory / f"{name}{suffix}").rename(
                    directory / "etc/sidestep" / holder / f"{name}{suffix}"
                )

    def here(self, text: str) -> str:
        """Replace addresses and paths of the manifest by those on this host."""
        for theirs, its in (
            ("tcp://*:9858", f"tcp://127.0.0.1:{self.ports[1]}"),
            (f"{LEADER_ADDRESS['LWS_LEADER_ADDRESS']}:9858", f"127.0.0.1:{self.ports[1]}"),
            ("--ingest.ipc-group=65532", f"--ingest.ipc-group={os.getgid()}"),
            ("/etc/sidestep/", f"{self.directory}/etc/sidestep/"),
            ("/run/sidestep", f"{self.directory}/run"),
            ("/var/lib/sidestep", f"{self.directory}/lib"),
        ):
            text = text.replace(theirs, its)
        return text

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Copy the keys, run the exporter, and stop it at once: its engines go on, so no scrape is the last."""
        copying = named(self.pods["leader"]["initContainers"], "sidestep-keys")["command"]
        assert await (await asyncio.create_subprocess_exec(*map(self.here, copying))).wait() == 0
        given = {**defaults(), "SIDESTEP_WEB_LISTEN_ADDRESS": f"127.0.0.1:{self.ports[0]}"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sidestep", *map(self.here, exporter(self.pods)["args"]),
            env={**os.environ, **{name: self.here(text) for name, text in given.items()}},
        )  # fmt: skip
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0

    async def until(self, **wanted: float) -> None:
        """Wait until the leader's page has these token counts by engine."""
        url = f"http://127.0.0.1:{self.ports[0]}/metrics"
        found: dict[str, float] = {}
        try:
            async with asyncio.timeout(60), aiohttp.ClientSession() as session:
                while found != wanted:
                    await asyncio.sleep(0.05)
                    with contextlib.suppress(aiohttp.ClientError):
                        async with session.get(url) as answer:
                            found = _tokens(await answer.text())
        except TimeoutError:
            pytest.fail(f"{found} instead of {wanted}")


def _tokens(page: str) -> dict[str, float]:
    families = parse(page)
    if TOKENS not in families:
        return {}
    return {
        dict(labels)["engine"]: value for (_, labels), value in families[TOKENS].samples.items()
    }


def _publisher(endpoint: str, name: str) -> Publisher:
    info = EngineInfo(f"{name}/m/0", "vllm", {"engine": name, "model_name": "m"})
    return Publisher(endpoint, name, [info], flush_interval=0.01)


async def test_a_group_is_on_its_leaders_page(
    pods: dict[str, Resource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leader and worker are on one page, and their counters continue when the exporter restarts."""
    group = Group(pods, tmp_path)
    worker = {name: group.here(text) for name, text in engine(pods["worker"], "w").items()}
    local = group.here(engine(pods["leader"], "l")["SIDESTEP_ENDPOINT"])
    monkeypatch.setenv(SERVER_KEY, worker[SERVER_KEY])
    monkeypatch.setenv(CLIENT_KEY, worker[CLIENT_KEY])
    with (
        closing(_publisher(local, "leader")) as one,
        closing(_publisher(worker["SIDESTEP_ENDPOINT"], "worker")) as other,
    ):
        async with group.running():
            one.push(count(5))
            other.push(count(7))
            await group.until(leader=5.0, worker=7.0)
        async with group.running():
            other.push(count(3))
            await group.until(leader=5.0, worker=10.0)
