"""Recorded calls of an engine's metric objects: cheap to record, and converted exactly."""

from __future__ import annotations

import sys
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item, encode_item
from sidestep.protocol.limits import (
    MAX_ITEM_BYTES,
    MAX_LABEL_CHARS,
    MAX_OBSERVATIONS,
)
from sidestep.protocol.self_described import Sample, Samples
from sidestep_adapters.sglang import deferred_metrics as module
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics, MetricSource
from sidestep_adapters.sglang.metric_stubs import MetricStub

NAMES = ("model", "rank", "mode")


class Numpy:
    """A scalar that is converted to a number only by ``float``."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


class Bench:
    """Recorded calls, stubs that record them, and the resulting items."""

    def __init__(self) -> None:
        self.deferred = DeferredMetrics()
        self.failures: list[str] = []
        self.deferred.fail = self.failures.append

    def stub(self, kind: Any, own: tuple[str, ...] = ("mode",), **options: Any) -> MetricStub:
        """Return the stub of one family; counters end in ``_total``."""
        name = "sglang:x_total" if kind == "counter" else "sglang:x"
        return MetricStub(self.deferred, name, kind, engine=0, labelnames=NAMES, own=own, **options)

    def items(self) -> list[Item]:
        """Return the items of all recorded calls, as the exporter decodes them."""
        found: list[Item] = []
        while self.deferred:
            found += [DIALECTS.decode(encode_item(item)) for item in self.deferred.items()]
        return found

    def samples(self) -> list[Sample]:
        """Return the samples of all families."""
        families = [f for item in self.items() if isinstance(item, Samples) for f in item.families]
        return [sample for family in families for sample in family.samples]


@pytest.fixture
def bench() -> Bench:
    """Return a bench without recorded calls."""
    return Bench()


def test_label_values_of_other_types_become_text(bench: Bench) -> None:
    """Equal values of different types are different children; long and unprintable ones are cut."""
    stub = bench.stub("counter")
    for value in (1, True, 1.0, None, "1"):
        stub.labels(mode=value).inc()
    stub.labels(mode="a\nb" + "x" * 999).inc()
    found = {sample.labels[0]: sample.value for sample in bench.samples()}

    odd = ("a?b" + "x" * 999)[:MAX_LABEL_CHARS]
    assert found == {"1": 2, "True": 1, "1.0": 1, "None": 1, odd: 1}


def test_gauges_are_part_of_the_current_state(bench: Bench) -> None:
    """All children have their last value; counters and histograms have no current state."""
    gauge, counter = bench.stub("gauge"), bench.stub("counter")
    gauge.labels(mode="a").set(1)
    gauge.labels(mode="b").set(2)
    counter.labels(mode="a").inc()
    bench.items()
    (again,) = gauge.current_state(1.0)

    assert isinstance(again, Samples)
    assert again.families[0].samples == [Sample(["a"], 1), Sample(["b"], 2)]
    assert counter.current_state(1.0) == []


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 2e15])
def test_an_invalid_gauge_value_has_no_sample(bench: Bench, value: float) -> None:
    """The value is left out of items and of the current state, and is no failure."""
    stub = bench.stub("gauge", ())
    stub.set(value)

    assert bench.items() == []
    assert stub.current_state(1.0) == []
    assert bench.failures == []


def test_scalars_of_other_libraries_are_numbers(bench: Bench) -> None:
    """Every value that ``float`` accepts is a number."""
    counter, gauge = bench.stub("counter", ()), bench.stub("gauge", ())
    histogram = bench.stub("histogram", ())
    counter.inc(Numpy(2.5))  # type: ignore[arg-type]
    counter.inc(True)
    gauge.set(Decimal("0.25"))  # type: ignore[arg-type]
    histogram.observe(Numpy(7.0))  # type: ignore[arg-type]

    assert bench.samples() == [
        Sample([], 3.5),
        Sample([], 0.25),
        Sample([], observations=[7.0]),
    ]


@pytest.mark.parametrize("value", [-1, float("nan"), "many", None, 10**400])
def test_an_invalid_increment_drops_only_itself(bench: Bench, value: Any) -> None:
    """The call is counted as a failure; the other calls are sent."""
    stub = bench.stub("counter", ())
    stub.inc(1)
    stub.inc(value)
    stub.inc(2)

    assert bench.samples() == [Sample([], 3)]
    assert len(bench.failures) == 1


def test_items_stay_within_the_limits(bench: Bench, monkeypatch: Any) -> None:
    """Each item stays below the limits, for any number of calls and children."""
    monkeypatch.setattr(module, "SLICE", 1 << 20)
    stub = bench.stub("histogram")
    count = 3 * MAX_OBSERVATIONS + 5
    for value in range(count):
        stub.record({"mode": "a" if value % 3 else "b"}, value / 7, 2)
    counter = bench.stub("counter", ())
    counter.inc(1 << 62)
    counter.inc(1 << 62)
    items = bench.items()
    samples = [s for i in items if isinstance(i, Samples) for f in i.families for s in f.samples]

    assert len(items) > 4
    for item in items:
        assert len(encode_item(item)) <= MAX_ITEM_BYTES
        assert isinstance(item, Samples)
        held = [sample for family in item.families for sample in family.samples]
        assert sum(1 + len(s.observations) for s in held) <= MAX_OBSERVATIONS + 1
    assert sum(len(s.observations) for s in samples) == count
    assert sum(sum(s.weights) for s in samples) == 2 * count
    assert sum(int(s.value) for s in samples) == 2 << 62


def test_no_call_is_lost_without_a_count(bench: Bench) -> None:
    """Calls become items in slices, in order; those beyond the limit or after the end are counted."""
    bench.deferred.limit = module.SLICE + 10
    stub = bench.stub("histogram", ())
    for value in range(module.SLICE + 17):
        stub.observe(value)
    bench.deferred.items()
    assert (len(bench.deferred), bench.deferred.dropped) == (10, 7)
    stub.observe(99)
    (sample,) = bench.samples()
    assert sample.observations == [*map(float, range(module.SLICE, module.SLICE + 10)), 99.0]

    stub.observe(5)
    bench.deferred.close()
    stub.observe(1)
    assert (len(bench.deferred), bench.deferred.dropped) == (0, 8)


def test_a_failing_source_affects_no_other(bench: Bench) -> None:
    """Failures to add a call and to make items are counted."""

    class Broken(MetricSource):
        def add(self, key: Any, value: Any, weight: int) -> None:  # noqa: ARG002
            if value:
                raise RuntimeError("bug")

        def items(self, now: float) -> list[Item]:  # noqa: ARG002
            raise RuntimeError("bug")

    record = Broken(bench.deferred, 0).record
    stub = bench.stub("counter", ())
    record((), 0, 0)
    stub.inc()
    record((), 1, 0)

    assert bench.samples() == [Sample([], 1)]
    assert len(bench.failures) == 2


def test_recording_is_one_append(bench: Bench) -> None:
    """The engine's thread takes no lock, makes no system call and reads no number."""
    child = bench.stub("counter").labels(mode="a")
    called: list[str] = []

    def record(_: object, event: str, what: object) -> None:
        if event == "c_call":
            called.append(getattr(what, "__qualname__", repr(what)))

    sys.setprofile(record)
    child.inc(3)
    sys.setprofile(None)

    assert called == ["len", "deque.append", "setprofile"]


def test_a_call_that_the_engines_object_rejects_is_not_recorded(bench: Bench) -> None:
    """In mode beside the engine's object comes first."""
    native = Counter("x_total", "Theirs.", NAMES, registry=CollectorRegistry())
    counter = bench.stub("counter", native=native, beside=True)
    with pytest.raises(ValueError, match="non-negative"):
        counter.labels("m", 0, "a").inc(-1)

    assert bench.samples() == []
    assert bench.failures == []
