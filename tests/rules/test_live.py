"""The rules in a real Prometheus over recorded runs: no evaluation fails, and every record has series."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

from dcgm import dcgm_exporter
from exporters import MAIN_RUN, Start, page_of_engine, recorded_run
from fleet import OBJECTIVES
from polled import page, polled
from prometheus_server import BINARIES, Prometheus, prometheus
from ramped import overload
from rulefiles import RULE_FILES, recordings
from sidestep.app.exporter import Exporter
from sidestep_adapters.recording.replay import Replay

RUNS = [
    MAIN_RUN,
    *map(recorded_run, ("core_dp", "sglang_dp", "sglang_labels", "vllm-lora")),
]


async def play(exporter: Exporter) -> None:
    """Replay each run under a namespace of its own, and simulate an overloaded engine."""
    for run in RUNS:
        player = Replay(run, exporter.endpoints[0], realtime=False, namespace=run.name)
        await asyncio.to_thread(player.run)
    await overload(exporter)


async def evaluated(
    server: Prometheus, exporter: Exporter
) -> tuple[list[dict[str, Any]], set[str]]:
    """Play runs until all is recorded; return Prometheus' view of the rules, and missing records."""
    missing = {rule["record"] for rule in recordings()}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while missing:
                await play(exporter)
                missing -= set(await asyncio.to_thread(server.get, "label/__name__/values"))
    groups = (await asyncio.to_thread(server.get, "rules"))["groups"]
    return [rule for group in groups for rule in group["rules"]], missing


async def test_every_rule_is_evaluated_and_recorded(
    start: Start, tmp_path: Path, version: str
) -> None:
    """Prometheus evaluates every rule over series of vLLM, SGLang and Triton."""
    async with (
        polled(page(page_of_engine("page_triton"))) as triton,
        start(
            slo=OBJECTIVES, prices_model=("*,input=1,output=2",), prices_gpu_hour="2"
        ) as exporter,
    ):
        await play(exporter)
        targets = {"sidestep": {"vllm-0": exporter.url}, "triton": {"triton-0": triton.url}}
        with contextlib.ExitStack() as stack:
            targets["dcgm"] = {"vllm-0": stack.enter_context(dcgm_exporter())}
            server = stack.enter_context(
                prometheus(str(BINARIES[version]), tmp_path / version, targets, rules=RULE_FILES)
            )
            rules, missing = await evaluated(server, exporter)

    assert [rule for rule in rules if rule.get("lastError")] == []
    assert {rule["health"] for rule in rules} == {"ok"}
    assert missing == set()
