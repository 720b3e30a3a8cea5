"""Exemplars: traces of observed requests on OpenMetrics and protobuf pages."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from exporters import Start, until
from intakes import Fed
from metric_families import families as protobuf_families
from metric_families import labels_of
from prometheus_server import BINARIES, prometheus
from rendered import copied, render, render_protobuf
from schedulers import WALL, Scheduler, actions
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import FrontEndLatencies, VllmStep
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import TextPage
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.protocol.iteration_stats import FINISH_REASONS, IterationStats
from sidestep.protocol.messages import CORE, ENGINE_CORE, FRONT_END, EngineInfo
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.settings import RequestSettings
from sidestep_adapters.publisher.publisher import Publisher

STOP, ABORT = map(FINISH_REASONS.index, ("stop", "abort"))
LATENCIES = {
    "vllm:time_to_first_token_seconds": 2.0,
    "vllm:inter_token_latency_seconds": 0.5,
    "vllm:request_time_per_output_token_seconds": 0.5,
    "vllm:e2e_request_latency_seconds": 2.75,
    "vllm:request_queue_time_seconds": 0.125,
}
"""Families with exemplars, and the values that ``request`` gives them."""
TRACE, SPAN = f"{7:032x}", f"{9:016x}"


def traced(number: int = 7, flags: str = "01") -> Identity:
    """Return the identity of a request with a trace context."""
    return Identity(trace=f"00-{number:032x}-{SPAN}-{flags}")


def request(
    number: int = 1, at: float = 100.0, identity: Identity | None = None, reason: int = STOP
) -> list[Event]:
    """Return the events of a request of two outputs that arrived at ``at``."""
    wall = WALL + at
    first, second = at + 2.0, at + 2.5
    return [
        Queued(number, at + 0.25, wall, 5, identity=identity),
        Scheduled(number, at + 0.375),
        Iteration(first, first, WALL + first, [Output(first, [number])]),
        Iteration(second, second, WALL + second, [Output(second, [number])]),
        Finished(number, at + 2.75, WALL + at + 2.75, reason, 5, 2),
    ]


def info(name: str = "0", **more: Any) -> EngineInfo:
    """Return an engine with a tap."""
    labels = {"engine": name, "model_name": "m"}
    return EngineInfo(name, "vllm", labels, features=[ENGINE_CORE], **more)


def fed_with(*events: Event, **settings: Any) -> Fed:
    """Return an intake with one engine that had these events."""
    made = Fed(**settings)
    made.send_hello("core", [info()])
    send(made, events)
    return made


def send(fed: Fed, events: Iterable[Event], stream: str = "core", engine: int = 0) -> None:
    """Send the events of a core."""
    found = [*events]
    fed.items(stream, [encode_item(RequestEvents(engine, 0.0, 1, found))] if found else [])


Found = dict[tuple[str, str], tuple[float, float, str, str]]
"""Value, time, trace and span by family and ``le``."""


def exemplars(page: str) -> Found:
    """Return the exemplars of an OpenMetrics page; each is in its bucket."""
    found: Found = {}
    text = page if page.endswith("# EOF\n") else f"{page}# EOF\n"
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        below: dict[Any, float] = defaultdict(lambda: -1.0)
        counts: dict[Any, float] = defaultdict(float)
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                continue
            own = tuple(sorted((n, v) for n, v in sample.labels.items() if n != "le"))
            bound = float(sample.labels["le"])
            if sample.exemplar is not None:
                one = sample.exemplar
                assert below[own] < one.value <= bound
                assert sample.value > counts[own], "an exemplar of an empty bucket"
                context = one.labels["trace_id"], one.labels["span_id"]
                found[family.name, sample.labels["le"]] = (
                    one.value,
                    float(one.timestamp),
                    *context,
                )
            below[own], counts[own] = bound, sample.value
    return found


def openmetrics(fed: Fed) -> str:
    """Return the engines' page in OpenMetrics."""
    return render(fed.intake.registry, openmetrics=True).decode()


def values(found: Found) -> dict[str, float]:
    """Return the values of exemplars by family."""
    return {family: value for (family, _), (value, *_) in found.items()}


