"""The plugin inside a real SGLang: the exporter's page equals the collectors' own."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import aiohttp
import pytest

from exporters import until
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
from real_engines.processes import ExporterProcess, Server
from real_engines.sglang_runs import BOUNDS, LABELLED, MIXED, PARALLEL
from real_engines.sites import SglangSite
from sglang_pages import ALLOWED, says_nothing

pytestmark = pytest.mark.engine

RECORDED = Path(__file__).parents[1] / "data" / "page_sglang.txt.gz"
"""SGLang's page after the same load beside the plugin."""
DOCUMENT = Path(__file__).parents[2] / "docs" / "sglang.md"
OUTSIDE = ("sglang:http_", "sglang:process_cpu_seconds", "sglang:routing_keys_active")
"""Families that no collector counts."""
AT_ZERO = {
    "prefill_effective_tokens_total",
    "scheduler_idle_seconds_total",
    "scheduler_process_cpu_seconds_total",
    "scheduler_stage_seconds_total",
    "dp_attention_tokens_total",
    "dp_attention_pairs_total",
    "dp_attention_steps_total",
    "dp_attention_token_imbalance_ratio",
    "dp_attention_sync_wait_seconds",
}
"""Families that a scheduler's collector starts at 0 when it is made, before it can be tapped."""
REPORTED = ("sglang:gen_throughput", "sglang:decode_sum_seq_lens")
"""Gauges with values of a busy scheduler's last report."""


def up(page: Page) -> float:
    """Return how many engines of the model are up.

    Others, without any label, belong to processes that SGLang kills.
    """
    return value(page, "sidestep_engine_up", model_name="tiny")


async def agree_while_busy(
    server: Server, exporter: ExporterProcess, client: Client
) -> dict[str, float]:
    """Return gauges that are 0 on an idle engine, once both pages agree on them while requests run."""
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

    watching = asyncio.create_task(until(same, 60, "a busy engine's gauges on our page"))
    answers = await client.ask_all(asks)
    await watching
    assert_complete(answers)
    return seen


async def times_in_chunks(base: str) -> list[list[float]]:
    """Return the scheduler's times in each chunk of a stream of SGLang's own API, one a token."""
    asked = {"max_new_tokens": 12, "ignore_eos": True}
    body = {"text": "a prompt", "sampling_params": asked, "stream": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base}/generate", json=body) as response,
    ):
        chunks = [
            json.loads(line.removeprefix(b"data: "))["meta_info"]
            async for line in response.content
            if line.startswith(b"data: {")
        ]
    names = "queue_time", "forward_entry_time", "prefill_finished_time"
    return [[chunk[name] for name in names] for chunk in chunks]


async def test_beside_the_collectors_both_pages_agree(sglang: SglangSite) -> None:
    """After a mixed load all of SGLang's page is on ours, and no more; while it runs its gauges are.

    An engine that is asked to end closes its streams.
    """
    server = sglang.server(environ=MIXED.environ)
    async with sglang.with_exporter(server) as exporter:
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


async def test_instead_of_the_collectors(sglang: SglangSite) -> None:
    """SGLang's collectors count nothing; our page has their families, with the clients' totals."""
    server = sglang.server(environ={"SIDESTEP_SGLANG_MODE": "instead", **MIXED.environ})
    asked = "sglang:num_requests"
    async with sglang.with_exporter(server) as exporter:
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
        times = await times_in_chunks(server.base)

    assert "latencies are recorded without SGLang's collect_metrics" in server.output
    assert "the times of requests are sent when they change" in server.output
    assert "SGLang's own functions" not in server.output
    assert len(times) > 4
    assert [pytest.approx(times[0], abs=1e-3)] * len(times) == times
    assert min(times[0]) > 0

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
    left = [name for name, family in engine_families(theirs).items() if family.samples]
    assert {f"sglang:{name.removesuffix('_total')}" for name in AT_ZERO} == {
        name for name in left if not name.startswith(OUTSIDE)
    }
    recorded = parse(gzip.decompress(RECORDED.read_bytes()).decode())
    silent = {name for name, (rule, _) in ALLOWED.items() if rule is says_nothing}
    # No client left in this run; and requests outside of the load are not the same.
    apart = {"sglang:num_aborted_requests", *silent}
    theirs_beside = {name: form for name, form in shape(recorded).items() if name not in apart}
    ours_instead = shape(ours)
    assert theirs_beside.keys() == ours_instead.keys()
    for name, form in theirs_beside.items():
        if not name.startswith("sglang:http_"):
            assert form == ours_instead[name], name
    assert_nothing_refused(ours)


def test_the_document_lists_the_families_that_stay_at_0() -> None:
    """An operator who still scrapes SGLang finds there which families to ignore."""
    text = DOCUMENT.read_text()

    assert {name for name in AT_ZERO if f"`{name}`" not in text} == set()


async def test_two_ranks(sglang: SglangSite) -> None:
    """Both pages agree rank by rank, and each rank is an engine that can be down."""
    server = sglang.server(PARALLEL.arguments, PARALLEL.environ)
    async with sglang.with_exporter(server) as exporter:
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
        assert value(ours, "sidestep_max_running_requests", dp_rank=rank) > 0
        assert 0 < value(ours, "sidestep_shortest_step_seconds", dp_rank=rank) < 1
    # Two schedulers, a tokenizer, a detokenizer, and the process that distributes requests.
    assert value(ours, "sidestep_streams") == 5
    assert up(after) == 0
    assert_nothing_refused(ours)


async def test_labels_and_bounds_of_the_administrator(sglang: SglangSite) -> None:
    """Priorities, labels of requests, labels of the deployment and other bounds are on both pages."""
    server = sglang.server(LABELLED.arguments, LABELLED.environ)
    async with sglang.with_exporter(server) as exporter:
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
        found_bounds = {labels["le"] for labels in labels_of(ours, family) if "le" in labels}
        assert {*bounds.split(), "+Inf"} == found_bounds
    assert_nothing_refused(ours)
