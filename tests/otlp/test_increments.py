"""Delta temporality: increments add up to the totals, over refusals, restarts and resets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from exporters import Start, until
from otlp_receiver import Receiver, attributes, metrics_of, points_of, receiver
from pages import get, parse
from replays import replay
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.otlp.increments import FILE, KEPT, Increments
from sidestep.otlp.page_families import Exponential, Series, SeriesFamily, Value
from sidestep.snapshot.state_file import StateDirectory
from web_servers import server

PREFERENCE = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
TOKENS = "vllm:generation_tokens"
KINDS = {"counter", "histogram"}
START = 5
CLASSIC: Value = ((1.0, 2.0), [1, 2, 3], 9.0)


def increment(
    increments: Increments, value: Value, stamp: int, start: int = START, kind: str = "counter"
) -> Series | None:
    """Return what is sent of a series."""
    family = SeriesFamily("f", kind, "", [Series({"a": "b"}, value, start)])
    (found,) = increments.of([family], stamp)
    return next(iter(found.series), None)


def test_an_increment_begins_where_the_last_one_ended() -> None:
    """The first one begins with the counter; one that was not accepted is part of the next one."""
    found = Increments(KINDS, None)
    assert increment(found, 10.0, 100) == Series({"a": "b"}, 10.0, START)
    found.discard()
    assert increment(found, 12.0, 200) == Series({"a": "b"}, 12.0, START)
    found.commit()
    assert increment(found, 15.0, 300) == Series({"a": "b"}, 3.0, 200)
    found.discard()
    assert increment(found, 16.0, 400) == Series({"a": "b"}, 4.0, 200)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (3.0, 2.0),
        (CLASSIC, ((1.0, 2.0), [0, 9, 9], 9.0)),
        (CLASSIC, ((1.0,), [9, 9], 9.0)),
        (CLASSIC, Exponential(1, 0, {}, 0.0)),
        (Exponential(1, 0, {4: 2}, 1.0), Exponential(2, 9, {8: 9}, 9.0)),
        (Exponential(1, 0, {4: 2}, 1.0), Exponential(1, 9, {4: 1}, 9.0)),
        (Exponential(1, 1, {}, 1.0), Exponential(1, 0, {}, 0.0)),
        (Exponential(1, 1, {}, 1.0), CLASSIC),
    ],
)
def test_a_counter_that_begins_again_is_sent_whole(before: Value, now: Value) -> None:
    """The total decreases, or has other buckets."""
    found = Increments(KINDS, None)
    increment(found, before, 100)
    found.commit()
    assert increment(found, now, 200) == Series({"a": "b"}, now, 100)


@given(st.lists(st.lists(st.floats(0.0, 1e9), max_size=20), max_size=5), st.integers(-2, 6))
def test_increments_of_histograms_add_up(batches: list[list[float]], schema: int) -> None:
    """Classic and exponential ones, whose resolution may decrease."""
    classic, exponential = Increments(KINDS, None), Increments(KINDS, None)
    histogram = NativeHistogram((1.0, 10.0), schema, 3.0)
    counts, count = [0, 0, 0], 0
    for stamp, batch in enumerate(batches, 100):
        for value in batch:
            histogram.observe(value)
        total = histogram.sum
        sent = increment(classic, (histogram.bounds, [*histogram.counts], total), stamp)
        assert sent is not None
        assert isinstance(sent.value, tuple)
        counts = [a + b for a, b in zip(counts, sent.value[1], strict=True)]
        native = Exponential(histogram.schema, histogram.zeros, dict(histogram.buckets), total)
        sent = increment(exponential, native, stamp)
        assert sent is not None
        assert isinstance(sent.value, Exponential)
        count += sent.value.zeros + sum(sent.value.buckets.values())
        classic.commit()
        exponential.commit()
    assert counts == histogram.counts
    assert count == sum(counts)


def test_nothing_is_sent_twice_after_days_without_an_answer() -> None:
    """A refused push has read all series, a failed one may have read only others."""
    found = Increments(KINDS, None)
    increment(found, 10.0, 100)
    found.commit()
    increment(found, 12.0, 100 + KEPT)
    found.discard()
    found.save(100 + KEPT)
    assert increment(found, 15.0, 200 + KEPT) == Series({"a": "b"}, 5.0, 100)
    found.discard()
    found.save(200 + KEPT)
    found.save(300 + KEPT, has_read_all=False)
    assert increment(found, 16.0, 400 + KEPT) == Series({"a": "b"}, 6.0, 100)


def test_a_start_that_becomes_earlier_is_no_new_beginning() -> None:
    """The clock was set back, and the exporter has restarted since; a later start is one."""
    found = Increments(KINDS, None)
    increment(found, 10.0, 100, start=50)
    found.commit()
    assert increment(found, 12.0, 200, start=40) == Series({"a": "b"}, 2.0, 100)
    assert increment(found, 12.0, 200, start=60) == Series({"a": "b"}, 12.0, 100)


def test_the_total_of_a_series_that_has_left_is_forgotten_after_a_day() -> None:
    """Else those of all engines that there have ever been would be kept."""
    found = Increments(KINDS, None)
    increment(found, 10.0, 100)
    found.commit()
    found.save(100)
    found.save(100 + KEPT)
    assert increment(found, 16.0, 200 + KEPT) == Series({"a": "b"}, 16.0, START)


def test_totals_outlive_the_process(tmp_path: Path) -> None:
    """Those of all kinds, and of any size; a damaged file is none."""
    values = [10.0, 10**20, CLASSIC, Exponential(1, 2, {3: 4}, 9.0)]
    directory = StateDirectory(tmp_path)
    for value in values:
        found = Increments(KINDS, directory)
        increment(found, value, 100)
        found.commit()
        found.save(100)
        found = Increments(KINDS, directory)
        sent = increment(found, value, 200)
        assert sent is not None
        assert sent.start == 100
    # More than any engine counts: a warning, no end of the process.
    increment(found, ((), [1 << 70], 0.0), 300)
    found.commit()
    found.save(300)
    (tmp_path / FILE).write_bytes(b"torn")
    found = Increments(KINDS, directory)
    assert increment(found, 12.0, 200) == Series({"a": "b"}, 12.0, START)
    directory.release()


def sums(found: Receiver) -> dict[tuple[str, str], float]:
    """Return the sum of all increments of vLLM's counters and counts, by family and engine."""
    total: dict[tuple[str, str], float] = defaultdict(float)
    for request in found.requests:
        for metric in metrics_of(request):
            form: Any = metric.WhichOneof("data")
            if form in ("sum", "histogram"):
                assert getattr(metric, form).aggregation_temporality == 1
                for point in points_of(metric):
                    engine = attributes(point.attributes).get("engine", "")
                    name = metric.name.removesuffix("_total") if form == "sum" else metric.name
                    total[name, engine] += point.count if form == "histogram" else point.as_double
    return {key: value for key, value in total.items() if key[0].startswith("vllm:") and value}


