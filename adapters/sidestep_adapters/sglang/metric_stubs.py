"""Metric stubs: objects with prometheus_client's interface that record calls instead of counting.

An engine's code holds metric objects and calls ``labels``, ``inc``, ``set`` and ``observe``. A
``MetricStub`` has the same methods; each call is recorded, and the publisher thread makes
items of the recorded calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from sidestep.catalog.row import OBSERVED
from sidestep.engines.items import Item
from sidestep.protocol.limits import (
    FLOPS_LIMIT,
    MAX_OBSERVATIONS,
    MAX_OPEN_VALUES,
    VALUE_LIMIT,
    printable,
)
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep_adapters.publisher.translate import item_parts
from sidestep_adapters.sglang.deferred_metrics import (
    DeferredMetrics,
    Key,
    Labels,
    MetricSource,
    Observations,
    Values,
)

Kind = Literal["counter", "gauge", "histogram", "summary"]

SET = 0
"""Weight of a recorded gauge value that replaces the gauge instead of adding to it."""


class MetricStub(MetricSource):
    """Stub of one metric family, in place of prometheus_client's object.

    Args:
        labelnames: Label names of the engine's own family.
        own: The names in ``labelnames`` that distinguish children of one engine.
        help_text: Help of a family that the catalogue does not have.
        bounds: Histogram bounds; sent with bucket counts, and if ``self_described``.
        self_described: Whether the catalogue lacks the family, so that it describes itself.
        native: The engine's own object, which serves all other attributes.
        fixed_labels: Label values that all children share, for ``native``.
        beside: Whether ``native`` gets every call, too.

    Attributes:
        record: Records a child's amount, value or observation, or bucket counts with their
            sum. A weight of 0 without an amount: the child exists from now on.
        labels: Returns the child with these label values, by position or by name.
        inc, dec, set, observe: Methods of the child of a family without labels.
    """

    def __init__(
        self,
        deferred: DeferredMetrics,
        name: str,
        kind: Kind,
        *,
        engine: int,
        labelnames: Sequence[str] = (),
        own: Sequence[str] = (),
        help_text: str = "",
        bounds: Sequence[float] = (),
        self_described: bool = False,
        native: Any = None,
        fixed_labels: Labels | None = None,
        beside: bool = False,
    ) -> None:
        super().__init__(deferred, engine)
        self.name = name
        self.kind = kind
        self.own = tuple(own)
        self.native = native
        self._fixed_labels = dict(fixed_labels or {})
        self._labelnames = tuple(labelnames)
        self._help_text = help_text
        self._bounds = list(bounds)
        self._self_described = self_described
        only = ChildStub(self, (), self.record)
        self._child = self.child_finder(only)
        self.labels = self._forwarding_child if beside else self._child
        if beside:
            only = ForwardingChildStub(only, native)
        self.inc, self.dec, self.set, self.observe = only.inc, only.dec, only.set, only.observe
        self._observers: dict[Values, Callable[[float, int], None]] = {}
        self._sums: dict[Values, float] = {}
        self._observations: dict[Values, tuple[list[float], list[int]]] = {}
        self._gauges: dict[Values, float] = {}
        self._changed: dict[Values, None] = {}
        self._bucket_samples: list[Sample] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def native_child(self, key: Key) -> Any:
        """Return the engine's own child, which is up to date only if ``beside`` is set."""
        if not self._labelnames:
            return self.native
        own = dict(zip(self.own, key, strict=True)) if isinstance(key, tuple) else key
        return self.native.labels(**{**self._fixed_labels, **own})

    def _forwarding_child(self, *values: Any, **labels: Any) -> ChildStub:
        return ForwardingChildStub(
            self._child(*values, **labels), self.native.labels(*values, **labels)
        )

    def child_finder(self, only: ChildStub) -> Callable[..., ChildStub]:
        """Return a function that finds a child by its label values; a closure, for speed.

        ``only`` is the child of a family without own labels; all others record as it does.
        """
        labelnames, record = self._labelnames, only.record
        if not self.own:
            return lambda *_, **__: only

        def make(*values: Any, **labels: Any) -> ChildStub:
            own_labels = dict(zip(labelnames, values, strict=True)) if values else labels
            return ChildStub(self, own_labels, record)

        if len(self.own) > 1:
            return make
        (own,) = self.own
        known: dict[str, ChildStub] = {}

        def find(*values: Any, **labels: Any) -> ChildStub:
            value = labels.get(own)
            # Equal values of other types may differ as text, such as 1 and True.
            if value.__class__ is not str:
                return make(*values, **labels)
            found = known.get(value)
            if found is None:
                found = ChildStub(self, (printable(value),), record)
                if len(known) < MAX_OPEN_VALUES:
                    known[value] = found
            return found

        return find

    def observer(self, labels: Labels) -> Callable[[float, int], None]:
        """Return a function that records observations, and their weights, of the child with all these labels.

        It is for the most frequent calls of all. Children over a limit share the queue of all calls.
        """
        key = self._own_values(labels)
        found = self._observers.get(key)
        if found is None and len(self._observers) >= MAX_OPEN_VALUES:
            return partial(self.record, key)
        if found is None:
            lists = Observations(self._deferred, self, key)
            self._deferred.lists.append(lists)
            found = self._observers[key] = lists.record
        return found

    def _own_values(self, labels: Labels) -> Values:
        return tuple([printable(labels[name]) for name in self.own])

    def add(self, key: Key, value: Any, weight: int) -> None:
        """Add a recorded call, or the lists of ``Observations``; a value that is not a number raises."""
        if key.__class__ is not tuple:
            key = self._own_values(key)  # type: ignore[arg-type]
        if value.__class__ is list:
            values, weights = self._seen(key)
            values += value[0]
            weights += value[1]
            return
        if value.__class__ is tuple:
            counts, total = value
            self._bucket_samples.append(Sample(list(key), counts=counts, total=total))
            return
        # Scalars of numpy and torch are numbers, too; integers may be too large for a float.
        number = value if value.__class__ is int else float(value)
        if self.kind in OBSERVED:
            values, weights = self._seen(key)
            if weight:
                values.append(float(number))
                weights.append(weight)
        elif self.kind == "counter":
            if not 0 <= number <= FLOPS_LIMIT:
                raise ValueError(f"{self.name} cannot grow by {number}")
            self._sums[key] = self._sums.get(key, 0) + number
        else:
            self._gauges[key] = number if weight == SET else self._gauges.get(key, 0) + number
            self._changed[key] = None

    def _seen(self, key: Values) -> tuple[list[float], list[int]]:
        found = self._observations.get(key)
        if found is None:
            found = self._observations[key] = ([], [])
        return found

    def items(self, now: float) -> list[Item]:
        """Return the items of all calls added since the previous call."""
        samples = [
            *self._counter_samples(),
            *self._histogram_samples(),
            *self._bucket_samples,
            *self._gauge_samples(self._changed),
        ]
        self._sums, self._observations, self._changed, self._bucket_samples = {}, {}, {}, []
        return self._items(now, samples)

    def current_state(self, now: float) -> list[Item]:
        """Return the last gauge values."""
        return self._items(now, list(self._gauge_samples(self._gauges)))

    def _items(self, now: float, samples: list[Sample]) -> list[Item]:
        return [Samples(self._engine, now, [self._family(part)]) for part in item_parts(samples)]

    def _family(self, samples: list[Sample]) -> Family:
        has_bounds = self._self_described or any(sample.counts for sample in samples)
        bounds = self._bounds if has_bounds else []
        return Family(self.name, self.kind, list(self.own), samples, self._help_text, bounds)

    def _counter_samples(self) -> Iterator[Sample]:
        for key, total in self._sums.items():
            amount = total
            while amount > VALUE_LIMIT:
                amount -= VALUE_LIMIT
                yield Sample(list(key), VALUE_LIMIT)
            yield Sample(list(key), amount)

    def _histogram_samples(self) -> Iterator[Sample]:
        for key, (values, weights) in self._observations.items():
            for start in range(0, len(values) or 1, MAX_OBSERVATIONS):
                some = slice(start, start + MAX_OBSERVATIONS)
                part_weights = [] if set(weights[some]) == {1} else weights[some]
                yield Sample(list(key), observations=values[some], weights=part_weights)

    def _gauge_samples(self, keys: Mapping[Values, object]) -> Iterator[Sample]:
        for key in keys:
            value = self._gauges[key]
            # NaN and values beyond the limit are not sent.
            if -VALUE_LIMIT <= value <= VALUE_LIMIT:
                yield Sample(list(key), value)


