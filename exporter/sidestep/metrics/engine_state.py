"""The state of an engine: its series with their bucket bounds, and parts with further state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.layout import Layout, SlotAssignment, Storage
from sidestep.catalog.row import OBSERVED, Kind, Row
from sidestep.catalog.slo import SLO_HANDLERS, SLO_UNDECIDED, Objectives
from sidestep.metrics.description import Description
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.slo_counter import SloCounter
from sidestep.protocol.engine_totals import Totals
from sidestep.protocol.limits import MAX_OPEN_VALUES

Number = int | float
Key = tuple[str, ...]


@dataclasses.dataclass(slots=True)
class OpenFamily:
    """A family that Samples items feed: self-described, or a row of the catalogue."""

    name: str
    kind: Kind
    help: str
    labels: Key
    bounds: Bounds
    children: dict[Key, Number | Histogram] = dataclasses.field(default_factory=dict)
    born: int = 0
    """The engine's ``restarts`` when the family began."""


@dataclasses.dataclass(frozen=True, slots=True)
class SeriesSettings:
    """Settings of the series of all engines.

    Attributes:
        overrides: Bucket bounds that the operator has set, by bucket family.
        native: Settings of native histograms; None: classic histograms only.
        objectives: Objectives that the requests counted here are compared with.
    """

    overrides: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)
    native: NativeSettings | None = None
    objectives: Objectives = dataclasses.field(default_factory=Objectives)


class Part:
    """State of one engine that only the module of its class makes, reads and writes.

    An engine has at most one part of a class; ``EngineState.part`` makes it. The engine calls the methods,
    which do nothing by default.
    """

    def detach_core(self, engine: Any) -> None:
        """End what depends on the events of the engine's core, which no stream sends any more."""

    def save(self, totals: Totals) -> None:
        """Write to ``totals`` what a snapshot, or a sender that folds items, is to hold."""

    def add(self, totals: Totals) -> None:
        """Add what ``save`` has written."""


AnyPart = TypeVar("AnyPart", bound=Part)


