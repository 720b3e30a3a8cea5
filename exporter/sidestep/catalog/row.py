"""A row of the catalogue: one metric of an engine. The rows themselves are in ``engines/<engine>/``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from sidestep.errors import CatalogueError

Kind = Literal["counter", "gauge", "histogram", "summary"]
"""A summary has a sum and a count but no quantiles; only Samples items feed it."""
OBSERVED = frozenset({"histogram", "summary"})
"""Kinds that count observations."""
Combine = Literal["sum", "min", "max", "mean"]
Status = Literal["live", "deprecated", "hidden"]
"""``deprecated``: the engine still has the family, and the exporter still exposes it; ``hidden``:
exposed only with ``--metrics.legacy``."""

ENGINE_LABELS = ("engine", "model_name")
"""The labels of nearly every series of an engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    name: str


class Handler(_Named):
    """A row that the function of this name in ``engines/<engine>/`` feeds.

    A row has a handler where its value depends on more than one field.
    """


class Computed(_Named):
    """A row that the function of this name computes at each scrape.

    It is in ``metrics/computed_gauges.py``, or in the dialect's ``computed``.
    """


class Alias(_Named):
    """A second name for the data of another row."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A fixed value, for a family that the engine still exposes but no longer measures."""

    value: float


class Info(_Named):
    """An info metric whose labels are in the Hello's ``info`` under this name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """A family sent as self-described ``Samples`` items; the row fixes its kind, labels and bounds."""


@dataclasses.dataclass(frozen=True, slots=True)
class FeedsFrom:
    """A row that also receives what Samples items add to the family of this name.

    Attributes:
        values: Values of the family's first own label that count. Empty: all of them.
    """

    name: str
    values: tuple[str, ...] = ()


Source = (
    str
    | tuple[str, ...]
    | tuple[FeedsFrom, ...]
    | Mapping[str, str]
    | Mapping[str, FeedsFrom]
    | Handler
    | Computed
    | Alias
    | Constant
    | Info
    | Sampled
    | FeedsFrom
)
"""The source of a row's value: a path below an item (see ``layout_builder``), several paths of
which an engine sends one, one path per label value, or one of the classes above. A row with several
``FeedsFrom`` is their sum."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric family.

    Attributes:
        help: The HELP text: one sentence of this project's own.
        labels: All label names as exposed, sorted.
        shared: Those of ``labels`` that all series of the engine carry.
        extra_labels: Whether a sender may add labels of its own, such as those that an
            administrator configured; only for rows that Samples items feed.
        omits_empty_labels: Whether own labels are omitted where their value is empty.
        closed: Values of the row's own label that the catalogue knows; their series start at 0.
            Empty where the values are open. A histogram with its own slots has no other values.
        buckets: Bucket family of a histogram.
        combine: How the values of a pod's engines are aggregated.
        mirrored: Whether all ranks of one replica report the same value, so that one rank is enough.
        unit_divisor: Stored units in one exposed unit, such as 1,000 for nanoseconds exposed as
            microseconds.
        lasting: Whether a gauge holds until its next report, since no step reports it.
        feature: The option without which the row stays hidden until its first data arrive; where
            the Hello names the option, the row is exposed from the start.
        since: First release of the engine that has the family, where known.
        successor: The name to use instead of a deprecated row.
    """

    name: str
    kind: Kind
    source: Source
    help: str
    labels: tuple[str, ...] = ENGINE_LABELS
    shared: tuple[str, ...] = ENGINE_LABELS
    extra_labels: bool = False
    omits_empty_labels: bool = False
    closed: tuple[str, ...] = ()
    buckets: str = ""
    bounds: tuple[float, ...] = ()
    combine: Combine = "sum"
    mirrored: bool = False
    unit_divisor: int = 1
    lasting: bool = False
    feature: str = ""
    since: str = ""
    until: str = ""
    status: Status = "live"
    successor: str = ""

    @property
    def own_labels(self) -> tuple[str, ...]:
        """The labels that distinguish the children of one engine."""
        return tuple(label for label in self.labels if label not in self.shared)

    @property
    def exposed_help(self) -> str:
        """The HELP text; that of a deprecated row names the successor."""
        if self.status == "live":
            return self.help
        return f"DEPRECATED: use {self.successor}. {self.help}"


def check(rows: tuple[Row, ...], bare_counters: str = "") -> tuple[Row, ...]:
    """Return ``rows`` after checking each of them; see ``DialectTables.bare_counters``.

    Raises:
        CatalogueError: A row contradicts itself or another row; the text names the row.
    """
    seen: set[str] = set()
    for row in rows:
        if row.name in seen:
            raise CatalogueError(f"{row.name}: two rows have this name")
        seen.add(row.name)
        if row.labels != tuple(sorted(row.labels)):
            raise CatalogueError(f"{row.name}: labels must be sorted")
        _check_kind(row, bare_counters)
        if row.closed and len(row.own_labels) != 1:
            raise CatalogueError(f"{row.name}: closed values need exactly one own label")
        if (row.status == "live") == bool(row.successor):
            raise CatalogueError(
                f"{row.name}: a deprecated or hidden row, and no other, names a successor"
            )
    for row in rows:
        if isinstance(row.source, Alias) and row.source.name not in seen:
            raise CatalogueError(f"{row.name}: an alias of {row.source.name}, which is no row")
    return rows


def _check_kind(row: Row, bare_counters: str) -> None:
    is_own, is_total = row.name.startswith("sidestep_"), row.name.endswith("_total")
    # Some gauges of engines end in _total.
    may_count = is_total or (bare_counters and row.name.startswith(bare_counters))
    if (row.kind == "counter" and not may_count) or (row.kind == "gauge" and is_total and is_own):
        raise CatalogueError(
            f"{row.name}: counters end in _total, and gauges named sidestep_* do not"
        )
    if row.kind == "histogram" and bool(row.buckets) == bool(row.bounds):
        raise CatalogueError(f"{row.name}: a histogram has a bucket family or bounds")
    if row.unit_divisor != 1 and row.kind not in ("counter", "gauge"):
        raise CatalogueError(f"{row.name}: only a counter or gauge can be stored in another unit")
    if row.kind == "summary" and not isinstance(row.source, Sampled):
        raise CatalogueError(f"{row.name}: only Samples items feed a summary")
