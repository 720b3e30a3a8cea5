"""Notes of an engine's metric objects: cheap to take down, and nothing of them is guessed."""

from __future__ import annotations

import math
import sys
from decimal import Decimal
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sidestep.engines.items import Item, decode_item, encode_item
from sidestep.protocol.limits import (
    MAX_ITEM_BYTES,
    MAX_LABEL_CHARS,
    MAX_OBSERVATIONS,
    MAX_OPEN_VALUES,
    VALUE_LIMIT,
)
from sidestep.protocol.self_described import Sample, Samples
from sidestep_adapters.sglang import deferred_metrics as module
from sidestep_adapters.sglang.deferred_metrics import SLICE, DeferredMetrics, MetricSource
from sidestep_adapters.sglang.metric_stubs import ForwardingChildStub, MetricStub

NAMES = ("model", "rank", "mode")


class Numpy:
    """A scalar that is a number only when it is asked to be one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value


class Bench:
    """Notes, meters of them, and what their items say."""

    def __init__(self) -> None:
        self.deferred = DeferredMetrics()
        self.failures: list[str] = []
        self.deferred.fail = self.failures.append

    def stub(self, kind: Any, own: tuple[str, ...] = ("mode",), **options: Any) -> MetricStub:
        """One family; counters end in ``_total``."""
        name = "sglang:x_total" if kind == "counter" else "sglang:x"
        return MetricStub(self.deferred, name, kind, engine=0, labelnames=NAMES, own=own, **options)

    def items(self) -> list[Item]:
        """All that wait, as the exporter decodes them."""
        found: list[Item] = []
        while self.deferred:
            found += [decode_item(encode_item(item)) for item in self.deferred.items()]
        return found

    def samples(self) -> list[Sample]:
        """Of all families."""
        families = [f for item in self.items() if isinstance(item, Samples) for f in item.families]
        return [sample for family in families for sample in family.samples]


@pytest.fixture
def bench() -> Bench:
    """Nothing noted."""
    return Bench()


def test_children_are_told_apart_by_their_own_labels(bench: Bench) -> None:
    """By position or by name, in any order; the engine's labels are left out."""
    stub = bench.stub("counter")
    stub.labels("m", 0, "a").inc(2)
    stub.labels(mode="a", rank=0, model="m").inc()
    stub.labels(rank=0, model="m", mode="b").inc(0.5)

    assert bench.samples() == [Sample(["a"], 3), Sample(["b"], 0.5)]


def test_labels_that_are_no_text_look_as_the_engine_shows_them(bench: Bench) -> None:
    """Equal values of different types are different children; long and odd ones are cut."""
    stub = bench.stub("counter")
    for value in (1, True, 1.0, None, "1"):
        stub.labels(mode=value).inc()
    stub.labels(mode="a\nb" + "x" * 999).inc()
    found = {sample.labels[0]: sample.value for sample in bench.samples()}

    odd = ("a?b" + "x" * 999)[:MAX_LABEL_CHARS]
    assert found == {"1": 2, "True": 1, "1.0": 1, "None": 1, odd: 1}


def test_several_own_labels_are_one_child(bench: Bench) -> None:
    """In the order of the family's own names."""
    stub = bench.stub("counter", ("mode", "rank"))
    stub.labels("m", 3, "a").inc()
    stub.labels(mode="a", rank="3", model="m").inc()

    assert bench.samples() == [Sample(["a", "3"], 2)]


def test_a_family_without_own_labels_has_one_child(bench: Bench) -> None:
    """Whether the engine asks for it by labels or, where the family has none, not."""
    stub = bench.stub("counter", ())
    stub.labels(model="m", rank=0, mode="a").inc()
    stub.labels("m", 0, "a").inc()
    stub.inc()

    assert bench.samples() == [Sample([], 3)]


def test_a_gauge_is_set_and_moved(bench: Bench) -> None:
    """Only what it came to is sent; what is added later is added to that."""
    stub = bench.stub("gauge", ())
    stub.inc(2)
    stub.set(10)
    stub.inc()
    stub.dec(0.5)
    first = bench.samples()
    stub.labels("m", 0, "a").dec()

    assert first == [Sample([], 10.5)]
    assert bench.samples() == [Sample([], 9.5)]


def test_gauges_can_be_told_again(bench: Bench) -> None:
    """All children as they were last; counters and histograms have nothing to repeat."""
    gauge, counter = bench.stub("gauge"), bench.stub("counter")
    gauge.labels(mode="a").set(1)
    gauge.labels(mode="b").set(2)
    counter.labels(mode="a").inc()
    bench.items()
    (again,) = gauge.current_state(1.0)

    assert isinstance(again, Samples)
    assert again.families[0].samples == [Sample(["a"], 1), Sample(["b"], 2)]
    assert counter.current_state(1.0) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2e15])
