"""The plug-in inside a real vLLM: what the engine counts is what our page shows."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import shlex
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from real_engines.comparison import (
    Page,
    all_differences,
    assert_complete,
    assert_nothing_refused,
    count,
    engine_families,
    labels_of,
    parse,
    report,
    settled,
    settled_alone,
    total,
    value,
)
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Answer, Ask, Client, generated, reasons
from real_engines.processes import ExporterProcess, Process, VllmServer, engine_environ, until
from sidestep.engines.vllm.connector_rows import FRONT_END

pytestmark = pytest.mark.engine

RECORDED = Path(__file__).parents[1] / "data" / "page_main.txt.gz"


@contextlib.asynccontextmanager
async def both(server: VllmServer, endpoint: str, home: Path) -> AsyncIterator[ExporterProcess]:
    """A server and an exporter, started; both are asked to end, and must."""
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter, server:
        await exporter.started()
        await server.started()
        yield exporter


async def test_beside_the_engine_both_pages_agree(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """After a mixed load every family, label set, bucket and value of vLLM's page is on ours.

    An engine that is asked to end says goodbye.
    """
    environ = {**MAIN_ENVIRON, "SIDESTEP_ENDPOINT": endpoint}
    server = VllmServer(vllm_python, tiny, home, MAIN_FLAGS, environ)
    async with both(server, endpoint, home) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed()
        theirs, ours, found = await settled(server, exporter)
        report("beside", theirs, answers)
        code = await server.stop()
        after = await settled_alone(exporter, lambda page: not value(page, "sidestep_streams"))

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


async def test_instead_of_the_engines_own_logger(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """The engine's page loses its logger's families; ours has them all, with the load's totals."""
    environ = {
        **MAIN_ENVIRON,
        "SIDESTEP_ENDPOINT": endpoint,
        "SIDESTEP_VLLM_MODE": "instead",
    }
    server = VllmServer(vllm_python, tiny, home, MAIN_FLAGS, environ)
    async with both(server, endpoint, home) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed(leave=False)
            exact = await client.ask_all([Ask(client.text(50), 20) for _ in range(10)])
        theirs = parse(await server.page())
        ended = [answer for answer in [*answers, *exact] if answer.reasons]
        finished = reasons(ended)

        def all_in(page: Page) -> bool:
            running = value(page, "vllm:num_requests_running")
            return not running and value(page, "vllm:request_success") >= finished.total()

        ours = await settled_alone(exporter, all_in)
        report("instead", ours, [*answers, *exact])

    front_end = {row.name.removesuffix("_total") for row in FRONT_END}
    recorded = parse(gzip.decompress(RECORDED.read_bytes()).decode())

    assert engine_families(theirs).keys() <= front_end
    assert engine_families(recorded).keys() == engine_families(ours).keys()
    assert [200] * 10 == [answer.tokens * 10 for answer in exact]
    assert finished == {
        reason: value(ours, "vllm:request_success", finished_reason=reason) for reason in finished
    }
    assert generated(ended) == total(ours, "vllm:request_generation_tokens")
    assert generated(ended) == value(ours, "vllm:generation_tokens")
    assert finished.total() == count(ours, "vllm:e2e_request_latency_seconds")
    assert_nothing_refused(ours)


