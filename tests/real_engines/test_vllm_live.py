"""The plugin inside a real vLLM: the exporter's page equals the engine's own."""

from __future__ import annotations

import gzip
import shlex
from pathlib import Path

import pytest

from exporters import until
from real_engines.comparison import (
    Page,
    assert_complete,
    assert_nothing_refused,
    count,
    engine_families,
    idle,
    parse,
    report,
    settled,
    settled_alone,
    total,
    value,
)
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Ask, Client, generated, reasons
from real_engines.sites import BLOCKS, TAP, VllmSite, without_streams
from sidestep.engines.vllm.connector_rows import FRONT_END

pytestmark = pytest.mark.engine

RECORDED = Path(__file__).parents[1] / "data" / "page_main.txt.gz"
GENERATED = "vllm:generation_tokens"
STEPS = "vllm:iteration_tokens_total"


async def test_beside_the_engine_both_pages_agree(vllm: VllmSite) -> None:
    """After a mixed load every family, label set, bucket and value of vLLM's page is on ours.

    An engine that is asked to end closes its stream.
    """
    server = vllm.server(MAIN_FLAGS, MAIN_ENVIRON)
    async with vllm.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed()
        theirs, ours, found = await settled(server, exporter)
        report("beside", theirs, answers)
        code = await server.stop()
        after = await without_streams(exporter)

    assert [] == found
    assert [400] == [answer.status for answer in answers if answer.status != 200]
    assert_complete([answer for answer in answers if answer.status == 200])
    assert_nothing_refused(ours)
    # The load did reach every state that it is there for.
    assert value(theirs, "vllm:num_preemptions") > 0
    assert value(theirs, "vllm:prefix_cache_hits") > 0
    assert count(theirs, "vllm:kv_block_lifetime_seconds") > 0
    assert {"stop": 12, "length": 56} == reasons(answers)
    assert sum(answer.left for answer in answers) == 5
    assert (code, value(after, "sidestep_engine_up")) == (0, 0)


INSTEAD = {"SIDESTEP_VLLM_MODE": "instead"}
BUILDS = "sidestep_engine_process_builds_statistics"


def builders(page: Page) -> dict[tuple[str, str], float]:
    """Return which API servers build vLLM's statistics, by their names and why they do."""
    samples = page[BUILDS].samples.items()
    labelled = [(dict(labels), number) for (_, labels), number in samples]
    return {(one["process"], one.get("reason", "")): number for one, number in labelled}


async def test_instead_of_the_engines_own_logger(vllm: VllmSite) -> None:
    """The engine's page loses its logger's families; ours has them all, with the load's totals."""
    server = vllm.server(MAIN_FLAGS, {**MAIN_ENVIRON, **INSTEAD})
    async with vllm.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed(leave=False, streams=2)
            exact = await client.ask_all([Ask(client.text(50), 20) for _ in range(10)])
            lists = await client.ask_all(
                [Ask([client.text(9), client.text(20)], 7, stream=n % 2 > 0) for n in range(4)]
            )
        theirs = parse(await server.page())
        ended = [answer for answer in [*answers, *exact, *lists] if answer.reasons]
        finished = reasons(ended)

        def all_in(page: Page) -> bool:
            running = value(page, "vllm:num_requests_running")
            return not running and value(page, "vllm:request_success") >= finished.total()

        ours = await settled_alone(exporter, all_in)
        report("instead", ours, [*answers, *exact, *lists])

    front_end = {row.name.removesuffix("_total") for row in FRONT_END}
    recorded = parse(gzip.decompress(RECORDED.read_bytes()).decode())

    assert "sidestep: vLLM builds no statistics" in server.output
    assert builders(ours) == {("api0", ""): 0}
    assert engine_families(theirs).keys() <= front_end
    assert engine_families(recorded).keys() == engine_families(ours).keys()
    assert [200] * 10 == [answer.tokens * 10 for answer in exact]
    assert [14] * 4 == [answer.tokens for answer in lists]
    assert finished == {
        reason: value(ours, "vllm:request_success", finished_reason=reason) for reason in finished
    }
    assert generated(ended) == total(ours, "vllm:request_generation_tokens")
    assert generated(ended) == value(ours, GENERATED)
    assert finished.total() == count(ours, "vllm:e2e_request_latency_seconds")
    assert finished.total() == count(ours, "vllm:time_to_first_token_seconds")
    # Each parallel sample has its prompt; those of a list are one answer.
    prompts = sum(one.prompt_tokens * len(one.reasons) for one in [*answers, *exact])
    prompts += sum(one.prompt_tokens for one in lists)
    assert prompts == value(ours, "vllm:prompt_tokens")
    assert prompts == total(ours, "vllm:request_prompt_tokens")
    assert value(ours, "vllm:num_preemptions") > 0
    assert_nothing_refused(ours)