def test_a_gauge_that_no_page_can_show_has_no_sample(bench: Bench, value: float) -> None:
    """Neither now nor when gauges are told again; it counts as no failure."""
    stub = bench.stub("gauge", ())
    stub.set(value)

    assert bench.items() == []
    assert stub.current_state(1.0) == []
    assert bench.failures == []


def test_scalars_of_other_libraries_are_numbers(bench: Bench) -> None:
    """Whatever can be made a float."""
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


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "many", None, 1 << 63, 10**400])
def test_what_cannot_be_counted_costs_itself(bench: Bench, value: Any) -> None:
    """It is counted as a failure; the notes around it are sent."""
    stub = bench.stub("counter", ())
    stub.inc(1)
    stub.inc(value)
    stub.inc(2)

    assert bench.samples() == [Sample([], 3)]
    assert len(bench.failures) == 1


def test_a_label_that_is_missing_costs_itself(bench: Bench) -> None:
    """Prometheus would raise; here nothing may."""
    stub = bench.stub("counter")
    stub.labels(rank=0).inc()
    stub.labels(mode="a").inc()

    assert bench.samples() == [Sample(["a"], 1)]
    assert len(bench.failures) == 1


@pytest.mark.parametrize("amount", [1 << 62, 4e18, 1e15 + 1, 3_000_000_000_000_001])
def test_more_than_a_sample_holds_is_told_in_several(bench: Bench, amount: float) -> None:
    """Floating point operations of a step; not one of them is lost."""
    stub = bench.stub("counter", ())
    stub.inc(amount)
    samples = bench.samples()

    assert len(samples) > 1
    assert max(sample.value for sample in samples) <= VALUE_LIMIT
    assert sum(int(sample.value) for sample in samples) == int(amount)


def test_weights_count_a_value_so_often(bench: Bench) -> None:
    """They are told only where one is not 1."""
    stub = bench.stub("histogram", ())
    for value, weight in ((0.5, 3), (0.25, 1)):
        stub.record((), value, weight)
    first = bench.samples()
    stub.observe(0.125)

    assert first == [Sample([], observations=[0.5, 0.25], weights=[3, 1])]
    assert bench.samples() == [Sample([], observations=[0.125])]


def test_a_child_can_be_shown_before_it_counts(bench: Bench) -> None:
    """A weight of 0 says that it exists."""
    counter, histogram = bench.stub("counter"), bench.stub("histogram")
    counter.record({"mode": "a"}, 0, 0)
    histogram.record({"mode": "a"}, 0, 0)

    assert bench.samples() == [Sample(["a"], 0), Sample(["a"])]


def test_counts_by_bucket_travel_as_they_are(bench: Bench) -> None:
    """Where single values are not known any more."""
    stub = bench.stub("histogram")
    stub.record({"mode": "a"}, ([1, 0, 2], 7.5), 1)

    assert bench.samples() == [Sample(["a"], counts=[1, 0, 2], total=7.5)]


def test_notes_that_find_no_place_are_counted(bench: Bench) -> None:
    """Exactly; what is there stays, in its order, and there is place again after a flush."""
    bench.deferred.limit = 10
    stub = bench.stub("histogram", ())
    for value in range(17):
        stub.observe(value)

    assert bench.deferred.dropped == 7
    assert bench.samples() == [Sample([], observations=[float(n) for n in range(10)])]
    stub.observe(99)
    assert bench.deferred.dropped == 7
    assert bench.samples() == [Sample([], observations=[99.0])]


def test_a_slice_is_taken_at_a_time(bench: Bench) -> None:
    """The interpreter belongs to the engine; no note is taken twice or left behind."""
    stub = bench.stub("histogram", ())
    count = 2 * SLICE + 3
    for value in range(count):
        stub.observe(value)
    left, seen = [], list[float]()
    while bench.deferred:
        (item,) = bench.deferred.items()
        assert isinstance(item, Samples)
        seen += item.families[0].samples[0].observations
        left.append(len(bench.deferred))

    assert left == [count - SLICE, count - 2 * SLICE, 0]
    assert seen == [float(n) for n in range(count)]


def test_items_stay_within_the_limits(bench: Bench, monkeypatch: Any) -> None:
    """However much was noted of however many children: each can be sent, and holds its share."""
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


