"""Leaves without a page and the exporter that has it: their manifests, and real processes that do what these say."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import manifests
from manifests import (
    KUSTOMIZE,
    ROOT,
    Resource,
    defaults,
    kustomized,
    named,
    pods,
    resources,
    settings,
    template,
)
from pages import parse
from peers import count, publisher
from sidestep.config.parsing import source
from sidestep.transport import keys

TOKENS = "vllm:generation_tokens"


def container(component: str, name: str) -> Resource:
    """Of what a component injects."""
    return named(template(component)["initContainers"], name)


def aggregator() -> dict[str, Resource]:
    """Resources of ours, by kind."""
    found = resources((KUSTOMIZE / "aggregator" / "aggregator.yaml").read_text())
    return {one["kind"]: one for one in found}


def root() -> Resource:
    """The aggregator's container."""
    ((_, pod),) = pods(aggregator()["Deployment"])
    found: Resource = pod["containers"][0]
    return found


def environ(given: Resource, pod: str, more: Mapping[str, str] = {}) -> dict[str, str]:
    """Variables of a container in a pod of the namespace llm."""
    fields = {"metadata.namespace": "llm", "metadata.name": pod}
    return manifests.environ(given, fields, more)


def test_a_leaf_has_no_page_and_nothing_that_asks_it_for_one() -> None:
    """Neither a port that Prometheus would find, nor a probe over HTTP."""
    leaf = container("forward", "sidestep")
    config = settings(leaf, {**defaults(), **environ(leaf, "p-0")})

    assert config.web_listen_address == ()
    assert "ports" not in leaf
    assert "httpGet" not in str(leaf)
    assert config.ingest_endpoint == (f"ipc://{leaf['startupProbe']['exec']['command'][-1]}",)
    assert config.forward_label == (("namespace", "llm"), ("pod", "p-0"))


def test_a_leafs_name_fits_whatever_pods_are_called() -> None:
    """Namespaces and pods' host names have 63 characters at most, and two namespaces may have equal pods."""
    leaf = container("forward", "sidestep")
    longest = {"POD_NAMESPACE": "n" * 63, "POD_NAME": "p" * 63}
    text = named(leaf["env"], "SIDESTEP_FORWARD_SOURCE")["value"]
    given = re.sub(r"\$\((\w+)\)", lambda name: longest[name[1]], text)

    assert set(re.findall(r"\$\((\w+)\)", text)) == set(longest)
    assert source(given) == given


def test_leaf_and_aggregator_meet() -> None:
    """By the service's name and port; keys lie where they are looked for, and are copied from what is mounted."""
    leaf, copying = (container("forward", name) for name in ("sidestep", "sidestep-keys"))
    service = aggregator()["Service"]
    port = named(service["spec"]["ports"], "ingest")
    mounts = {one["name"]: one["mountPath"] for one in copying["volumeMounts"]}
    found = environ(leaf, "p-0")
    target, *sources = copying["command"][4:]

    assert found["SIDESTEP_FORWARD"] == f"tcp://{service['metadata']['name']}:{port['port']}"
    assert named(root()["ports"], port["targetPort"])["containerPort"] == port["port"]
    assert settings(root(), defaults()).ingest_endpoint == (f"tcp://*:{port['port']}",)
    assert target == mounts["sidestep-keys"]
    assert named(leaf["volumeMounts"], "sidestep-keys")["mountPath"] == target
    assert {str(Path(one).parent) for one in sources} == {mounts["sidestep-forward"]}
    assert {found["SIDESTEP_SERVER_KEY"], found["SIDESTEP_CLIENT_KEY"]} == {
        f"{target}/{Path(one).name}" for one in sources
    }


def test_secrets_are_those_that_the_document_makes() -> None:
    """By the commands that users copy: names, and the files in them."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    made = {
        line.split()[4]: set(re.findall(r"--from-file=(\S+)", line))
        for line in text.splitlines()
        if line.startswith("kubectl create secret generic")
    }
    copied = {Path(one).name for one in container("forward", "sidestep-keys")["command"][5:]}
    ((_, pod),) = pods(aggregator()["Deployment"])
    mounted = {one["name"]: one["secret"] for one in pod["volumes"] if "secret" in one}
    forward = named(template("forward")["volumes"], "sidestep-forward")["secret"]

    assert made == {
        mounted["key"]["secretName"]: {Path(settings(root(), defaults()).ingest_curve_key).name},
        mounted["authorized"]["secretName"]: {"sidecar.pub"},
        forward["secretName"]: copied,
    }
    # By the group that fsGroup gives them; and, where there is none, by everybody who has the volume.
    assert {one["defaultMode"] for one in mounted.values()} == {0o440}
    assert pod["securityContext"]["fsGroup"] == root()["securityContext"]["runAsGroup"]
    assert forward["defaultMode"] == 0o444
    holders = [
        one["name"]
        for one in template("forward")["initContainers"] + template("forward")["containers"]
        if "sidestep-forward" in str(one.get("volumeMounts"))
    ]
    assert holders == ["sidestep-keys"]


def test_all_containers_are_as_hard_as_the_sidecar() -> None:
    """And those of an engine's pod leave it in its class."""
    sidecar = container("component", "sidestep")
    given = template("forward")["initContainers"]

    for one in [*given, root()]:
        assert one["securityContext"] == sidecar["securityContext"]
    for one in given:
        assert one["resources"]["requests"] == one["resources"]["limits"]
        assert one["image"] == sidecar["image"] == root()["image"]


def test_the_aggregator_is_no_engine() -> None:
    """Where one kustomization has both, it stays as it is."""
    found = kustomized(KUSTOMIZE / "overlays" / "leaderworkerset-forward")
    (deployment,) = [one for one in found if one["kind"] == "Deployment"]

    assert deployment == aggregator()["Deployment"]


