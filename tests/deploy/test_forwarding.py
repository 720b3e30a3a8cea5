"""Forwarding: manifests of downstream exporters and of the aggregator, and processes that follow them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
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
from ports import free_ports
from sidestep.config.parsing import source
from sidestep.transport import keys

TOKENS = "vllm:generation_tokens"


def container(component: str, name: str) -> Resource:
    """Return a container that a component injects."""
    return named(template(component)["initContainers"], name)


def aggregator() -> dict[str, Resource]:
    """Return the aggregator's resources by kind."""
    found = resources((KUSTOMIZE / "aggregator" / "aggregator.yaml").read_text())
    return {one["kind"]: one for one in found}


def aggregator_container() -> Resource:
    """Return the aggregator's container."""
    ((_, pod),) = pods(aggregator()["Deployment"])
    found: Resource = pod["containers"][0]
    return found


def environ(given: Resource, pod: str, more: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the variables of a container in a pod of the namespace llm."""
    fields = {"metadata.namespace": "llm", "metadata.name": pod}
    return manifests.environ(given, fields, more)


def test_a_downstream_exporter_has_no_page() -> None:
    """A downstream exporter has no page, no port and no probe over HTTP."""
    downstream = container("forward", "sidestep")
    config = settings(downstream, {**defaults(), **environ(downstream, "p-0")})

    assert config.web_listen_address == ()
    assert "ports" not in downstream
    assert "httpGet" not in str(downstream)
    assert config.ingest_endpoint == (f"ipc://{downstream['startupProbe']['exec']['command'][-1]}",)
    assert config.forward_label == (("namespace", "llm"), ("pod", "p-0"))


def test_the_longest_pod_names_make_a_valid_source() -> None:
    """The source name is valid for the longest names of namespace and pod."""
    downstream = container("forward", "sidestep")
    longest = {"POD_NAMESPACE": "n" * 63, "POD_NAME": "p" * 63}
    text = named(downstream["env"], "SIDESTEP_FORWARD_SOURCE")["value"]
    given = re.sub(r"\$\((\w+)\)", lambda name: longest[name[1]], text)

    assert set(re.findall(r"\$\((\w+)\)", text)) == set(longest)
    assert source(given) == given


def test_a_downstream_exporter_reaches_the_aggregator() -> None:
    """A downstream exporter uses the service's name and port, and finds its keys."""
    downstream, copying = (container("forward", name) for name in ("sidestep", "sidestep-keys"))
    service = aggregator()["Service"]
    port = named(service["spec"]["ports"], "ingest")
    mounts = {one["name"]: one["mountPath"] for one in copying["volumeMounts"]}
    found = environ(downstream, "p-0")
    target, *sources = copying["command"][4:]

    assert found["SIDESTEP_FORWARD"] == f"tcp://{service['metadata']['name']}:{port['port']}"
    assert (
        named(aggregator_container()["ports"], port["targetPort"])["containerPort"] == port["port"]
    )
    assert settings(aggregator_container(), defaults()).ingest_endpoint == (
        f"tcp://*:{port['port']}",
    )
    assert target == mounts["sidestep-keys"]
    assert named(downstream["volumeMounts"], "sidestep-keys")["mountPath"] == target
    assert {str(Path(one).parent) for one in sources} == {mounts["sidestep-forward"]}
    assert {found["SIDESTEP_SERVER_KEY"], found["SIDESTEP_CLIENT_KEY"]} == {
        f"{target}/{Path(one).name}" for one in sources
    }


def test_secrets_match_the_documented_commands() -> None:
    """Secrets and their files are those that the commands in docs/kubernetes.md create."""
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
        mounted["key"]["secretName"]: {
            Path(settings(aggregator_container(), defaults()).ingest_curve_key).name
        },
        mounted["authorized"]["secretName"]: {"sidecar.pub"},
        forward["secretName"]: copied,
    }
    # Readable by the group of fsGroup, or, in a pod without one, by all containers with the volume.
    assert {one["defaultMode"] for one in mounted.values()} == {0o440}
    assert (
        pod["securityContext"]["fsGroup"] == aggregator_container()["securityContext"]["runAsGroup"]
    )
    assert forward["defaultMode"] == 0o444
    holders = [
        one["name"]
        for one in template("forward")["initContainers"] + template("forward")["containers"]
        if "sidestep-forward" in str(one.get("volumeMounts"))
    ]
    assert holders == ["sidestep-keys"]