def test_a_source_that_fails_costs_no_other(bench: Bench) -> None:
    """Neither when it takes a note nor when it tells of it."""

    class Broken(MetricSource):
        def add(self, key: Any, value: Any, weight: int) -> None:  # noqa: ARG002
            if value:
                raise RuntimeError("bug")

        def items(self, now: float) -> list[Item]:  # noqa: ARG002
            raise RuntimeError("bug")

    record = bench.deferred.recorder(Broken())
    stub = bench.stub("counter", ())
    record((), 0, 0)
    stub.inc()
    record((), 1, 0)

    assert bench.samples() == [Sample([], 1)]
    assert len(bench.failures) == 2


def test_clearing_forgets_all(bench: Bench) -> None:
    """And whoever noted may go on."""
    stub = bench.stub("counter", ())
    stub.inc(5)
    bench.deferred.clear()
    stub.inc(1)

    assert bench.samples() == [Sample([], 1)]


def test_nothing_is_kept_for_nobody(bench: Bench) -> None:
    """Once no publisher will come for notes, they are counted and let go."""
    stub = bench.stub("counter", ())
    stub.inc(5)
    bench.deferred.close()
    stub.inc(1)

    assert (len(bench.deferred), bench.deferred.dropped) == (0, 1)


def test_noting_is_one_append(bench: Bench) -> None:
    """No lock, no system call and no number looked at on the engine's thread."""
    child = bench.stub("counter").labels(mode="a")
    called: list[str] = []

    def record(_: object, event: str, what: object) -> None:
        if event == "c_call":
            called.append(getattr(what, "__qualname__", repr(what)))

    sys.setprofile(record)
    child.inc(3)
    sys.setprofile(None)

    assert called == ["len", "deque.append", "setprofile"]


def test_a_family_keeps_no_more_children_than_a_page_shows(bench: Bench) -> None:
    """Those beyond are made each time, and count as well."""
    stub = bench.stub("counter")
    for _ in range(2):
        for number in range(2 * MAX_OPEN_VALUES):
            stub.labels(mode=str(number)).inc()
    samples = bench.samples()

    assert {sample.value for sample in samples} <= {1, 2}
    assert sum(sample.value for sample in samples) == 4 * MAX_OPEN_VALUES
    assert stub.labels(mode="0") is stub.labels(mode="0")
    assert stub.labels(mode="999") is not stub.labels(mode="999")


def natives() -> dict[str, Any]:
    """One of each kind, of prometheus_client's."""
    registry = CollectorRegistry()
    return {
        "counter": Counter("x_total", "Theirs.", NAMES, registry=registry),
        "gauge": Gauge("y", "Theirs.", NAMES, registry=registry),
        "histogram": Histogram("z", "Theirs.", NAMES, registry=registry),
    }


def test_beside_the_engines_object_hears_everything(bench: Bench) -> None:
    """First; what it refuses it refuses aloud, and that is not noted either."""
    found = natives()
    labels = {"model": "m", "rank": 0, "mode": "a"}
    counter, gauge, histogram = (
        bench.stub(kind, native=found[kind], beside=True) for kind in found
    )
    counter.labels(**labels).inc(2)
    with pytest.raises(ValueError, match="non-negative"):
        counter.labels(**labels).inc(-1)
    gauge.labels("m", 0, "a").inc(3)
    gauge.labels("m", 0, "a").dec()
    histogram.labels(**labels).observe(0.3)
    gauge.labels("m", 0, "b").set(7)

    assert found["counter"].labels(**labels)._value.get() == 2
    assert found["gauge"].labels(**labels)._value.get() == 2
    assert found["gauge"].labels("m", 0, "b")._value.get() == 7
    assert found["histogram"].labels(**labels)._sum.get() == 0.3
    assert bench.samples() == [
        Sample(["a"], 2),
        Sample(["a"], 2),
        Sample(["b"], 7),
        Sample(["a"], observations=[0.3]),
    ]
    assert bench.failures == []


def test_beside_labelless_families_count_in_both(bench: Bench) -> None:
    """As SGLang's, which are told without asking for a child."""
    registry = CollectorRegistry()
    native = Gauge("y", "Theirs.", registry=registry)
    stub = bench.stub("gauge", (), native=native, beside=True)
    stub.inc(3)
    stub.dec()
    stub.inc(0.5)

    assert native._value.get() == 2.5
    assert bench.samples() == [Sample([], 2.5)]


def test_what_else_is_asked_the_engines_object_answers(bench: Bench) -> None:
    """Of a family in either mode, of a child where both count."""
    native = natives()["histogram"]
    for beside in (True, False):
        stub = bench.stub("histogram", native=native, beside=beside)
        assert stub._upper_bounds[-1] == math.inf
    both = bench.stub("histogram", native=native, beside=True).labels("m", 0, "a")

    assert isinstance(both, ForwardingChildStub)
    assert both._upper_bounds == native.labels("m", 0, "a")._upper_bounds
    with pytest.raises(AttributeError):
        _ = both.no_such_thing
