"""The plugin inside a real SGLang: what its collectors count is what our page shows."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from real_engines.comparison import (
    Page,
    assert_complete,
    assert_nothing_refused,
    count,
    engine_families,
    labels_of,
    parse,
    report,
    settled,
    settled_alone,
    shape,
    total,
    value,
)
from real_engines.load import Ask, Client, generated, reasons
from real_engines.processes import ExporterProcess, until
from real_engines.sglang_runs import BOUNDS, LABELLED, MIXED, PARALLEL
from real_engines.sglang_server import SglangServer
from sglang_pages import ALLOWED, says_nothing

pytestmark = pytest.mark.engine

RECORDED = Path(__file__).parents[1] / "data" / "page_sglang.txt.gz"
"""What SGLang showed of the same load beside the plugin."""
OUTSIDE = ("sglang:http_", "sglang:process_cpu_seconds", "sglang:routing_keys_active")
"""Families that no collector counts."""
REPORTED = ("sglang:gen_throughput", "sglang:decode_sum_seq_lens")
"""Gauges that hold what the last report of a busy scheduler said."""


@contextlib.asynccontextmanager
async def both(server: SglangServer, endpoint: str, home: Path) -> AsyncIterator[ExporterProcess]:
    """A server and an exporter, started; both are asked to end, and must."""
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter, server:
        await exporter.started()
        await server.started()
        yield exporter


def up(page: Page) -> float:
    """Engines of the model that feed. Others, without any label, are of processes that SGLang kills."""
    return value(page, "sidestep_engine_up", model_name="tiny")


async def agree_while_busy(
    server: SglangServer, exporter: ExporterProcess, client: Client
) -> dict[str, float]:
    """Gauges that are 0 on an idle engine, on both pages while some requests run."""
    asks = [Ask(client.text(30), 1500) for _ in range(2)]
    seen: dict[str, float] = {}

    async def same() -> bool:
        nonlocal seen
        before = parse(await server.page())
        ours = parse(await exporter.page())
        after = parse(await server.page())
        seen, *theirs = (
            {name: value(page, name) for name in REPORTED} for page in (ours, before, after)
        )
        return all(seen.values()) and theirs == [seen, seen]

    watching = asyncio.create_task(until(same, what="a busy engine's gauges on our page"))
    answers = await client.ask_all(asks)
    await watching
    assert_complete(answers)
    return seen


async def test_beside_the_collectors_both_pages_agree(
    sglang_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """After a mixed load all of SGLang's page is on ours, and no more; while it runs its gauges are.

    An engine that is asked to end says goodbye.
    """
    environ = {"SIDESTEP_ENDPOINT": endpoint, **MIXED.environ}
    server = SglangServer(sglang_python, tiny, home, environ=environ)
    async with both(server, endpoint, home) as exporter:
        async with Client(server.base) as client:
            busy = await agree_while_busy(server, exporter, client)
            answers = await MIXED.load(client)
        theirs, ours, found = await settled(server, exporter)
        report("sglang beside", theirs, answers, **busy)
        code = await server.stop()
        after = await settled_alone(exporter, lambda page: not up(page))

    assert [] == found
    assert [400] == [answer.status for answer in answers if answer.status != 200]
    assert_complete([answer for answer in answers if answer.status == 200])
    assert_nothing_refused(ours)
    # The load did reach every state that it is there for.
    assert value(theirs, "sglang:num_retracted_requests") > 0
    assert value(theirs, "sglang:evicted_tokens") > 0
    assert value(theirs, "sglang:cached_tokens") > 0
    assert value(theirs, "sglang:num_aborted_requests") > 0
    assert value(ours, "sglang:http_requests", endpoint="/metrics") > 0
    assert {"stop": 12, "length": 56} == reasons(answers)
    assert sum(answer.left for answer in answers) == 5
    assert (code, up(after)) == (0, 0)


async def test_instead_of_the_collectors(
    sglang_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """SGLang's collectors count nothing; our page has what it had, with what the clients were told."""
    environ = {"SIDESTEP_ENDPOINT": endpoint, "SIDESTEP_SGLANG_MODE": "instead", **MIXED.environ}
    server = SglangServer(sglang_python, tiny, home, environ=environ)
    asked = "sglang:num_requests"
    async with both(server, endpoint, home) as exporter:
        before = await settled_alone(exporter, lambda page: value(page, asked) > 0)
        async with Client(server.base) as client:
            answers = await client.mixed(leave=False, streams=2)
        # Of a request with two samples SGLang counts the prompt's own run as a third.
        finished = 66 + 2 * 2

        def all_in(page: Page) -> bool:
            return value(page, asked) - value(before, asked) >= finished

        ours = await settled_alone(exporter, all_in)
        theirs = parse(await server.page())
        report("sglang instead", ours, answers)

    def moved(family: str, **labels: str) -> float:
        return value(ours, family, **labels) - value(before, family, **labels)

    assert {"length": 56, "stop": 12} == reasons(answers)
    assert generated(answers) == moved("sglang:generation_tokens")
    assert finished == moved(asked)
    latency = "sglang:e2e_request_latency_seconds"
    assert finished == count(ours, latency) - count(before, latency)
    tokens = "sglang:generation_tokens_histogram"
    assert generated(answers) == total(ours, tokens) - total(before, tokens)
    assert moved("sglang:num_retracted_requests") > 0
    counted = {
        (name, labels): number
        for name, family in engine_families(theirs).items()
        for labels, number in family.samples.items()
        if number and not name.startswith(OUTSIDE)
    }
    assert {} == counted
    recorded = parse(gzip.decompress(RECORDED.read_bytes()).decode())
    silent = {name for name, (rule, _) in ALLOWED.items() if rule is says_nothing}
    # Nobody left in this run; and who asks for what outside of the load is not the same.
    apart = {"sglang:num_aborted_requests", *silent}
    theirs_beside = {name: form for name, form in shape(recorded).items() if name not in apart}
    assert theirs_beside.keys() == engine_families(ours).keys()
    assert {
        name: form for name, form in theirs_beside.items() if not name.startswith("sglang:http_")
    } == {name: form for name, form in shape(ours).items() if not name.startswith("sglang:http_")}
    assert_nothing_refused(ours)