def test_all_containers_are_hardened() -> None:
    """All containers have the sidecar's security context and keep the pod's QoS class."""
    sidecar = container("component", "sidestep")
    given = template("forward")["initContainers"]

    for one in [*given, aggregator_container()]:
        assert one["securityContext"] == sidecar["securityContext"]
    for one in given:
        assert one["resources"]["requests"] == one["resources"]["limits"]
        assert one["image"] == sidecar["image"] == aggregator_container()["image"]


def test_nothing_is_injected_into_the_aggregator() -> None:
    """Nothing is injected into the aggregator."""
    found = kustomized(KUSTOMIZE / "overlays" / "leaderworkerset-forward")
    (deployment,) = [one for one in found if one["kind"] == "Deployment"]

    assert deployment == aggregator()["Deployment"]


class Cluster:
    """Directories in place of volumes and secrets, and processes in place of containers.

    Args:
        directory: Directory for all of them.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ports = free_ports(2)
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
        """URL of the aggregator's metrics page."""
        return f"http://127.0.0.1:{self.ports[0]}/metrics"

    def secret(self, name: str, directory: Path, file: str, mode: int) -> None:
        """Mount a file as the kubelet does: behind two links."""
        data = self.directory / "etc" / "sidestep" / name / "..2026"
        data.mkdir(parents=True, exist_ok=True)
        (data / file).write_bytes((directory / file).read_bytes())
        (data / file).chmod(mode)
        link = data.parent / "..data"
        if not link.is_symlink():
            link.symlink_to(data.name)
        (data.parent / file).symlink_to(f"..data/{file}")

    def here(self, pod: str, text: str) -> str:
        """Replace addresses and paths of a manifest by those on this host."""
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
        """Run a container of sidestep, and stop it as Kubernetes does."""
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
    async def pod(
        self, component: str, pod: str, more: Mapping[str, str] = {}
    ) -> AsyncIterator[str]:
        """Run the init containers of a pod in order; yield the endpoint for its engine."""
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
        """Wait until the page has these token counts, by the labels that forwarding adds."""
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
    """Run a command to its end and return its exit code."""
    return await (await asyncio.create_subprocess_exec(*command)).wait()


def added_labels(**labels: str) -> frozenset[tuple[str, str]]:
    """Return the labels that forwarding adds to a series."""
    return frozenset({"namespace": "llm", **labels}.items())


async def test_pods_of_a_group_are_on_one_page(tmp_path: Path) -> None:
    """Pods of a group share one page, whose counters survive new pods and a new aggregator."""
    cluster = Cluster(tmp_path)
    async with cluster.running(aggregator_container(), "aggregator"):
        async with (
            cluster.pod("forward", "g-0") as leader,
            cluster.pod("forward", "g-0-1") as worker,
        ):
            with closing(publisher(leader)) as one, closing(publisher(worker)) as other:
                one.push(count(5))
                other.push(count(7))
                await cluster.until({added_labels(pod="g-0"): 5.0, added_labels(pod="g-0-1"): 7.0})
        # A pod's volumes are deleted with it.
        shutil.rmtree(tmp_path / "g-0-1")
        async with cluster.pod("forward", "g-0-1") as worker:
            with closing(publisher(worker)) as other:
                other.push(count(3))
                await cluster.until({added_labels(pod="g-0"): 5.0, added_labels(pod="g-0-1"): 10.0})
    async with cluster.running(aggregator_container(), "aggregator"):
        await cluster.until({added_labels(pod="g-0"): 5.0, added_labels(pod="g-0-1"): 10.0})