async def another(found: Sequence[object]) -> None:
    """Return when two more have been added."""
    count = len(found)
    await until(lambda: len(found) >= count + 2)


async def test_increments_add_up_to_the_page(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Over refused requests, an outage and restarts with a state directory."""
    monkeypatch.setenv(PREFERENCE, "delta")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")

    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=503)

    async with receiver() as found:
        flags = {"otlp_endpoint": found.url, "otlp_interval": "1", "state_dir": str(tmp_path)}
        for run in ("core_dp", "core_aborts"):
            found.answer = None
            async with start(**flags) as exporter:
                await another(found.requests)
                found.answer = refuse
                await replay(exporter, run, run)
                await another(found.headers)
                # After the first run, a successor sends what this exporter could not.
                if run == "core_aborts":
                    found.answer = None
                    await another(found.requests)
                page = parse(await get(exporter.url))
    expected: dict[tuple[str, str], float] = defaultdict(float)
    for name, family in page.items():
        for (sample, labels), value in family.samples.items():
            counted = family.kind in KINDS and sample in (f"{name}_total", f"{name}_count")
            if name.startswith("vllm:") and value and counted:
                expected[name, dict(labels).get("engine", "")] += value
    assert len(expected) > 20
    found_sums = sums(found)
    assert found_sums.keys() ^ expected.keys() == set()
    assert found_sums == pytest.approx(expected)


@pytest.mark.parametrize(
    ("preference", "first", "last"), [("delta", 0.0, 5.0), ("lowmemory", 1e9, 1e9 + 5)]
)
async def test_scraped_counters_begin_with_their_next_increment(
    start: Start, monkeypatch: pytest.MonkeyPatch, preference: str, first: float, last: float
) -> None:
    """Low memory means that counters stay cumulative."""
    monkeypatch.setenv(PREFERENCE, preference)
    value = 1e9

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=f"# TYPE other_total counter\nother_total {value}\n")

    async with receiver() as found, server(page) as url:

        def values() -> set[float]:
            return {
                point.as_double
                for request in found.requests
                for metric in metrics_of(request)
                if metric.name == "other_total"
                for point in points_of(metric)
            }

        flags = {"otlp_endpoint": found.url, "otlp_interval": "1"}
        async with start(scrape=(f"{url}/metrics",), **flags):
            await until(lambda: first in values())
            value += 5
            await until(lambda: last in values())
        assert values() <= {0.0, first, last}
