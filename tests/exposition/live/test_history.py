"""The history: its memory, changed bounds, and engines that come and go."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import pytest

from intakes import Fed, discard, steps
from pages import parse
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.exposition.live.answers import WINDOW, EngineRow, HeatMap, Live
from sidestep.exposition.live.answers import HistoryAnswer as Answer
from sidestep.exposition.live.history import (
    INTERVAL,
    MAX_BYTES,
    MAX_SAMPLES,
    MIN_SAMPLES,
    SampleHistory,
)
from sidestep.exposition.live.samples import HISTOGRAMS
from sidestep.exposition.live.view import LiveView
from sidestep.metrics.engine import Engine
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_BOUNDS, VERSION
from sidestep.protocol.messages import EngineInfo, Heartbeat, Hello

BUDGET = 250_000
"""Bytes of an engine's history."""
KV_BLOCKS = ["kv_cache_metrics"]


def info(name: str = "0", **fields: Any) -> EngineInfo:
    """Return an engine that reports everything."""
    labels = {"engine": name, "model_name": "m"}
    return EngineInfo(name, "vllm", labels, features=KV_BLOCKS, **fields)


class Viewed(Fed):
    """An intake with a live view; time only passes in ``round``."""

    def __init__(self) -> None:
        super().__init__()
        self.view = LiveView(self.intake, clock=lambda: self.now, wall=lambda: 1000 + self.now)

    def round(self, seconds: float = INTERVAL) -> None:
        """Let time pass, and sample the engines."""
        self.now += seconds
        asyncio.run(self.view.sample())

    def step(self, stream: str, *latencies: float, engine: int = 0) -> None:
        """Send a step with these times to first token."""
        iteration = IterationStats(num_generation_tokens=10, time_to_first_tokens_iter=[*latencies])
        stats = SchedulerStats(num_running_reqs=1)
        self.items(stream, [encode_item(VllmStep(engine, self.now, 1.0, stats, iteration))])

    @property
    def live(self) -> Live:
        """A new answer."""
        body = asyncio.run(self.view._answer())
        return msgspec.json.decode(b"".join(body.parts), type=Live)

    def rows(self) -> dict[str, EngineRow]:
        """Return the rows by engine."""
        return {row.engine: row for row in self.live.engines}

    def history(self, engine: str | None = None) -> Answer:
        """Return a new answer of the history."""
        body = asyncio.run(self.view._charts(engine))
        return msgspec.json.decode(b"".join(body.parts), type=Answer)

    def heat(self, name: str, engine: str | None = None) -> HeatMap:
        """Return a heat map."""
        return next(each for each in self.history(engine).heatmaps if each.name == name)


def size(found: object, seen: set[int]) -> int:
    """Return the bytes of an object and all that it refers to, but the engine and small integers."""
    if id(found) in seen or isinstance(found, Engine):
        return 0
    seen.add(id(found))
    total = sys.getsizeof(found)
    if isinstance(found, SampleHistory):
        return total + size(found.samples, seen) + size(found.__dict__, seen)
    if isinstance(found, dict | list | tuple) or hasattr(found, "popleft"):
        parts = found.values() if isinstance(found, dict) else found
        total += sum(size(each, seen) for each in parts)  # type: ignore[attr-defined, misc]
    return total


def change_all(engine: Engine, value: int) -> None:
    """Count something in each of the engine's series, so that no sample shares anything."""
    for slot in range(len(engine.histograms)):
        engine.histogram(slot).observe(float(value % 7))
    for slot in range(len(engine.values)):
        engine.values[slot] = (engine.values[slot] or 0) + value + 1000


