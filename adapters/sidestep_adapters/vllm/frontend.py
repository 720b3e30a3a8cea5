"""The families that vLLM's front end registers with prometheus_client on its own.

No stat logger sees them: sleep and weight-update operations, realtime sessions,
tool parsing. They are read from the process registry by the publisher thread,
about once a second. With ``PROMETHEUS_MULTIPROC_DIR`` set the registry still
answers with this process's own values (prometheus_client's ``values.py``), so
the streams of several API servers add up.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final

from sidestep.catalog.model import Row
from sidestep.engines.vllm.connector_rows import FRONT_END
from sidestep.protocol.limits import COUNT_LIMIT, MAX_LABEL_CHARS, VALUE_LIMIT, is_printable
from sidestep.protocol.self_described import Family, Sample

Own = tuple[str, ...]
Readings = dict[str, list[Any]]
"""prometheus_client's samples by their name, such as that of a bucket."""

_NAMES: Final = frozenset(
    name for row in FRONT_END for name in (row.name, f"{row.name}_bucket", f"{row.name}_sum")
)


class FrontendTap:
    """Reads the front end's families and remembers what it has read.

    Args:
        registry: A ``CollectorRegistry``. The process's own by default, which is
            looked up in every call: vLLM may load prometheus_client later.
    """

    def __init__(self, registry: Any = None) -> None:
        self._registry = registry
        self._seen: dict[tuple[str, Own], list[float]] = {}

    def families(self) -> list[Family]:
        """What has changed since the last call.

        Returns:
            Counters and histograms by how much they grew, a child that is new
            with all it has; gauges as they are. Histograms carry bucket counts,
            for the bounds that the engine itself has.
        """
        readings = self._readings()
        families = (self._family(row, readings) for row in FRONT_END)
        return [family for family in families if family.samples]

    def _readings(self) -> Readings:
        registry = self._registry
        if registry is None:
            registry = getattr(sys.modules.get("prometheus_client"), "REGISTRY", None)
        restricted = getattr(registry, "restricted_registry", None)
        readings: Readings = {}
        if restricted is not None:
            for metric in restricted(_NAMES).collect():
                for reading in metric.samples:
                    readings.setdefault(reading.name, []).append(reading)
        return readings

    def _family(self, row: Row, readings: Readings) -> Family:
        family = Family(row.name, row.kind, list(row.own_labels))
        if row.kind == "histogram":
            family.bounds, family.samples = self._histogram(row, readings)
            return family
        for own, value in _children(row, readings.get(row.name, [])).items():
            if row.kind == "gauge":
                family.samples.append(Sample(list(own), value))
            elif (grown := self._grown(row, own, [value])) is not None:
                family.samples.append(Sample(list(own), grown[0]))
        return family

    def _histogram(self, row: Row, readings: Readings) -> tuple[list[float], list[Sample]]:
        """The bounds, and what fell between them."""
        buckets: dict[float, list[Any]] = {}
        for reading in readings.get(f"{row.name}_bucket", []):
            buckets.setdefault(float(reading.labels.get("le", "nan")), []).append(reading)
        bounds = sorted(bound for bound in buckets if math.isfinite(bound))
        columns = [_children(row, buckets.get(bound, [])) for bound in (*bounds, math.inf)]
        sums = _children(row, readings.get(f"{row.name}_sum", []))
        samples = []
        for own in columns[-1]:
            cumulative = [column.get(own, 0.0) for column in columns]
            grown = self._grown(row, own, [*cumulative, sums.get(own, 0.0)])
            if grown is not None:
                *below, total = grown
                counts = [int(b - a) for a, b in zip([0.0, *below], below, strict=False)]
                if all(0 <= count <= COUNT_LIMIT for count in counts):
                    samples.append(Sample(list(own), counts=counts, total=total))
        return bounds, samples

    def _grown(self, row: Row, own: Own, now: list[float]) -> list[float] | None:
        """By how much a child's numbers grew; ``None`` if they stood still."""
        then = self._seen.get((row.name, own))
        self._seen[row.name, own] = now
        if then is None:
            return now
        # A number that shrank started anew: the family was registered again, or
        # the process forked, after which prometheus_client counts from 0.
        if len(then) != len(now) or any(a > b for a, b in zip(then, now, strict=True)):
            return now
        return None if now == then else [b - a for a, b in zip(then, now, strict=True)]


def _children(row: Row, readings: list[Any]) -> dict[Own, float]:
    """Values by the row's own labels; labels that the row does not know are summed over."""
    children: dict[Own, float] = {}
    for reading in readings:
        own = tuple(str(reading.labels.get(label, "")) for label in row.own_labels)
        travels = all(len(text) <= MAX_LABEL_CHARS and is_printable(text) for text in own)
        if travels and abs(reading.value) <= VALUE_LIMIT:
            children[own] = children.get(own, 0.0) + reading.value
    return children
