"""Families that vLLM's front end registers with prometheus_client directly.

Stat loggers do not receive them: sleep and weight-update operations, realtime sessions,
tool parsing. The publisher thread reads them from the process registry about once a second.
With ``PROMETHEUS_MULTIPROC_DIR`` set the registry still returns this process's own values
(prometheus_client's ``values.py``), so the streams of several API servers add up.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Final

from sidestep.catalog.row import Row
from sidestep.engines.vllm.connector_rows import FRONT_END
from sidestep.protocol.limits import COUNT_LIMIT, MAX_LABEL_CHARS, VALUE_LIMIT, is_printable
from sidestep.protocol.self_described import Family, Sample

LabelValues = tuple[str, ...]
Readings = dict[str, list[Any]]
"""Samples of prometheus_client by their name, such as that of a bucket."""

_NAMES: Final = frozenset(
    name for row in FRONT_END for name in (row.name, f"{row.name}_bucket", f"{row.name}_sum")
)


class FrontendTap:
    """Reader of the front end's families, which remembers the values it has reported.

    Args:
        registry: A ``CollectorRegistry``. By default the process's own, looked up in every
            call because vLLM may load prometheus_client later.
    """

    def __init__(self, registry: Any = None) -> None:
        self._registry = registry
        self._seen: dict[tuple[str, LabelValues], list[float]] = {}

    def families(self) -> list[Family]:
        """Return what has changed since the previous call.

        Returns:
            Counters and histograms as increases, a new child with its full value; gauges as
            current values. Histograms carry bucket counts, for the engine's own bounds.
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
            elif (increase := self._increase(row, own, [value])) is not None:
                family.samples.append(Sample(list(own), increase[0]))
        return family

    def _histogram(self, row: Row, readings: Readings) -> tuple[list[float], list[Sample]]:
        """Return the bounds, and samples with the counts between them."""
        buckets: dict[float, list[Any]] = {}
        for reading in readings.get(f"{row.name}_bucket", []):
            buckets.setdefault(float(reading.labels.get("le", "nan")), []).append(reading)
        bounds = sorted(bound for bound in buckets if math.isfinite(bound))
        columns = [_children(row, buckets.get(bound, [])) for bound in (*bounds, math.inf)]
        sums = _children(row, readings.get(f"{row.name}_sum", []))
        samples = []
        for own in columns[-1]:
            cumulative = [column.get(own, 0.0) for column in columns]
            increase = self._increase(row, own, [*cumulative, sums.get(own, 0.0)])
            if increase is not None:
                *below, total = increase
                counts = [int(b - a) for a, b in zip([0.0, *below], below, strict=False)]
                if all(0 <= count <= COUNT_LIMIT for count in counts):
                    samples.append(Sample(list(own), counts=counts, total=total))
        return bounds, samples

    def _increase(self, row: Row, own: LabelValues, now: list[float]) -> list[float] | None:
        """Return by how much a child's numbers grew; None if they did not change."""
        then = self._seen.get((row.name, own))
        self._seen[row.name, own] = now
        if then is None:
            return now
        # A smaller number is a counter reset: the family was registered again, or
        # the process forked, after which prometheus_client counts from 0.
        if len(then) != len(now) or any(a > b for a, b in zip(then, now, strict=True)):
            return now
        return None if now == then else [b - a for a, b in zip(then, now, strict=True)]


def _children(row: Row, readings: list[Any]) -> dict[LabelValues, float]:
    """Return values by the row's own labels; labels that the row does not have are summed over."""
    children: dict[LabelValues, float] = {}
    for reading in readings:
        own = tuple(str(reading.labels.get(label, "")) for label in row.own_labels)
        is_valid = all(len(text) <= MAX_LABEL_CHARS and is_printable(text) for text in own)
        if is_valid and abs(reading.value) <= VALUE_LIMIT:
            children[own] = children.get(own, 0.0) + reading.value
    return children
