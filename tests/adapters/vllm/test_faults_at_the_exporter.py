"""Faults in a process of vLLM, as a running exporter shows them."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

import fake_vllm
from exporters import Start, until
from fake_vllm import Request, config, importable
from pages import get
from sidestep.app.exporter import Exporter
from sidestep.metrics.computed_gauges import scalar

TAP = "sidestep_adapters.vllm.scheduler.SidestepScheduler"


async def has_core(exporter: Exporter, expected: bool) -> bool:
    """Return whether the exporter finds that an engine lacks its core, or that none does."""
    answer = await get(exporter.url.removesuffix("/metrics") + "/api/v1/doctor")
    return ('"SD146"' not in answer) is expected


async def test_a_plugin_that_cannot_start_shows_no_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An engine that serves would be at 0 on the page, and have stopped."""
    monkeypatch.setattr(fake_vllm.StatLoggerBase, "record", 42, raising=False)
    async with start() as exporter:
        with importable(monkeypatch, f"ipc://{tmp_path}/ingest.ipc") as ours:
            before = set(threading.enumerate())
            ours.stat_logger(config(), [0])
            for thread in set(threading.enumerate()) - before:
                await asyncio.to_thread(thread.join, 30.0)
            # The core's goodbye follows whatever the front end has sent.
            scheduler = ours.scheduler(config())
            core = scheduler._core.publisher
            await until(lambda: core.connected)
            await asyncio.to_thread(scheduler.shutdown)
            sent = {name.rpartition("/")[2] for name in exporter.intake.receiver.streams}
    assert sent == {"core"}


async def test_a_core_whose_tap_cannot_start_is_a_finding(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its front end leaves most metrics to it, which stay at 0."""
    found, other = config(), config()
    found.scheduler_config.scheduler_cls = other.scheduler_config.scheduler_cls = TAP
    del other.parallel_config.data_parallel_rank
    async with start() as exporter:
        with importable(monkeypatch, f"ipc://{tmp_path}/ingest.ipc") as ours:
            assert ours.scheduler(other, log_stats=True)._core is None
            logger = ours.stat_logger(other, [0])
            await until(lambda: has_core(exporter, False))
            scheduler = ours.scheduler(found, log_stats=True)
            await until(lambda: has_core(exporter, True))
            await asyncio.to_thread(scheduler.shutdown)
            await asyncio.to_thread(logger._publisher.close)


async def test_an_event_that_the_exporter_would_refuse_takes_no_others_along(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The others of its step count, and the request that has ended unseen is no longer in flight."""
    async with start() as exporter:
        with importable(monkeypatch, f"ipc://{tmp_path}/ingest.ipc") as ours:
            scheduler = ours.scheduler(config())
            for name in "ab":
                scheduler.add_request(Request(name))
            scheduler.update_from_output(scheduler.schedule())
            await until(lambda: len(in_flight(exporter)) == 2)
            scheduler.requests["a"].num_output_tokens = "1"
            batch = scheduler.schedule()
            scheduler.finish_all()
            scheduler.update_from_output(batch)
            await until(lambda: not in_flight(exporter), 20)
            await asyncio.to_thread(scheduler.shutdown)
        (engine,) = exporter.registry.engines.values()
        ended = scalar(engine, "vllm:request_success_total")
        assert exporter.metrics.value("sidestep_rejected_total", "bad_item") == 0
    assert ended == 1


def in_flight(exporter: Exporter) -> list[int]:
    """Return the numbers of the requests that the exporter tracks."""
    registry = exporter.registry
    return [n for e in registry.engines.values() for n in registry.requests_of(e).requests.live]