async def test_two_ranks(sglang_python: Path, tiny: Path, home: Path, endpoint: str) -> None:
    """Both pages agree rank by rank, and each rank is an engine that can be down."""
    environ = {"SIDESTEP_ENDPOINT": endpoint, **PARALLEL.environ}
    server = SglangServer(sglang_python, tiny, home, PARALLEL.arguments, environ)
    async with both(server, endpoint, home) as exporter:
        async with Client(server.base) as client:
            answers = await PARALLEL.load(client)
        theirs, ours, found = await settled(server, exporter)
        report("sglang two ranks", theirs, answers, streams=value(ours, "sidestep_streams"))
        await server.stop()
        after = await settled_alone(exporter, lambda page: not up(page))

    assert [] == found
    assert [400] == [answer.status for answer in answers if answer.status != 200]
    for rank in "01":
        assert value(ours, "sglang:realtime_tokens", dp_rank=rank, mode="decode") > 0
    # Two schedulers, a tokenizer, a detokenizer, and what hands out requests.
    assert value(ours, "sidestep_streams") == 5
    assert up(after) == 0
    assert_nothing_refused(ours)


async def test_labels_and_bounds_of_the_administrator(
    sglang_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Priorities, labels of requests, labels of the deployment and other bounds are on both pages."""
    environ = {"SIDESTEP_ENDPOINT": endpoint, **LABELLED.environ}
    server = SglangServer(sglang_python, tiny, home, LABELLED.arguments, environ)
    async with both(server, endpoint, home) as exporter:
        async with Client(server.base) as client:
            answers = await LABELLED.load(client)
        theirs, ours, found = await settled(server, exporter)
        report("sglang labels", theirs, answers)

    assert [] == found
    assert_complete(answers)
    queue = labels_of(ours, "sglang:num_queue_reqs")
    assert {"", "0", "1", "2", "3"} == {labels.get("priority", "") for labels in queue}
    finished = labels_of(ours, "sglang:num_requests")
    assert {("", ""), ("red", ""), ("blue", "1")} == {
        (labels.get("team", ""), labels.get("tier", "")) for labels in finished
    }
    assert all(labels["site"] == "here" for labels in [*queue, *finished])
    for family, bounds in BOUNDS.items():
        shown = {labels["le"] for labels in labels_of(ours, family) if "le" in labels}
        assert {*bounds.split(), "+Inf"} == shown
    assert_nothing_refused(ours)