def test_a_finished_request_is_an_exemplar_of_each_latency() -> None:
    """With value, time and trace context; the text format has no exemplars and the same samples."""
    fed = fed_with(*request(identity=traced()))
    found = exemplars(openmetrics(fed))
    assert values(found) == LATENCIES
    assert {one[2:] for one in found.values()} == {(TRACE, SPAN)}
    times = {family: one[1] for (family, _), one in found.items()}
    assert times["vllm:time_to_first_token_seconds"] == WALL + 102.0
    assert times["vllm:e2e_request_latency_seconds"] == WALL + 102.75
    plain = render(fed.intake.registry).decode()
    assert " # {" not in plain
    stripped = [line.partition(" # {")[0] for line in openmetrics(fed).splitlines()]
    samples = [line for line in stripped if not line.startswith("#")]
    assert samples == [line for line in plain.splitlines() if not line.startswith("#")]


def test_an_aborted_request_is_in_the_histograms_of_its_outputs_alone() -> None:
    """An abort is observed in no request histogram, so it is no exemplar there."""
    fed = fed_with(*request(identity=traced(), reason=ABORT))
    outputs = ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")
    assert values(exemplars(openmetrics(fed))) == {name: LATENCIES[name] for name in outputs}


@pytest.mark.parametrize(
    "identity",
    [
        None,
        Identity("cmpl-1"),
        traced(flags="00"),
        traced(0),
        Identity(trace=f"00-{'g' * 32}-{SPAN}-01"),
        Identity(trace=f"00-{TRACE}-{0:016x}-01"),
        Identity(trace=f"{TRACE}-{SPAN}"),
        Identity(trace="00"),
        Identity(trace=f'00-{TRACE}"}} 1 # {{-01'),
    ],
)
def test_without_a_recorded_trace_nothing_is_kept(identity: Identity | None) -> None:
    """Neither without a trace context, nor with one that is not sampled or not valid."""
    fed = fed_with(*request(identity=identity))
    assert exemplars(openmetrics(fed)) == {}
    assert not fed.intake.registry.has_exemplars


def test_a_bucket_has_its_newest_exemplar() -> None:
    """Each bucket has one; the page of an engine that changed has the new ones."""
    fed = fed_with(*request(1, 100.0, traced(7)))
    page = TextPage(exemplars=True)

    def found() -> Found:
        texts = page.write(copied(fed.intake.registry), openmetrics=True)
        return exemplars(b"".join(texts).decode())

    assert {one[2] for one in found().values()} == {f"{7:032x}"}
    send(fed, request(2, 200.0, traced(8)))
    assert {one[2] for one in found().values()} == {f"{8:032x}"}
    send(fed, request(3, 150.0, traced(9)))
    assert {one[2] for one in found().values()} == {f"{8:032x}"}
    send(fed, request(4, 300.0))
    assert {one[2] for one in found().values()} == {f"{8:032x}"}
    assert len(found()) == len(LATENCIES)


def test_latencies_of_front_ends_have_the_trace_of_their_request() -> None:
    """The request is found by its arrival; the core's own observation has no exemplar then."""
    fed = Fed()
    fed.send_hello("core", [info(role=CORE)])
    fed.send_hello("api", [info(role=FRONT_END)])
    send(fed, request(identity=traced()))
    assert not values(exemplars(openmetrics(fed))).keys() & {
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
    }
    arrival = WALL + 100.0
    latencies = FrontEndLatencies(arrival + 4.0, [2.25, 1.0], [4.0])
    sent = FrontEndLatencies(arrival + 2.25, [2.25], [])
    items = [encode_item(VllmStep(0, 5.0, 1.0, front_end=one)) for one in (sent, latencies)]
    fed.items("api", items)
    found = values(exemplars(openmetrics(fed)))
    assert found["vllm:time_to_first_token_seconds"] == 2.25
    assert found["vllm:e2e_request_latency_seconds"] == 4.0


def test_merged_series_have_the_newest_exemplar_of_all() -> None:
    """If all engines have the same bounds; otherwise no exemplar is known to be in a bucket."""
    fed = Fed()
    for name, number in (("0", 7), ("1", 8)):
        fed.send_hello(name, [info(name)])
        send(fed, request(1, 100.0 + number, traced(number)), name)

    def pod() -> Found:
        page = render(fed.intake.registry, SeriesFilter().for_pod, openmetrics=True)
        return exemplars(page.decode())

    assert {one[2] for one in pod().values()} == {f"{8:032x}"}
    assert values(pod()) == LATENCIES
    bounds = {"request_latency": [1.0, 60.0], "time_to_first_token": [1.0, 60.0]}
    fed.send_hello("2", [info("2", bounds=bounds)])
    send(fed, request(1, 300.0, traced(9)), "2")
    assert "vllm:e2e_request_latency_seconds" not in values(pod())


