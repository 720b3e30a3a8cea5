"""A real Triton: the exporter's page of its statistics equals its own page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from exporters import until
from real_engines.comparison import Found, Page, assert_nothing_refused, labels_of, parse, value
from real_engines.processes import ExporterProcess
from real_engines.triton_load import Ask, Client, succeeded
from real_engines.triton_pages import FAILURE, SUCCESS, answered, settled, state
from real_engines.triton_server import Place, TritonServer, exporter_of
from triton_fields import documented_fields

pytestmark = pytest.mark.engine

TAGS = {"_team": "blue", "_tier": 'free "trial"'}
"""Labels of a model that are in its configuration and not in its statistics."""
POLLS = "sidestep_triton_polls"
BUSY = "sidestep_triton_busy_seconds"
MEAN = "sidestep_triton_interval_mean_seconds"
KEY = {"x-key": "s3cret"}


LIST_FIELDS = """
import json
from tritonclient.grpc import service_pb2

def paths(message, before=""):
    for field in message.fields:
        name = before + field.name + ("[]" if field.is_repeated else "")
        if field.message_type is None:
            yield name
        else:
            yield from paths(field.message_type, name + ".")

print(json.dumps(list(paths(service_pb2.ModelStatistics.DESCRIPTOR))))
"""
"""A script that writes the paths of all plain fields of Triton's own message."""


def test_every_field_of_the_extension_is_listed(triton_python: Path) -> None:
    """The fields of docs/triton-fields.md are those of Triton's own client."""
    done = subprocess.run(
        [triton_python, "-c", LIST_FIELDS], capture_output=True, text=True, check=True
    )
    listed = {path.replace(".value.", ".") for path in json.loads(done.stdout)}

    assert listed == documented_fields().keys()


async def refused(exporter: ExporterProcess) -> Page:
    """Return the exporter's page once Triton has refused a poll."""
    page = Page()

    async def is_refused() -> bool:
        nonlocal page
        page = parse(await exporter.page())
        return value(page, POLLS, outcome="restricted") > 0

    await until(is_refused, 60, "a poll that was refused")
    return page


async def started(
    stack: contextlib.AsyncExitStack, home: Path, targets: Mapping[str, str]
) -> dict[str, ExporterProcess]:
    """Start an exporter per target, and return them by name; ``stack`` stops them."""
    exporters = {
        name: await stack.enter_async_context(exporter_of(target, home, name))
        for name, target in targets.items()
    }
    return {name: await exporter.started() for name, exporter in exporters.items()}


async def test_counts_are_those_of_its_own_page(triton_python: Path, home: Path) -> None:
    """With its own page or without, from any exporter: all agree."""
    place = Place.chosen(triton_python, home)
    targets = {
        "http": place.base,
        "http-page": f"{place.base},metrics={place.page}",
    }
    found: dict[str, Found] = {}
    pages: dict[str, Page] = {}
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(TritonServer(place))
        exporters = await started(stack, home, targets)
        await server.started()
        client = await stack.enter_async_context(Client(place))
        answers = await client.mixed()
        # An exporter that starts now has earlier counts, too.
        exporters |= await started(stack, home, {"late": place.base})
        answers += await client.mixed()
        for name, exporter in exporters.items():
            passed = name.endswith("-page")
            pages[name], found[name] = await settled(server, exporter, passed=passed)

    assert {name: [] for name in exporters} == found
    for name, page in pages.items():
        assert state(page) == "up"
        assert_nothing_refused(page)
        assert (
            value(page, SUCCESS, model="cached", version="3") == succeeded(answers)["cached", "3"]
        )
        assert value(page, SUCCESS, model="queued", **TAGS) > 0
        assert value(page, POLLS, outcome="ok") > 0
        assert (value(page, FAILURE, reason="BACKEND") > 0) == name.endswith("-page")


async def test_where_its_own_page_counts_nothing(triton_python: Path, home: Path) -> None:
    """Without counters on its own page, and with its statistics closed, all is counted."""
    place = Place.chosen(triton_python, home)
    ((key, secret),) = KEY.items()
    arguments = [
        "--metrics-config=counter_latencies=false",
        f"--http-restricted-api=statistics,metadata,model-config:{key}={secret}",
    ]
    targets = {"inside": f"{place.base},header.{key}={secret}", "outside": place.base}
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            TritonServer(place, ["batched", "queued"], arguments, KEY)
        )
        await server.started()
        exporters = await started(stack, home, targets)
        client = await stack.enter_async_context(Client(place))
        answers = await client.ask_all(Ask("batched", [1.0] * (1 + n % 2)) for n in range(40))
        answers += await client.ask_in_turn(Ask("queued") for _ in range(3))
        native = parse(await server.page())
        inside, found = await settled(server, exporters["inside"], native=False)
        outside = await refused(exporters["outside"])

    assert value(native, SUCCESS) == 0
    assert found == []
    assert answered(inside) == succeeded(answers)
    assert value(inside, SUCCESS, **TAGS) == succeeded(answers)["queued", "1"]
    assert state(outside) == "down"
    assert "restricted" in exporters["outside"].output
    assert answered(outside) == {}
    assert value(outside, POLLS) == value(outside, POLLS, outcome="restricted")


async def test_named_versions_are_polled_alone(triton_python: Path, home: Path) -> None:
    """With namespaces, Triton serves statistics of named models only; one that it lacks is no error."""
    place = Place.chosen(triton_python, home)
    models = ["batched", "cached"]
    arguments = ["--model-namespacing=true", "--allow-metrics=false"]
    names = "model=cached/3,model=cached/2,model=nobody/1,model=batched"
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(TritonServer(place, models, arguments))
        await server.started()
        (exporter,) = (await started(stack, home, {"http": f"{place.base},{names}"})).values()
        client = await stack.enter_async_context(Client(place))
        answers = await client.ask_in_turn(Ask("cached", version=version) for version in "1333")
        answers += await client.ask_all(Ask("batched", [1.0] * (1 + n % 2)) for n in range(40))
        expected = succeeded(answer for answer in answers if answer.ask.version != "1")
        page = Page()

        async def is_counted() -> bool:
            nonlocal page
            page = parse(await exporter.page())
            return answered(page) == expected

        await until(is_counted, 60, "the requests of named versions")

    shown = {(labels["model"], labels["version"]) for labels in labels_of(page, SUCCESS)}
    assert shown == {("batched", "1"), ("cached", "3")}
    assert value(page, POLLS) == value(page, POLLS, outcome="ok")
    assert state(page) == "up"


async def test_a_long_execution_counts_when_it_ends(triton_python: Path, home: Path) -> None:
    """A running execution is on no page; when it ends, it is in the totals and in one interval's gauges."""
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

            await until(is_counted, 60, "a request that is counted")
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
