"""A real Triton: its statistics, by way of the exporter, against its own page."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from real_engines.comparison import Found, Page, assert_nothing_refused, labels_of, parse, value
from real_engines.processes import ExporterProcess, until
from real_engines.triton_load import STREAMS, Ask, Client, statuses, succeeded
from real_engines.triton_pages import FAILURE, SUCCESS, answered, settled, state
from real_engines.triton_server import Place, TritonServer, exporter_of, ingest

pytestmark = pytest.mark.engine

TAGS = {"_team": "blue", "_tier": 'free "trial"'}
"""Labels of a model that its configuration has, and its statistics have not."""
POLLS = "sidestep_triton_polls"
BUSY = "sidestep_triton_busy_seconds"
MEAN = "sidestep_triton_interval_mean_seconds"
KEY = {"x-key": "s3cret"}


async def refused(exporter: ExporterProcess) -> Page:
    """The page once a poll was."""
    page = Page()

    async def has_been() -> bool:
        nonlocal page
        page = parse(await exporter.page())
        return value(page, POLLS, outcome="restricted") > 0

    await until(has_been, what="a poll that was refused")
    return page


async def test_its_own_page_and_its_statistics_tell_of_the_load(
    triton_python: Path, home: Path
) -> None:
    """The models do what the other tests take for granted, and nothing is left of a server."""
    place = Place.chosen(triton_python, home)
    async with TritonServer(place) as server, Client(place) as client:
        await server.started()
        answers = await client.mixed()
        page = parse(await server.page())
        found = await server.statistics()
        was_shared = server.shared()
        ended = await server.end()
        left = server.alive(), server.shared()

    asked = statuses(answers)
    assert asked["batched"] == {200: 33, 400: 1}
    assert asked["cached"] == {200: 12, 404: 1}
    assert asked["refusing"] == {200: 3, 500: 2}
    assert asked["raising"] == {200: 2, 500: 2}
    assert asked["queued"].keys() == {200, 503}
    assert asked["chain"].keys() == {200, 503}
    assert asked["nobody"] == {404: 1}
    counted = {of: stats["inference_stats"] for of, stats in found.items()}
    by_clients = succeeded(answers)
    for of in (("cached", "1"), ("cached", "3"), ("raising", "1"), ("chain", "1")):
        assert counted[of]["success"]["count"] == by_clients[of]
    # To Triton, error responses are answers like any other.
    assert counted["refusing", "1"]["success"]["count"] == 5
    assert counted["streaming", "1"]["success"]["count"] == len(STREAMS)
    assert counted["raising", "1"]["fail"]["count"] == 2
    assert counted["cached", "1"]["cache_hit"]["count"] == 4
    assert counted["cached", "3"]["cache_hit"]["count"] == 3
    assert max(batch["batch_size"] for batch in found["batched", "1"]["batch_stats"]) == 8
    assert value(page, FAILURE, model="queued", reason="REJECTED", **TAGS) > 0
    assert was_shared
    assert ended.code == 0
    assert left == ([], [])


async def test_counts_are_those_of_its_own_page(triton_python: Path, home: Path) -> None:
    """Over HTTP or gRPC, with its own page or without, polled or forwarded: all agree."""
    place = Place.chosen(triton_python, home)
    targets = {
        "http": place.base,
        "http-page": f"{place.base},metrics={place.page}",
        "grpc": place.grpc_target,
        "grpc-page": f"{place.grpc_target},metrics={place.page}",
        "late": place.base,
        "upstream": "",
    }
    found: dict[str, Found] = {}
    pages: dict[str, Page] = {}
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(TritonServer(place))
        exporters: dict[str, ExporterProcess] = {}

        async def listen(name: str) -> None:
            exporter = await stack.enter_async_context(exporter_of(targets[name], home, name))
            exporters[name] = await exporter.started()

        for name in ("http", "http-page", "grpc", "grpc-page", "upstream"):
            await listen(name)
        forward = ["--forward", ingest(home, "upstream"), "--forward.interval", "0.2"]
        downstream = exporter_of(place.base, home, "downstream", *forward)
        await stack.enter_async_context(downstream)
        await server.started()
        client = await stack.enter_async_context(Client(place))
        answers = await client.mixed()
        # One that comes now has what was counted before, too.
        await listen("late")
        answers += await client.mixed()
        for name, exporter in exporters.items():
            passed = "metrics=" in targets[name]
            pages[name], found[name] = await settled(server, exporter, passed=passed)

    assert {name: [] for name in targets} == found
    for name, page in pages.items():
        assert state(page) == "up"
        assert_nothing_refused(page)
        assert (
            value(page, SUCCESS, model="cached", version="3") == succeeded(answers)["cached", "3"]
        )
        assert value(page, SUCCESS, model="queued", **TAGS) > 0
        assert value(page, POLLS, outcome="ok") > 0
        assert (value(page, FAILURE, reason="BACKEND") > 0) == ("metrics=" in targets[name])


async def test_where_its_own_page_counts_nothing(triton_python: Path, home: Path) -> None:
    """Without counters on its own page, and with its statistics closed, all is counted."""
    place = Place.chosen(triton_python, home)
    ((key, secret),) = KEY.items()
    closed = f"statistics,metadata,model-config:{key}={secret}"
    arguments = [
        "--metrics-config=counter_latencies=false",
        f"--http-restricted-api={closed}",
        f"--grpc-restricted-protocol={closed}",
    ]
    targets = {
        "http": f"{place.base},header.{key}={secret}",
        "grpc": f"{place.grpc_target},header.triton-grpc-protocol-{key}={secret}",
        "http-outside": place.base,
        "grpc-outside": place.grpc_target,
    }
    pages: dict[str, Page] = {}
    found: dict[str, Found] = {}
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            TritonServer(place, ["batched", "queued"], arguments, KEY)
        )
        await server.started()
        exporters: dict[str, ExporterProcess] = {}
        for name, target in targets.items():
            exporter = await stack.enter_async_context(exporter_of(target, home, name))
            exporters[name] = await exporter.started()
        client = await stack.enter_async_context(Client(place))
        answers = await client.ask_all(Ask("batched", [1.0] * (1 + n % 2)) for n in range(40))
        answers += await client.ask_in_turn(Ask("queued") for _ in range(3))
        native = parse(await server.page())
        for name in ("http", "grpc"):
            pages[name], found[name] = await settled(server, exporters[name], native=False)
        for name in ("http-outside", "grpc-outside"):
            pages[name] = await refused(exporters[name])

    assert value(native, SUCCESS) == 0
    assert {"http": [], "grpc": []} == found
    for name in ("http", "grpc"):
        assert answered(pages[name]) == succeeded(answers)
        assert value(pages[name], SUCCESS, **TAGS) == succeeded(answers)["queued", "1"]
    for name in ("http-outside", "grpc-outside"):
        assert state(pages[name]) == "down"
        assert "restricted" in exporters[name].output
        assert answered(pages[name]) == {}
        assert value(pages[name], POLLS) == value(pages[name], POLLS, outcome="restricted")


async def test_namespaces_and_no_page_of_its_own(triton_python: Path, home: Path) -> None:
    """Statistics that Triton gives only model by model, with its own page off, are all there."""
    place = Place.chosen(triton_python, home)
    models = ["batched", "cached"]
    arguments = ["--model-namespacing=true", "--allow-metrics=false"]
    pages: dict[str, Page] = {}
    found: dict[str, Found] = {}
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(TritonServer(place, models, arguments))
        await server.started()
        exporters: dict[str, ExporterProcess] = {}
        for name, target in {"http": place.base, "grpc": place.grpc_target}.items():
            exporter = await stack.enter_async_context(exporter_of(target, home, name))
            exporters[name] = await exporter.started()
        client = await stack.enter_async_context(Client(place))
        answers = await client.ask_all(Ask("batched", [1.0] * (1 + n % 2)) for n in range(40))
        answers += await client.ask_in_turn(Ask("cached", version="1") for _ in range(3))
        for name, exporter in exporters.items():
            pages[name], found[name] = await settled(server, exporter, *models, native=False)

    assert {"http": [], "grpc": []} == found
    for page in pages.values():
        assert state(page) == "up"
        assert answered(page) == succeeded(answers)


async def test_a_long_execution_counts_when_it_ends(triton_python: Path, home: Path) -> None:
    """Nothing tells of it before; then it is in the totals, and for one interval in the gauges."""
    place = Place.chosen(triton_python, home, "slow")
    pages: list[Page] = []
    target = f"{place.base},interval=0.5"
    async with TritonServer(place, ["slow"]) as server, exporter_of(target, home) as exporter:
        await server.started()
        await exporter.started()
        async with Client(place) as client:
            asked = asyncio.create_task(client.ask(Ask("slow")))

            async def is_counted() -> bool:
                pages.append(parse(await exporter.page()))
                return asked.done() and value(pages[-1], SUCCESS) == 1

            await until(is_counted, what="a request that is counted")
            answer = await asked
        _, found = await settled(server, exporter)

    assert answer.status == 200
    assert found == []
    before = [page for page in pages if value(page, SUCCESS) == 0]
    assert sum(state(page) == "up" for page in before) > 3
    for page in before:
        assert value(page, BUSY) == 0
        assert not labels_of(page, MEAN)
    mean = value(pages[-1], MEAN, stage="request")
    assert 2.0 < mean < 3.0
    assert 2.0 < value(pages[-1], BUSY) <= mean
    assert value(pages[-1], "sidestep_triton_busy_ratio") > 1