@pytest.mark.parametrize("bounds", [0, MAX_BOUNDS])
def test_the_memory_of_an_engine_is_bounded(bounds: int) -> None:
    """Of a real engine with all histograms that change all the time; with huge ones, time is kept shorter."""
    fed = Viewed()
    families = (
        "time_to_first_token",
        "inter_token_latency",
        "request_latency",
        "kv_cache_residency",
    )
    many = {name: [float(n) for n in range(bounds)] for name in families} if bounds else {}
    fed.send_hello("s", [info(bounds=many)])
    engine = fed.intake.registry.engines["0"]
    for number in range(MAX_SAMPLES + 20):
        change_all(engine, number)
        fed.round()
    kept = fed.view.histories["0"]

    assert all(counts is not None for counts in kept.samples[-1].counts)
    assert len(kept.samples[-1].counts) == len(HISTOGRAMS) == 6
    # The bounds are the engine's own.
    own = {id(each.bounds) for each in engine.histograms if each is not None}
    assert 0.3 * MAX_BYTES < size(kept, own) <= BUDGET
    if bounds:
        assert MIN_SAMPLES <= len(kept.samples) < MAX_SAMPLES
    else:
        assert len(kept.samples) == MAX_SAMPLES
        assert kept.samples[-1].at - kept.samples[0].at == 600.0


def test_counts_above_four_bytes_are_exact() -> None:
    """An engine that runs for years has counted more than 2**32 outputs in a bucket."""
    fed = Viewed()
    fed.send_hello("s", [info()])
    fed.step("s", 0.3)
    engine = fed.intake.registry.engines["0"]
    slot = engine.layout.find("vllm:time_to_first_token_seconds").slots[0]
    histogram = engine.histogram(slot)
    histogram.counts[0] = 2**32 - 2
    for _ in range(3):
        fed.round()
        histogram.counts[0] += 1
    fed.round()

    assert [sum(row) for row in fed.heat("ttft", "0").counts] == [1, 1, 1]
    assert [sum(row) for row in fed.heat("ttft").counts] == [1, 1, 1]


def test_the_window_is_the_last_minute() -> None:
    """Older samples do not count; percentiles of a chart are those of the minute before."""
    fed = Viewed()
    fed.send_hello("s", [info()])
    fed.round()
    fed.step("s", 0.05, 0.05)
    for _ in range(int(WINDOW / INTERVAL)):
        fed.round()
    before = fed.rows()["0"].ttft
    fed.round()
    after = fed.rows()["0"].ttft
    fed.step("s", 3.0)
    fed.now += 1.0
    now = fed.rows()["0"]
    fed.round(4.0)
    series = fed.history("0").series

    assert before is not None
    assert before.count == 2
    assert after is None
    assert now.ttft is not None
    assert (now.ttft.count, now.ttft.p50) == (1, 3.75)
    # Since the sample of 61 seconds ago.
    assert now.generation_tokens_per_second == pytest.approx(10 / 61)
    assert series["generation_tokens_per_second"] == [2.0, *[0.0] * 12, 2.0]
    assert series["ttft_p50"] == [*[0.05] * 12, None, 3.75]
    assert series["running"] == [1.0] * 14


COUNTED: dict[str, dict[str, tuple[str, dict[str, str], float]]] = {
    "vllm": {
        "finished": ("vllm:request_success_total", {}, 1.0),
        "aborted": ("vllm:request_success_total", {"finished_reason": "abort"}, 1.0),
        "preemptions": ("vllm:num_preemptions_total", {}, 1.0),
        "prompt_tokens_per_second": (
            "vllm:prompt_tokens_by_source_total", {"source": "local_compute"}, 50.0,
        ),
        "generation_tokens_per_second": ("vllm:generation_tokens_total", {}, 50.0),
    },
    "tokenizer": {
        "finished": ("sglang:num_requests_total", {}, 1.0),
        "aborted": ("sglang:num_aborted_requests_total", {}, 1.0),
    },
    "scheduler": {
        "preemptions": ("sglang:num_retracted_requests_total", {}, 1.0),
        "prompt_tokens_per_second": (
            "sglang:realtime_tokens_total", {"mode": "prefill_compute"}, 50.0,
        ),
        "generation_tokens_per_second": (
            "sglang:realtime_tokens_total", {"mode": "decode"}, 50.0,
        ),
    },
}  # fmt: skip
"""Numbers of a row: the family, labels of its samples, and a divisor."""
LATENCIES = {
    "ttft": "time_to_first_token_seconds_count",
    "inter_token": "inter_token_latency_seconds_count",
    "e2e": "e2e_request_latency_seconds_count",
}