class AddingStub:
    """The stub of a family for the publisher thread, whose calls are added at once."""

    def __init__(self, stub: MetricStub) -> None:
        only = ChildStub(stub, (), stub.add)
        self.labels = stub.child_finder(only)
        self.inc, self.dec, self.set, self.observe = only.inc, only.dec, only.set, only.observe


class ChildStub:
    """Stub of one child of a family; records each call."""

    __slots__ = ("key", "record", "stub")

    def __init__(self, stub: MetricStub, key: Key, record: Callable[[Any, Any, int], None]) -> None:
        self.stub = stub
        self.key = key
        self.record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stub.native_child(self.key), name)

    def inc(self, amount: float = 1, exemplar: object = None) -> None:  # noqa: ARG002
        """Add to a counter or a gauge."""
        self.record(self.key, amount, 1)

    def dec(self, amount: float = 1) -> None:
        """Subtract from a gauge."""
        self.record(self.key, -amount, 1)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self.record(self.key, value, SET)

    def observe(self, amount: float, exemplar: object = None) -> None:  # noqa: ARG002
        """Record an observation."""
        self.record(self.key, amount, 1)


def _forwarding(name: str) -> Callable[..., None]:
    """Return a method that forwards a call to the engine's own child, then records it."""
    record = getattr(ChildStub, name)

    def call(self: ForwardingChildStub, *args: Any, **kwargs: Any) -> None:
        getattr(self.native, name)(*args, **kwargs)
        record(self, *args, **kwargs)

    return call


class ForwardingChildStub(ChildStub):
    """Stub that first forwards each call to the engine's own child, then records it."""

    __slots__ = ("native",)

    def __init__(self, child: ChildStub, native: Any) -> None:
        super().__init__(child.stub, child.key, child.record)
        self.native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    inc, dec, set, observe = map(_forwarding, ("inc", "dec", "set", "observe"))