async def test_speculative_decoding(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """With drafts from n-grams the pages agree, and drafts were made."""
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    flags = [*MAIN_FLAGS, "--speculative-config", json.dumps(ngram)]
    server = VllmServer(vllm_python, tiny, home, flags, {"SIDESTEP_ENDPOINT": endpoint})
    async with both(server, endpoint, home) as exporter:
        async with Client(server.base) as client:
            answers = await client.mixed()
        theirs, ours, found = await settled(server, exporter)
        drafts = value(theirs, "vllm:spec_decode_num_drafts")
        report("speculative", theirs, answers, drafts=drafts)

    assert [] == found
    assert drafts > 0
    assert_nothing_refused(ours)


async def test_lora_adapters_are_those_of_now(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str, adapters: dict[str, Path]
) -> None:
    """While adapters run they are shown, one combination at a time; on an idle engine, none."""
    flags = shlex.split(
        "--enable-lora --max-loras 1 --max-lora-rank 8 --max-num-seqs 4 --max-num-queued-reqs 8"
    )
    modules = [f"{name}={path}" for name, path in adapters.items()]
    server = VllmServer(
        vllm_python,
        tiny,
        home,
        [*flags, "--lora-modules", *modules],
        {"SIDESTEP_ENDPOINT": endpoint},
    )
    shown: list[Page] = []
    async with both(server, endpoint, home) as exporter:

        async def saw_both() -> bool:
            page = parse(await exporter.page())
            if labels_of(page, "sidestep_lora_requests"):
                shown.append(page)
            states = [
                labels for page in shown for labels in labels_of(page, "sidestep_lora_requests")
            ]
            return adapters.keys() <= {labels["adapter"] for labels in states}

        async with Client(server.base) as client:
            asks = [Ask(client.text(40), 900, model=name) for name in list(adapters) * 8]
            watching = asyncio.create_task(until(saw_both, 60, "both adapters on the page"))
            answers: list[Answer] = []
            # An engine that has all cores may be done with one before the exporter has its turn.
            while not watching.done() or not answers:
                answers += await client.ask_all(asks)
            await watching
        theirs, ours, found = await settled(server, exporter, apart=["vllm:lora_requests_info"])
        rejected = sum(answer.refused for answer in answers)
        report("lora", theirs, answers, pages=len(shown))

    assert [] == found
    for page in shown:
        (combination,) = labels_of(page, "vllm:lora_requests_info")
        assert combination["max_lora"] == "1"
        running = filter(None, combination["running_lora_adapters"].split(","))
        assert set(running) <= adapters.keys()
        assert {"running", "waiting"} >= {
            labels["state"] for labels in labels_of(page, "sidestep_lora_requests")
        }
    assert labels_of(ours, "vllm:lora_requests_info") == []
    assert labels_of(ours, "sidestep_lora_requests") == []
    assert rejected == value(ours, "vllm:admission_rejections")
    assert_nothing_refused(ours)


async def test_two_engines_and_two_api_servers(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """Streams of both servers make one page: each engine's steps once, and all else as vLLM has it."""
    flags = shlex.split(
        "--data-parallel-size 2 --api-server-count 2 --num-gpu-blocks-override 200"
        " --shutdown-timeout 30"
    )
    environ = {"SIDESTEP_ENDPOINT": endpoint}
    server = VllmServer(vllm_python, tiny, home, flags, environ, command=True)
    steps = "vllm:iteration_tokens_total"
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
        await exporter.started()
        async with server:
            await server.started()
            # A connection is taken by either API server.
            async with Client(server.base) as client:
                answers = [*await client.mixed(), *await client.mixed()]
            theirs, ours, found = await settled(server, exporter, apart=[steps])
            report(
                "data parallel",
                theirs,
                answers,
                streams=value(ours, "sidestep_streams"),
                ours={engine: count(ours, steps, engine=engine) for engine in "01"},
                native={engine: count(theirs, steps, engine=engine) for engine in "01"},
            )
            code = await server.stop()
            left = server.alive()
        after = await settled_alone(exporter, lambda page: not value(page, "sidestep_streams"))

    assert [] == found
    assert [400] * 2 == [answer.status for answer in answers if answer.status != 200]
    assert_complete([answer for answer in answers if answer.status == 200])
    assert value(ours, "sidestep_streams") == 2
    for engine in "01":
        computed = value(
            ours, "vllm:prompt_tokens_by_source", engine=engine, source="local_compute"
        )
        made = value(ours, "vllm:generation_tokens", engine=engine)
        assert made > 0
        assert 0 < count(ours, steps, engine=engine) <= count(theirs, steps, engine=engine)
        assert computed + made == total(ours, steps, engine=engine)
        assert total(theirs, steps, engine=engine) == total(ours, steps, engine=engine)
    assert_nothing_refused(ours)
    assert (code, left) == (0, [])
    assert [0.0, 0.0] == [value(after, "sidestep_engine_up", engine=engine) for engine in "01"]


async def test_an_engine_inside_a_program(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str
) -> None:
    """AsyncLLM takes the class by hand; after its end the page holds all, and the engine is down."""
    script = Path(__file__).with_name("asyncllm_program.py")
    page = home / "page.txt"
    environ = {
        **engine_environ(home),
        "SIDESTEP_ENDPOINT": endpoint,
        "VLLM_PLUGINS": "none-by-entry-point",
    }
    command = [str(vllm_python), str(script), str(tiny), str(page)]
    async with ExporterProcess(endpoint, home / "exporter.log") as exporter:
        await exporter.started()
        async with Process(command, environ, home / "program.log") as program:
            await until(lambda: program.code is not None, 300, "end of the program")
            code, output = program.code, program.output
        ours = await settled_alone(exporter, lambda page: not value(page, "sidestep_streams"))

    assert code == 0, output[-4000:]
    theirs = parse(page.read_text())
    report("in a program", theirs, [])

    assert [] == list(all_differences(theirs, ours))
    assert value(ours, "vllm:generation_tokens") == 8 * 30
    assert Counter({"length": 8}) == {
        "length": value(ours, "vllm:request_success", finished_reason="length")
    }
    assert value(ours, "sidestep_engine_up") == 0
    assert_nothing_refused(ours)