@pytest.mark.parametrize(
    ("run", "kinds"), [("core_aborts", {"vllm"}), ("sglang", {"tokenizer", "scheduler"})]
)
def test_a_row_counts_what_the_page_counts(run: str, kinds: set[str]) -> None:
    """Requests, tokens and latencies of a recorded run that is played a second time in 50 seconds."""
    fed = Viewed()
    recorded = list(steps(run))
    fed.feed(recorded)
    fed.round()
    pages = [parse(fed.page)]
    fed.feed(step for step in recorded if step[2] is not None)
    fed.now += 50.0
    pages.append(parse(fed.page))

    def total(name: str, labels: dict[str, str]) -> float:
        before, after = (
            sum(
                value
                for family in page.values()
                for (sample, own), value in family.samples.items()
                if sample == name and labels.items() <= {*own}
            )
            for page in pages
        )
        return after - before

    found = set[str]()
    for row in fed.live.engines:
        own = fed.intake.registry.engines[row.id].labels
        kind = row.dialect
        if kind == "sglang":
            kind = "scheduler" if "tp_rank" in own else "tokenizer"
        found.add(kind)
        for name, (family, more, divisor) in COUNTED[kind].items():
            counted = total(family, {**own, **more}) / divisor
            assert getattr(row, name) == pytest.approx(counted), (row.id, name)
        for name, end in LATENCIES.items():
            latency = getattr(row, name)
            if kind == "scheduler":
                assert latency is None
            else:
                assert latency.count == total(f"{row.dialect}:{end}", own) > 0
    assert found == kinds


def test_a_histogram_restarts_when_its_bounds_change() -> None:
    """Percentiles count from then on, heat maps have the new bounds, and other numbers go on."""
    fed = Viewed()
    fed.send_hello("s", [info()])
    fed.round()
    fed.step("s", 0.3, 0.3)
    fed.round()
    first = fed.rows()["0"]
    fed.send_hello("s", [info(bounds={"time_to_first_token": [1.0, 2.0]})])
    fed.step("s", 1.5)
    alone = fed.rows()["0"]
    fed.round()
    fed.step("s", 1.5)
    fed.round()
    second = fed.rows()["0"]
    alike, total = fed.heat("ttft", "0"), fed.heat("ttft")

    assert first.ttft is not None
    assert first.ttft.count == 2
    # No sample has the new bounds yet.
    assert (alone.ttft, alone.generation_tokens_per_second) == (None, 20 / 5)
    assert second.ttft is not None
    assert (second.ttft.count, second.ttft.p50) == (1, 1.5)
    assert second.generation_tokens_per_second == 30 / 15
    assert alike.bounds == total.bounds == [1.0, 2.0]
    assert alike.counts == total.counts == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]


def test_engines_with_different_bounds_are_merged_on_those_that_both_have() -> None:
    """As on the pod view; where there are none, nothing is known of all as one."""
    fed = Viewed()
    bounds = {"time_to_first_token": [0.1, 0.5, 2.5], "inter_token_latency": [123.0]}
    fed.send_hello("s", [info("0"), info("1", bounds=bounds)])
    fed.round()
    fed.step("s", 0.05, 0.2, 0.3)
    fed.step("s", 0.2, 3.0, engine=1)
    fed.round()
    fed.round()

    total = fed.live.total
    assert total is not None
    assert total.ttft is not None
    assert total.ttft.count == 5
    assert total.ttft.p50 == pytest.approx(0.1 + 0.4 * 1.5 / 3)
    assert fed.heat("ttft").bounds == [0.1, 0.5, 2.5]
    assert fed.heat("ttft").counts == [[1, 3, 0, 1], [0, 0, 0, 0]]
    assert "inter_token" not in {each.name for each in fed.history().heatmaps}