@pytest.mark.parametrize("both", [False, True])
def test_protobuf_pages_have_exemplars(both: bool) -> None:
    """In classic buckets, and in the list for native ones."""
    fed = fed_with(*request(identity=traced()), native=NativeSettings({}, lambda: 1.0, both=both))
    for number in (7, 8):
        if number > 7:
            send(fed, request(2, 200.0, traced(number)))
        page = render_protobuf(fed.intake.registry)
        native: dict[str, float] = {}
        classic: dict[str, float] = {}
        for family in protobuf_families(page):
            for metric in family.metric:
                assert labels_of(metric)
                histogram = metric.histogram
                for found, several in (
                    (native, histogram.exemplars),
                    (classic, [b.exemplar for b in histogram.bucket if b.exemplar.label]),
                ):
                    for one in several:
                        found[family.name] = one.value
                        context = {pair.name: pair.value for pair in one.label}
                        assert context == {"trace_id": f"{number:032x}", "span_id": SPAN}
                        assert one.timestamp.seconds > WALL
        assert native == LATENCIES
        assert classic == (LATENCIES if both else {})


@given(actions, st.booleans())
def test_every_exemplar_was_observed(chosen: list[tuple[str, int, int]], by_token: bool) -> None:
    """In the histogram of its latency, whatever happened to its request."""
    events = Scheduler().run(chosen)
    for event in events:
        if isinstance(event, Queued):
            event.identity = traced(event.request + 1)
    tracker = RequestTracker(RequestSettings(latency="token" if by_token else "output"))
    out = tracker.apply(RequestEvents(0, 0.0, 1, events))
    stats: IterationStats = out.iteration
    finished = stats.finished_requests
    observed: dict[str, list[float | None]] = {
        "ttft": [*stats.time_to_first_tokens_iter],
        "inter_token": [
            *stats.inter_token_latencies_iter,
            *(run.value for run in stats.inter_token_latencies_iter_runs),
        ],
        "e2e": [one.e2e_latency for one in finished],
        "queue": [one.queued_time for one in finished],
        "time_per_output_token": [one.mean_time_per_output_token for one in finished],
    }
    for one in out.traced:
        assert one.seconds in observed[one.latency], one.latency
    served = [e for e in events if isinstance(e, Finished) and e.reason != ABORT]
    ends = [one for one in out.traced if one.latency == "e2e"]
    assert len(ends) == len(served)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterable[Publisher]:
    """Return a core's publisher."""
    made = Publisher(f"ipc://{tmp_path}/i.ipc", "s", [info()])
    yield made
    made.close(0.1)


async def test_prometheus_stores_exemplars(
    start: Start, tmp_path: Path, publisher: Publisher
) -> None:
    """As ``/api/v1/query_exemplars`` answers: value, time and trace of each request."""
    binary = BINARIES["3"]
    if binary is None:
        pytest.skip("there is no Prometheus 3 (make tools)")
    now = time.time()
    begun = now - 10.0 - WALL
    endpoint = (f"ipc://{tmp_path}/i.ipc",)
    async with start(ingest_endpoint=endpoint, histograms="native") as exporter:
        targets = {"vllm": {"pod": exporter.url}}
        features = ("exemplar-storage",)
        with prometheus(binary, tmp_path / "p", targets, features=features) as server:
            for number in (1, 2):
                events = request(number, begun + number, traced(number))
                publisher.push(RequestEvents(0, 0.0, 1, events))
                wanted = {(f"{n:032x}", LATENCIES[E2E]) for n in range(1, number + 1)}

                async def is_stored(wanted: set[tuple[str, float]] = wanted) -> bool:
                    found = await asyncio.to_thread(stored, server, now)
                    return {(trace, value) for trace, value, _ in found} == wanted

                await until(is_stored, 60.0, "exemplars in Prometheus")
            found = await asyncio.to_thread(stored, server, now)
    assert [at for *_, at in sorted(found)] == pytest.approx(
        [now - 10.0 + number + 2.75 for number in (1, 2)], abs=0.002
    )


E2E = "vllm:e2e_request_latency_seconds"


def stored(server: Any, now: float) -> Sequence[tuple[str, float, float]]:
    """Return trace, value and time of the exemplars of the end-to-end latency."""
    answer = server.get(
        "query_exemplars", query=f'{{__name__=~"{E2E}.*"}}', start=now - 60, end=now + 60
    )
    return [
        (one["labels"]["trace_id"], float(one["value"]), float(one["timestamp"]))
        for series in answer
        for one in series["exemplars"]
    ]
