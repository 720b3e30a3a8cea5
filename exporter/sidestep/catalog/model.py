"""What a catalogue row says. The rows themselves stand in the dialects' modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from sidestep.errors import CatalogueError

Kind = Literal["counter", "gauge", "histogram", "summary"]
"""A summary has a sum and a count, no quantiles; Samples items feed it."""
OBSERVED = frozenset({"histogram", "summary"})
"""Kinds that count observations."""
Combine = Literal["sum", "min", "max", "mean"]
Status = Literal["live", "deprecated", "hidden"]
"""``deprecated``: the engine still has it, we still show it; ``hidden``: only with ``--metrics.legacy``."""

TRITON = "nv_"
"""What the names of Triton's own families begin with."""
ENGINE_LABELS = ("engine", "model_name")
"""What nearly every series of an engine carries."""


@dataclasses.dataclass(frozen=True, slots=True)
class Handler:
    """Fed by code, by this name (``vllm_hooks``, ``core_hooks``): more than one field decides."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Computed:
    """Computed at scrape time by the function of this name in ``readings``."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """The same data as another row, under another name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """Always this value: what it once measured no longer exists in the engine."""

    value: float


@dataclasses.dataclass(frozen=True, slots=True)
class Info:
    """Labels of an info metric, from the hello's ``info`` under this name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """Travels self-described in ``Samples`` items; the row fixes its kind, labels and bounds."""


@dataclasses.dataclass(frozen=True, slots=True)
class FeedsFrom:
    """What Samples items add to children of the family of this name is added here, too.

    Attributes:
        values: Only to children whose one own label is one of these; empty: to all.
    """

    name: str
    values: tuple[str, ...] = ()


Source = (
    str
    | tuple[str, ...]
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
"""A path below an item (see ``plan``), several of which an engine sends one, one path per
label value, or one of the above."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric family.

    Attributes:
        name: As exposed; a counter with its ``_total``.
        help: Own words, one sentence.
        labels: All label names, sorted, as they are exposed.
        shared: Of them, those that all series of the engine carry.
        extra: Whether a sender may add own labels, as an administrator may have told it to;
            of a row that Samples items feed.
        unless_empty: Whether own labels are left out where they are empty.
        closed: Values of the row's own label known to the catalogue: those
            series start at 0. Empty where the values are open. A histogram that the
            plan feeds has no others.
        buckets: Bucket family of a histogram.
        bounds: Bounds of a histogram that belongs to no family.
        combine: How the engines of a pod make one number.
        mirrored: Whether all ranks of one replica tell the same, so that one speaks for it.
        per: How many of what is kept make one of what is shown: nanoseconds of microseconds.
        feature: Shown from the start only where the hello names this option;
            otherwise from its first data on.
        since: First release of the engine that has it, where known.
        until: Last release of the engine that has it, where it has gone.
        successor: What to use instead of a deprecated row.
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
    feature: str = ""
    since: str = ""
    until: str = ""
    status: Status = "live"
    successor: str = ""

    @property
    def own_labels(self) -> tuple[str, ...]:
        """The labels that tell the children of one engine apart."""
        return tuple(label for label in self.labels if label not in self.shared)

    @property
    def exposed_help(self) -> str:
        """HELP text; a deprecated row says so and names its successor."""
        if self.status == "live":
            return self.help
        return f"DEPRECATED: use {self.successor}. {self.help}"


def check(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """``rows``, when every one of them can work.

    Raises:
        CatalogueError: Names the row and what is wrong with it.
    """
    seen: set[str] = set()
    for row in rows:
        if row.name in seen:
            raise CatalogueError(f"{row.name}: two rows have this name")
        seen.add(row.name)
        if row.labels != tuple(sorted(row.labels)):
            raise CatalogueError(f"{row.name}: labels must be sorted")
        _check_kind(row)
        if row.closed and len(row.own_labels) != 1:
            raise CatalogueError(f"{row.name}: closed values need exactly one own label")
        if (row.status == "live") == bool(row.successor):
            raise CatalogueError(
                f"{row.name}: a row on its way out, and no other, names a successor"
            )
    for row in rows:
        if isinstance(row.source, Alias) and row.source.name not in seen:
            raise CatalogueError(f"{row.name}: no row {row.source.name} to show again")
    return rows


def _check_kind(row: Row) -> None:
    is_own, is_total = row.name.startswith("sidestep_"), row.name.endswith("_total")
    # An engine may have named a gauge like a counter, and Triton no counter so.
    may_count = is_total or row.name.startswith(TRITON)
    if (row.kind == "counter" and not may_count) or (row.kind == "gauge" and is_total and is_own):
        raise CatalogueError(f"{row.name}: counters, and no gauges of ours, end in _total")
    if row.kind == "histogram" and bool(row.buckets) == bool(row.bounds):
        raise CatalogueError(f"{row.name}: a histogram has a bucket family or bounds")
    if row.unit_divisor != 1 and row.kind not in ("counter", "gauge"):
        raise CatalogueError(f"{row.name}: only a plain number is kept in another unit")
    if row.kind == "summary" and not isinstance(row.source, Sampled):
        raise CatalogueError(f"{row.name}: only Samples items feed a summary")