def test_engines_come_and_go() -> None:
    """All engines as one have what each has counted while it was there."""
    fed = Viewed()
    fed.send_hello("a", [info("0")])
    fed.round()
    fed.step("a", 0.3)
    fed.round()
    fed.send_hello("b", [info("1")])
    fed.step("b", 0.3, 0.3)
    fed.round()
    fed.step("b", 0.3, 0.3)
    fed.round()
    discard(fed.intake.registry, fed.intake.registry.engines["0"])
    fed.round()
    found = fed.history()

    assert [*fed.view.histories] == ["1"]
    assert set(fed.rows()) == {"1"}
    # What came before the first sample of an engine is not known.
    assert found.series["generation_tokens_per_second"] == [2.0, 0.0, 2.0, 0.0]
    assert [sum(row) for row in fed.heat("ttft").counts] == [1, 0, 2, 0]
    assert len(fed.history("1").times) == 2
    discard(fed.intake.registry, fed.intake.registry.engines["1"])
    fed.round()
    assert fed.live.total is None
    assert fed.live.verdict.text == "no engine is connected"
    assert len(fed.history().times) == 5


def deliver(fed: Viewed, backlog: int, *, hello: bool = True) -> None:
    """Send a hello, what the process has held, and the heartbeat that follows."""
    if hello:
        fed.seqs.setdefault("s", 0)
        fed.send("s", Hello(VERSION, "s", fed.incarnation("s"), 1, fed.seqs["s"] + 1, [info()]))
    for _ in range(backlog):
        fed.step("s", 0.3)
    fed.send("s", Heartbeat(fed.incarnation("s"), fed.seqs["s"], 0))


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("minutes", [0, 5])
def test_a_backlog_is_no_rate(minutes: int, known: bool) -> None:  # from pytest
    """Counts from while the exporter or the network was away are in no rate, however long that was."""
    fed = Viewed()
    if known:
        fed.send_hello("s", [info()])
        for _ in range(20):
            fed.step("s", 0.3)
            fed.round()
        assert fed.rows()["0"].generation_tokens_per_second == pytest.approx(10 / INTERVAL)
    for _ in range(minutes):
        fed.round(60.0)
    deliver(fed, 1000)
    fed.round()

    row = fed.rows()["0"]
    assert (row.generation_tokens_per_second, row.finished, row.ttft) == (None, None, None)
    assert fed.live.total is not None
    assert fed.live.total.generation_tokens_per_second is None
    for _ in range(3):
        fed.step("s", 0.3)
        fed.round()
    assert fed.rows()["0"].generation_tokens_per_second == pytest.approx(10 / INTERVAL)
    for engine in (None, "0"):
        answer = fed.history(engine)
        rates = answer.series["generation_tokens_per_second"]
        if known:
            # Of all engines, too: 0 would be a measured zero.
            assert rates[-4] is None
        assert max(each for each in rates if each is not None) == pytest.approx(10 / INTERVAL)
        assert rates[-1] == pytest.approx(10 / INTERVAL)
        assert answer.series["ttft_p95"][-1] is not None
        assert max(map(sum, fed.heat("ttft", engine).counts)) <= 1


def test_gauges_of_an_engine_that_is_gone_are_not_known() -> None:
    """They leave the metrics page after 30 s, and this one with it."""
    fed = Viewed()
    fed.send_hello("s", [info()])
    fed.step("s", 0.3)
    assert fed.rows()["0"].running == 1
    fed.advance(40.0)
    (row,) = fed.live.engines

    assert (row.running, row.kv_cache_usage) == (None, None)
    assert row.state == "unreachable"
    assert row.last_seen == pytest.approx(fed.now + 999, abs=1.0)
