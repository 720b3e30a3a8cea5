"""Metric objects with the interface of prometheus_client, which note down what they are told.

An engine's code holds such objects: ``labels``, ``inc``, ``set``, ``observe``. A ``Meter`` has
that interface, too; each call is one note, of which the publisher's thread makes items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from sidestep.catalog.model import OBSERVED
from sidestep.engines.items import Item
from sidestep.protocol.limits import FLOPS_LIMIT, MAX_OBSERVATIONS, MAX_OPEN_VALUES, VALUE_LIMIT
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep_adapters.publisher.translate import printable
from sidestep_adapters.sglang.deferred_metrics import Key, Labels, Notes, Source, Values

Kind = Literal["counter", "gauge", "histogram", "summary"]

SET = 0
"""A gauge's weight where the note is its value, and not what to add to it."""


class Meter(Source):
    """One metric family of an engine, in place of prometheus_client's object.

    Args:
        engine: Index of the engine whose series these are.
        own: Label names that tell its children apart, of all of ``labelnames``.
        bounds: Of a histogram; told where ``described``, and where it tells counts.
        described: Whether no catalogue knows the family, so that it has to describe itself.
        native: The engine's own object, which knows whatever else it is asked.
        given: Label values that all children have, for it.
        beside: Whether it is to hear of everything, too.

    Attributes:
        note: Notes a child's amount, value or observation, or a histogram's counts and
            their sum. A weight of 0 and no amount: the child exists from now on.
        labels: Finds the child of these label values, by position or by name.
    """

    def __init__(
        self,
        notes: Notes,
        name: str,
        kind: Kind,
        *,
        engine: int,
        labelnames: Sequence[str] = (),
        own: Sequence[str] = (),
        text: str = "",
        bounds: Sequence[float] = (),
        described: bool = False,
        native: Any = None,
        given: Labels | None = None,
        beside: bool = False,
    ) -> None:
        self.note = notes.of(self)
        self.name = name
        self.kind = kind
        self.own = tuple(own)
        self._native = native
        self._given = dict(given or {})
        self._beside = beside
        self._engine = engine
        self._labelnames = tuple(labelnames)
        self._text = text
        self._bounds = list(bounds)
        self._described = described
        self._child = self._finder()
        self.labels = self._both if beside else self._child
        self._sums: dict[Values, float] = {}
        self._seen: dict[Values, tuple[list[float], list[int]]] = {}
        self._gauges: dict[Values, float] = {}
        self._fresh: dict[Values, None] = {}
        self._counts: list[Sample] = []

    def inc(self, amount: float = 1) -> None:
        """Of a family without labels, like the next three."""
        self._all.inc(amount)

    def dec(self, amount: float = 1) -> None:
        """Take ``amount`` off a gauge."""
        self._all.dec(amount)

    def set(self, value: float) -> None:
        """A gauge's value."""
        self._all.set(value)

    def observe(self, value: float) -> None:
        """One observation."""
        self._all.observe(value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    @property
    def _all(self) -> Child:
        child = Child(self, ())
        return Both(child, self._native) if self._beside else child

    def asked(self, key: Key) -> Any:
        """The engine's own child; it was not told anything where not both count."""
        if not self._labelnames:
            return self._native
        own = dict(zip(self.own, key, strict=True)) if isinstance(key, tuple) else key
        return self._native.labels(**{**self._given, **own})

    def _both(self, *values: Any, **labels: Any) -> Child:
        return Both(self._child(*values, **labels), self._native.labels(*values, **labels))

    def _finder(self) -> Callable[..., Child]:
        """What finds a child by its label values; a closure, as ``Notes.of``."""
        labelnames = self._labelnames
        only = Child(self, ())
        if not self.own:
            return lambda *_, **__: only

        def make(*values: Any, **labels: Any) -> Child:
            return Child(self, dict(zip(labelnames, values, strict=True)) if values else labels)

        if len(self.own) > 1:
            return make
        (own,) = self.own
        known: dict[str, Child] = {}

        def find(*values: Any, **labels: Any) -> Child:
            value = labels.get(own)
            # Values of other types than text may be equal, and not look alike.
            if value.__class__ is not str:
                return make(*values, **labels)
            found = known.get(value)
            if found is None:
                found = Child(self, (printable(value),))
                if len(known) < MAX_OPEN_VALUES:
                    known[value] = found
            return found

        return find

    def take(self, key: Key, value: Any, weight: int) -> None:
        """See ``Source``; a value that is no number is left out."""
        if key.__class__ is not tuple:
            key = tuple([printable(key[name]) for name in self.own])  # type: ignore[call-overload]
        if value.__class__ is tuple:
            counts, total = value
            self._counts.append(Sample(list(key), counts=counts, total=total))
            return
        # Numpy's and torch's scalars are numbers, too; integers may be too large for a float.
        number = value if value.__class__ is int else float(value)
        if self.kind in OBSERVED:
            seen = self._seen.get(key)
            if seen is None:
                seen = self._seen[key] = ([], [])
            if weight:
                seen[0].append(float(number))
                seen[1].append(weight)
        elif self.kind == "counter":
            if not 0 <= number <= FLOPS_LIMIT:
                raise ValueError(f"{self.name} cannot grow by {number}")
            self._sums[key] = self._sums.get(key, 0) + number
        else:
            self._gauges[key] = number if weight == SET else self._gauges.get(key, 0) + number
            self._fresh[key] = None

    def items(self, now: float) -> list[Item]:
        """See ``Source``."""
        samples = [*self._counted(), *self._observed(), *self._counts, *self._set(self._fresh)]
        self._sums, self._seen, self._fresh, self._counts = {}, {}, {}, []
        return self._items(now, samples)

    def again(self, now: float) -> list[Item]:
        """Gauges as they were last."""
        return self._items(now, list(self._set(self._gauges)))

    def _items(self, now: float, samples: list[Sample]) -> list[Item]:
        return [
            Samples(self._engine, now, [self._family(part)]) for part in _parts(samples) if part
        ]

    def _family(self, samples: list[Sample]) -> Family:
        told = self._described or any(sample.counts for sample in samples)
        bounds = self._bounds if told else []
        return Family(self.name, self.kind, list(self.own), samples, self._text, bounds)

    def _counted(self) -> Iterator[Sample]:
        for key, total in self._sums.items():
            amount = total
            while amount > VALUE_LIMIT:
                amount -= VALUE_LIMIT
                yield Sample(list(key), VALUE_LIMIT)
            yield Sample(list(key), amount)

    def _observed(self) -> Iterator[Sample]:
        for key, (values, weights) in self._seen.items():
            for start in range(0, len(values) or 1, MAX_OBSERVATIONS):
                some = slice(start, start + MAX_OBSERVATIONS)
                told = [] if set(weights[some]) == {1} else weights[some]
                yield Sample(list(key), observations=values[some], weights=told)

    def _set(self, keys: Mapping[Values, object]) -> Iterator[Sample]:
        for key in keys:
            value = self._gauges[key]
            # Neither NaN nor what no gauge can be is a sample.
            if -VALUE_LIMIT <= value <= VALUE_LIMIT:
                yield Sample(list(key), value)


class Child:
    """A family's child: what it is told is noted."""

    __slots__ = ("_key", "_meter", "_note")

    def __init__(self, meter: Meter, key: Key) -> None:
        self._meter = meter
        self._note = meter.note
        self._key = key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meter.asked(self._key), name)

    def inc(self, amount: float = 1) -> None:
        """Add to a counter or a gauge."""
        self._note(self._key, amount, 1)

    def dec(self, amount: float = 1) -> None:
        """Take off a gauge."""
        self._note(self._key, -amount, 1)

    def set(self, value: float) -> None:
        """A gauge's value."""
        self._note(self._key, value, SET)

    def observe(self, value: float) -> None:
        """One observation."""
        self._note(self._key, value, 1)


class Both(Child):
    """Likewise, and the engine's own child hears it first."""

    __slots__ = ("_native",)

    def __init__(self, child: Child, native: Any) -> None:
        super().__init__(child._meter, child._key)
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def inc(self, amount: float = 1) -> None:
        """See ``Child``."""
        self._native.inc(amount)
        self._note(self._key, amount, 1)

    def dec(self, amount: float = 1) -> None:
        """See ``Child``."""
        self._native.dec(amount)
        self._note(self._key, -amount, 1)

    def set(self, value: float) -> None:
        """See ``Child``."""
        self._native.set(value)
        self._note(self._key, value, SET)

    def observe(self, value: float) -> None:
        """See ``Child``."""
        self._native.observe(value)
        self._note(self._key, value, 1)


def _parts(samples: list[Sample]) -> Iterator[list[Sample]]:
    """``samples`` in parts of which each fits into an item."""
    part: list[Sample] = []
    held = 0
    for sample in samples:
        size = 1 + len(sample.observations)
        if part and held + size > MAX_OBSERVATIONS:
            yield part
            part, held = [], 0
        part.append(sample)
        held += size
    yield part