class Cluster:
    """Directories in place of volumes and secrets, processes in place of containers.

    Args:
        directory: Of all of them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = [free_port() for _ in range(2)]
        secrets = directory / "secrets"
        secrets.mkdir()
        for name in ("exporter", "sidecar"):
            keys.generate(secrets, name)
        self.secret("key", secrets, "exporter.key", 0o440)
        self.secret("authorized", secrets, "sidecar.pub", 0o440)
        self.secret("forward", secrets, "exporter.pub", 0o444)
        self.secret("forward", secrets, "sidecar.key", 0o444)

    @property
    def page(self) -> str:
        """Where the aggregator is scraped."""
        return f"http://127.0.0.1:{self.ports[0]}/metrics"

    def secret(self, name: str, directory: Path, file: str, mode: int) -> None:
        """Mount a file as kubelet does: behind two links."""
        data = self.directory / "etc" / "sidestep" / name / "..2026"
        data.mkdir(parents=True, exist_ok=True)
        (data / file).write_bytes((directory / file).read_bytes())
        (data / file).chmod(mode)
        link = data.parent / "..data"
        if not link.is_symlink():
            link.symlink_to(data.name)
        (data.parent / file).symlink_to(f"..data/{file}")

    def here(self, pod: str, text: str) -> str:
        """A manifest's text with what is in a pod put somewhere on this host."""
        own = self.directory / pod
        for theirs, its in (
            ("tcp://*:9858", f"tcp://127.0.0.1:{self.ports[1]}"),
            ("tcp://sidestep-aggregator:9858", f"tcp://127.0.0.1:{self.ports[1]}"),
            ("--ingest.ipc-group=65532", f"--ingest.ipc-group={os.getgid()}"),
            ("/etc/sidestep/", f"{self.directory}/etc/sidestep/"),
            ("/run/sidestep", f"{own}/run"),
            ("/var/lib/sidestep", f"{own}/lib"),
        ):
            text = text.replace(theirs, its)
        return text

    @asynccontextmanager
    async def running(
        self, given: Resource, pod: str, more: Mapping[str, str] = {}
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """A container of ours; asked to end as Kubernetes does, and it does."""
        (self.directory / pod / "run-keys").mkdir(parents=True, exist_ok=True)
        found = {**defaults(), **environ(given, pod, more)}
        found["SIDESTEP_WEB_LISTEN_ADDRESS"] = f"127.0.0.1:{self.ports[0]}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sidestep", *(self.here(pod, one) for one in given["args"]),
            env={**os.environ, **{name: self.here(pod, text) for name, text in found.items()}},
        )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            assert await process.wait() == 0

    @asynccontextmanager
    async def leaf(
        self, component: str, pod: str, more: Mapping[str, str] = {}
    ) -> AsyncIterator[str]:
        """The init containers of a pod in their order; where its engine pushes."""
        given = container(component, "sidestep")
        copying = [self.here(pod, one) for one in container(component, "sidestep-keys")["command"]]
        (self.directory / pod / "run-keys").mkdir(parents=True, exist_ok=True)
        assert await exit_code(copying) == 0
        probe = [self.here(pod, one) for one in given["startupProbe"]["exec"]["command"]]
        async with self.running(given, pod, more):
            async with asyncio.timeout(60):
                while await exit_code(probe):
                    await asyncio.sleep(0.05)
            yield f"ipc://{probe[-1]}"

    async def until(self, wanted: Mapping[frozenset[tuple[str, str]], float]) -> None:
        """Return when the page has these tokens, by what labels say beside the engine's own."""
        found: Any = None
        try:
            async with asyncio.timeout(60):
                while found != wanted:
                    await asyncio.sleep(0.05)
                    found = await self._tokens()
        except TimeoutError:
            pytest.fail(f"{found} instead of {wanted}")

    async def _tokens(self) -> dict[frozenset[tuple[str, str]], float]:
        try:
            async with aiohttp.ClientSession() as session, session.get(self.page) as answer:
                page = parse(await answer.text())
        except aiohttp.ClientError:
            return {}
        if TOKENS not in page:
            return {}
        samples = page[TOKENS].samples
        return {
            frozenset(pair for pair in labels if pair[0] not in ("engine", "model_name")): value
            for (_, labels), value in samples.items()
        }


async def exit_code(command: list[str]) -> int:
    """Of one that ends by itself."""
    return await (await asyncio.create_subprocess_exec(*command)).wait()


def free_port() -> int:
    """One that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def of(**labels: str) -> frozenset[tuple[str, str]]:
    """Labels of a series."""
    return frozenset({"namespace": "llm", **labels}.items())


async def test_pods_of_a_group_are_on_one_page(tmp_path: Path) -> None:
    """Each with its name, over keys from secrets; a pod that is made anew goes on counting, and so does an aggregator."""
    cluster = Cluster(tmp_path)
    async with cluster.running(root(), "root"):
        async with (
            cluster.leaf("forward", "g-0") as leader,
            cluster.leaf("forward", "g-0-1") as worker,
        ):
            with closing(publisher(leader)) as one, closing(publisher(worker)) as other:
                one.push(count(5))
                other.push(count(7))
                await cluster.until({of(pod="g-0"): 5.0, of(pod="g-0-1"): 7.0})
        # Its volumes go with a pod.
        shutil.rmtree(tmp_path / "g-0-1")
        async with cluster.leaf("forward", "g-0-1") as worker:
            with closing(publisher(worker)) as other:
                other.push(count(3))
                await cluster.until({of(pod="g-0"): 5.0, of(pod="g-0-1"): 10.0})
    async with cluster.running(root(), "root"):
        await cluster.until({of(pod="g-0"): 5.0, of(pod="g-0-1"): 10.0})
