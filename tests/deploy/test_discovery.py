"""Discovery of the sidecar by a real Prometheus with Kubernetes service discovery."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from exporters import Start
from manifests import KUSTOMIZE, ROOT, Resource, kustomized, named, pods
from prometheus_server import BINARIES, Prometheus

VERSION = {"resourceVersion": "1"}
END: Resource = {
    "kind": "Pod",
    "apiVersion": "v1",
    "metadata": {**VERSION, "annotations": {"k8s.io/initial-events-end": "true"}},
}
"""The bookmark after which a client has all initial events."""


@asynccontextmanager
async def kubernetes(*found: Resource) -> AsyncIterator[str]:
    """Run an API server that lists these pods; yield its URL."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            listed = {"kind": "PodList", "apiVersion": "v1", "metadata": VERSION, "items": found}
            return web.json_response(listed)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        if "sendInitialEvents" in request.query:
            events = [{"type": "ADDED", "object": one} for one in found]
            for event in [*events, {"type": "BOOKMARK", "object": END}]:
                await stream.write(json.dumps(event).encode() + b"\n")
        # Nothing changes until the client goes.
        await asyncio.Event().wait()
        return stream

    app = web.Application()
    app.router.add_get("/api/v1/pods", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


def pod(specification: Resource, name: str, port: int) -> Resource:
    """Return a running pod on this host whose sidecar listens on ``port``."""
    specification = copy.deepcopy(specification)
    for container in specification["initContainers"]:
        for one in container.get("ports", ()):
            one["containerPort"] = port
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "llm", "uid": name, "labels": {"app": name}},
        "spec": {**specification, "nodeName": "node-1"},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "hostIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


async def test_prometheus_finds_the_sidecar_by_its_ports_name(tmp_path: Path, start: Start) -> None:
    """The example configuration finds the sidecar, an init container, and no other target."""
    binary = BINARIES["3"]
    if binary is None:
        pytest.skip("Debian 12's Prometheus was built without Kubernetes (make tools)")
    (deployment,) = kustomized(KUSTOMIZE / "overlays" / "llm-d")
    ((_, specification),) = pods(deployment)
    assert named(specification["containers"], "vllm")["ports"]
    async with start() as exporter:
        address = exporter.url.split("/")[2]
        running = pod(specification, "decode-0", int(address.split(":")[1]))
        async with kubernetes(running) as api:
            example = ROOT / "deploy" / "examples" / "prometheus.yml"
            config: dict[str, Any] = yaml.safe_load(example.read_text())
            config["global"] = {"scrape_interval": "200ms", "scrape_timeout": "200ms"}
            (discovery,) = config["scrape_configs"][0]["kubernetes_sd_configs"]
            discovery["api_server"] = api
            file = tmp_path / "prometheus.yml"
            file.write_text(yaml.safe_dump(config))
            server = Prometheus(binary, file, f"--storage.tsdb.path={tmp_path}/tsdb")
            try:
                await asyncio.to_thread(server.start)
                await asyncio.to_thread(server.until, "up", lambda found: found == {address: 1.0})
                (series,) = await asyncio.to_thread(server.ask, "sidestep_build_info")
            finally:
                await asyncio.to_thread(server.stop)

    reported = series["metric"]
    assert (reported["namespace"], reported["pod"], reported["job"]) == (
        "llm",
        "decode-0",
        "sidestep",
    )
    # No label of the target is also one of the exporter's.
    assert not [name for name in reported if name.startswith("exported_")]