@pytest.mark.parametrize(
    ("flags", "environ", "reason"),
    [
        ("--enable-per-request-metrics", {}, "--enable-per-request-metrics needs them"),
        (
            "--otlp-traces-endpoint grpc://127.0.0.1:9",
            {},
            "--otlp-traces-endpoint needs them",
        ),
        ("", {"SIDESTEP_VLLM_STATISTICS": "vllm"}, "SIDESTEP_VLLM_STATISTICS=vllm"),
    ],
    ids=["responses", "traces", "asked for"],
)
async def test_vllm_builds_statistics_where_it_needs_them(
    flags: str, environ: dict[str, str], reason: str, vllm: VllmSite
) -> None:
    """The log and the page say why; all else is the same."""
    server = vllm.server(shlex.split(flags), {**INSTEAD, **environ})
    async with vllm.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            answers = await client.ask_all(
                [Ask(client.text(50), 20, stream=n % 2 > 0) for n in range(6)]
            )
        ours = await settled_alone(
            exporter, lambda page: value(page, GENERATED) == 120 and idle(page)
        )
    assert_complete(answers)
    assert f"vLLM builds its statistics on the event loop: {reason}" in server.output
    assert builders(ours) == {("api0", reason): 1}
    assert value(ours, GENERATED) == 120
    assert {"length": 6} == reasons(answers)
    assert value(ours, "vllm:request_success", finished_reason="length") == 6


async def test_two_engines_with_two_api_servers_instead(vllm: VllmSite) -> None:
    """Each front end sends its own requests; together they are those of the clients."""
    flags = shlex.split(
        "--data-parallel-size 2 --api-server-count 2 --max-num-seqs 8 --shutdown-timeout 30"
    )
    server = vllm.server(flags, INSTEAD, command=True)
    async with vllm.with_exporter(server) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed(streams=2)
        ended = [answer for answer in answers if answer.reasons]
        left = sum(answer.left for answer in answers)
        finished = reasons(ended)

        def all_in(page: Page) -> bool:
            done = value(page, "vllm:request_success") >= finished.total() + left
            return done and idle(page)

        ours = await settled_alone(exporter, all_in)
        report("data parallel, instead", ours, answers, streams=value(ours, "sidestep_streams"))

    assert server.output.count("sidestep: vLLM builds no statistics") == 2
    assert builders(ours) == {("api0", ""): 0, ("api1", ""): 0}
    assert value(ours, "sidestep_streams") == 2
    aborted = value(ours, "vllm:request_success", finished_reason="abort")
    assert 0 < aborted <= left
    # A client may leave after the engine's last token.
    assert value(ours, "vllm:request_success") == finished.total() + left
    assert value(ours, "vllm:request_success", finished_reason="stop") == finished["stop"]
    assert generated(ended) <= value(ours, GENERATED)
    for engine in "01":
        made = value(ours, GENERATED, engine=engine)
        source = {"engine": engine, "source": "local_compute"}
        assert made > 0
        computed = value(ours, "vllm:prompt_tokens_by_source", **source)
        assert computed + made == total(ours, STEPS, engine=engine)
        assert count(ours, STEPS, engine=engine) > 0
    late = left - aborted
    assert count(ours, "vllm:request_params_n") == len(ended) + late
    assert total(ours, "vllm:request_params_n") == finished.total() + late
    assert_nothing_refused(ours)


async def test_two_engines_with_two_api_servers_and_tapped_cores(vllm: VllmSite) -> None:
    """Each engine's steps count once, and what two front ends count in parts is summed."""
    flags = shlex.split(
        "--data-parallel-size 2 --api-server-count 2 --num-gpu-blocks-override 200"
        " --shutdown-timeout 30"
    )
    server = vllm.server([*flags, *TAP], command=True)
    async with vllm.with_exporter(server) as exporter:
        # A connection is taken by either API server.
        async with Client(server.base) as client:
            answers = [
                answer
                for _ in range(2)
                for answer in await client.mixed(leave=False, stop_strings=False)
            ]
        theirs, ours, found = await settled(server, exporter, apart=[STEPS, *BLOCKS])
        report(
            "data parallel, core",
            ours,
            answers,
            streams=value(ours, "sidestep_streams"),
            ours={engine: count(ours, STEPS, engine=engine) for engine in "01"},
            native={engine: count(theirs, STEPS, engine=engine) for engine in "01"},
        )
        await server.stop()
        # A child may end some milliseconds after the process that waits for it.
        await until(lambda: not server.alive(), timeout=5.0, what="all processes have ended")
        await without_streams(exporter)

    assert [] == found
    assert [400] * 2 == [answer.status for answer in answers if answer.status != 200]
    assert_complete([answer for answer in answers if answer.status == 200])
    assert value(ours, "sidestep_streams") == 4
    assert_nothing_refused(ours)
    for engine in "01":
        assert 0 < count(ours, STEPS, engine=engine) <= count(theirs, STEPS, engine=engine)
        assert total(theirs, STEPS, engine=engine) == total(ours, STEPS, engine=engine)
        timed = count(ours, "sidestep_iteration_duration_seconds", engine=engine)
        assert count(ours, STEPS, engine=engine) <= timed