class EngineState:
    """The series of an engine, and further state, from which some of them are derived.

    The engine's description determines which series start at 0, and the bounds of histograms.

    Attributes:
        missing_slots: Storage and slot of the series that need fields which its release lacks; they
            have no sample.
        values: Scalars by slot; None: no sample.
        histograms: Histograms by slot; None: not exposed yet.
        keyed: Scalars with open label values, by slot and own label values.
        exposed_paths: Paths of the layout whose optional families are exposed.
        restarts: How often another process has continued the engine.
    """

    def __init__(self, layout: Layout, settings: SeriesSettings | None) -> None:
        self.layout = layout
        self.description = Description()
        self.missing_slots: Sequence[tuple[Storage, int]] = ()
        self.settings = settings or SeriesSettings()
        self.values: list[Number | None] = [None] * layout.scalars
        self.histograms: list[Histogram | None] = [None] * len(layout.histograms)
        self.keyed: list[dict[Key, Number]] = [{} for _ in layout.keyed]
        self.open_families: dict[str, OpenFamily] = {}
        self.exposed_paths: set[str] = set()
        self.restarts = 0
        self.parts: dict[type[Part], Part] = {}

    def part(self, kind: type[AnyPart]) -> AnyPart:
        """Return the engine's part of this class; make it if there is none."""
        found: Any = self.parts.get(kind)
        if found is None:
            found = self.parts[kind] = kind()
        part: AnyPart = found
        return part

    def find_part(self, kind: type[AnyPart]) -> AnyPart | None:
        """Return the engine's part of this class, if it has one."""
        found: Any = self.parts.get(kind)
        part: AnyPart | None = found
        return part

    def apply_bounds(self) -> None:
        """Give histograms the bounds of the description.

        A histogram whose bounds changed restarts at 0, since its counts cannot be moved; with
        native buckets they can.
        """
        bounds = self.description.bounds
        for slot, known in enumerate(self.histograms):
            if known is not None and known.bounds != self.bounds_of(slot):
                self.histograms[slot] = known.with_bounds(self.bounds_of(slot))
        for name, family in self.open_families.items():
            row = self.layout.sampled_rows.get(name)
            has_own = row is not None and (row.buckets or row.name in bounds)
            if row is not None and has_own and family.bounds != self._sampled_bounds(row):
                family.bounds = self._sampled_bounds(row)
                family.children = {
                    key: child.with_bounds(family.bounds)
                    for key, child in family.children.items()
                    if isinstance(child, Histogram)
                }

    def start_families(self) -> None:
        """Start the families of the options that the description names, and those of every engine."""
        for assignment in self.layout.assignments:
            # Self-described families start at 0 only for a named option, since few engines have
            # them. The same holds for rows that only some engines of the dialect can have.
            if assignment.row.feature in self.description.features or (
                not assignment.row.feature
                and assignment.storage != "sampled"
                and self.layout.required_labels.issuperset(assignment.row.shared)
            ):
                self.start_family(assignment)

    def find_missing(self) -> None:
        """Find the series that need fields which a process has not found in the engine's release."""
        self.missing_slots = self.layout.slots_without(self.description.missing_fields)
        self.drop_missing()

    def drop_missing(self) -> None:
        """Remove the samples of series that need missing fields, which items have as 0."""
        for storage, slot in self.missing_slots:
            if storage == "histogram":
                self.histograms[slot] = None
            elif storage == "keyed":
                self.keyed[slot].clear()
            else:
                self.values[slot] = None

    def start_family(self, assignment: SlotAssignment) -> None:
        """Start the counters and histograms of a row at 0, as the engine does; gauges get no sample."""
        row = assignment.row
        if assignment.storage == "histogram":
            for slot in assignment.slots:
                self.histogram(slot)
        elif assignment.storage == "sampled":
            self.open_families.setdefault(row.name, self.new_family(row))
        elif row.kind != "counter":
            return
        elif assignment.storage == "scalars":
            for slot in assignment.slots[: len(row.closed) or 1]:
                self.values[slot] = self.values[slot] or 0
        elif assignment.storage == "keyed" and len(row.own_labels) == 1:
            children = self.keyed[assignment.slots[0]]
            # Objectives are configured in the exporter: an engine's Hello cannot list them.
            known = (
                ()
                if row.name == SLO_UNDECIDED
                else self.description.closed.get(row.own_labels[0], ())
            )
            for value in known:
                # Each Hello may list further values.
                if len(children) < MAX_OPEN_VALUES:
                    children.setdefault((value,), 0)

    def new_family(self, row: Row) -> OpenFamily:
        """Return a new family for a row that Samples items feed; known label values start at 0."""
        bounds: Bounds = ()
        if row.kind == "histogram":
            bounds = self._sampled_bounds(row)
        made = OpenFamily(
            row.name, row.kind, row.exposed_help, row.own_labels, bounds, born=self.restarts
        )
        if row.kind != "gauge" and (row.closed or not row.own_labels):
            keys: list[Key] = [(value,) for value in row.closed] or [()]
            for key in keys:
                made.children[key] = self.new_histogram(made) if row.kind in OBSERVED else 0
        return made

    def _sampled_bounds(self, row: Row) -> Bounds:
        """Return the bounds of a histogram that Samples items feed; the engine may name the family."""
        known = self.description.bounds
        return known.get(row.name) or row.bounds or known[row.buckets]

    def new_histogram(self, family: OpenFamily) -> Histogram:
        """Return an empty histogram for a family that Samples items feed."""
        row = self.layout.sampled_rows.get(family.name)
        return self._new_histogram(family.bounds, "" if row is None else row.buckets, family.name)

    def _new_histogram(self, bounds: Bounds, buckets: str, family: str) -> Histogram:
        """Return an empty histogram of a bucket family; a summary's has no buckets at all."""
        native = self.settings.native
        made = (
            Histogram(bounds) if native is None or not bounds else native.histogram(bounds, buckets)
        )
        made.slo_counter = self.slo_counter(family)
        return made

    def slo_counter(self, family: str) -> SloCounter | None:
        """Return the SLO counter of ``family``; None where no objective names it.

        A dialect without latencies has no rows to count in.
        """
        limits = self.settings.objectives.limits(family)
        if not limits or SLO_HANDLERS[0] not in self.layout.handled:
            return None
        requests, undecided = (self.layout.handler_slot(name) for name in SLO_HANDLERS)
        return SloCounter(self.keyed[requests], self.keyed[undecided], limits)

    def histogram(self, slot: int) -> Histogram:
        """Return the histogram in ``slot``; create it if it is not exposed yet."""
        found = self.histograms[slot]
        if found is None:
            row = self.layout.histograms[slot]
            found = self._new_histogram(self.bounds_of(slot), row.buckets, row.name)
            self.histograms[slot] = found
        return found

    def bounds_of(self, slot: int) -> Bounds:
        """Return the bounds of the histogram in ``slot``."""
        row = self.layout.histograms[slot]
        return row.bounds or self.description.bounds[row.buckets]
