"""The front end's own families, read from prometheus_client's registry as increases."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from python_programs import run_python
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.connector_rows import FRONT_END
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep_adapters.vllm.frontend import FrontendTap

BOUNDS = {row.name: row.bounds for row in FRONT_END}
SLEEP = "vllm:sleep_mode_operation_duration_seconds"


def sleep_duration(registry: CollectorRegistry) -> Histogram:
    """Register the histogram of vLLM's sleep routes."""
    return Histogram(SLEEP, "Help.", ["operation"], buckets=BOUNDS[SLEEP], registry=registry)


def test_counter_grows_and_gauge_is_as_it_is() -> None:
    """Counters are sent as increases, gauges as values, in every call."""
    registry = CollectorRegistry()
    active = Gauge("vllm:websocket_connections_active", "Help.", registry=registry)
    accepted = Counter("vllm:websocket_connections_total", "Help.", registry=registry)
    tap = FrontendTap(registry)
    active.inc(2)
    accepted.inc(3)

    first = tap.families()
    accepted.inc()
    second = tap.families()
    third = tap.families()

    gauge = Family("vllm:websocket_connections_active", "gauge", samples=[Sample(value=2.0)])
    counter = "vllm:websocket_connections_total"
    assert first == [gauge, Family(counter, "counter", samples=[Sample(value=3.0)])]
    assert second == [gauge, Family(counter, "counter", samples=[Sample(value=1.0)])]
    assert third == [gauge]


def test_new_child_is_sent_at_zero() -> None:
    """Series that the engine creates in advance are sent at 0, once."""
    registry = CollectorRegistry()
    invocations = Counter(
        "vllm:tool_call_parser_invocations_total",
        "Help.",
        ["model_name", "mode", "outcome", "request_type"],
        registry=registry,
    )
    invocations.labels("a-model", "streaming", "tool_call", "responses")
    tap = FrontendTap(registry)

    (family,) = tap.families()

    # The model's name is the exporter's to add, as for every family of the engine.
    assert family.labels == ["mode", "outcome", "request_type"]
    assert family.samples == [Sample(["streaming", "tool_call", "responses"], 0.0)]
    assert tap.families() == []


def test_process_registry_is_found_when_it_is_loaded() -> None:
    """The tap imports neither prometheus_client nor vLLM, and finds them once imported."""
    printed = run_python(
        """
        import sys
        from sidestep_adapters.vllm.frontend import FrontendTap
        tap = FrontendTap()
        assert tap.families() == []
        assert not {"prometheus_client", "vllm"} & set(sys.modules)
        from prometheus_client import Counter
        Counter("vllm:websocket_connections_total", "Help.").inc(2)
        (family,) = tap.families()
        print(family.name, family.samples[0].value)
        """
    )

    assert printed == "vllm:websocket_connections_total 2.0\n"


def test_multiprocess_mode_gives_own_values(tmp_path: Path) -> None:
    """With a shared directory each process still reports its own values."""
    program = """
        import json
        from prometheus_client import CollectorRegistry, Gauge, Histogram, multiprocess
        from sidestep_adapters.vllm.frontend import FrontendTap
        duration = Histogram(
            "vllm:sleep_mode_operation_duration_seconds", "Help.", ["operation"], buckets=(1, 2)
        )
        flying = Gauge(
            "vllm:sleep_mode_operations_in_flight", "Help.", ["operation"],
            multiprocess_mode="livesum",
        )
        duration.labels("sleep").observe(1.5)
        flying.labels("sleep").inc()
        found = {
            family.name: [family.samples[0].counts, family.samples[0].value]
            for family in FrontendTap().families()
        }
        everybody = CollectorRegistry()
        multiprocess.MultiProcessCollector(everybody)
        name = "vllm:sleep_mode_operation_duration_seconds_count"
        print(json.dumps([found, everybody.get_sample_value(name, {"operation": "sleep"})]))
    """

    printed = [
        json.loads(run_python(program, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))) for _ in range(2)
    ]

    own = {
        "vllm:sleep_mode_operation_duration_seconds": [[0, 1, 0], 0.0],
        "vllm:sleep_mode_operations_in_flight": [[], 1.0],
    }
    assert printed == [[own, 1.0], [own, 2.0]]


@given(
    steps=st.lists(
        st.lists(st.floats(0, 1000) | st.sampled_from(BOUNDS[SLEEP]), max_size=5), max_size=5
    )
)
def test_deltas_add_up(steps: list[list[float]]) -> None:
    """The counts of all calls add up to those of the histogram."""
    registry = CollectorRegistry()
    duration = sleep_duration(registry)
    tap = FrontendTap(registry)
    counts, total = [0] * (len(BOUNDS[SLEEP]) + 1), 0.0

    for observations in steps:
        for seconds in observations:
            duration.labels("sleep").observe(seconds)
        found = tap.families()
        item = DIALECTS.decode(encode_item(Samples(0, 1.0, found)))
        assert isinstance(item, Samples)
        assert item.families == found
        for family in found:
            (sample,) = family.samples
            assert (family.kind, family.bounds) == ("histogram", [*BOUNDS[SLEEP]])
            counts = [a + b for a, b in zip(counts, sample.counts, strict=True)]
            total += sample.total

    cumulative = [
        reading.value
        for metric in registry.collect()
        for reading in metric.samples
        if reading.name == f"{SLEEP}_bucket"
    ]
    assert list(itertools.accumulate(counts)) == (cumulative or [0] * len(counts))
    assert total == pytest.approx(sum(itertools.chain(*steps)))
