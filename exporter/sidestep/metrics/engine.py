"""An engine: its series and the state from which they are derived."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from sidestep.catalog.buckets import DEFAULTS, Bounds
from sidestep.catalog.dialect import Polled
from sidestep.catalog.layout import Layout, SlotAssignment, Storage
from sidestep.catalog.row import OBSERVED, Kind, Row
from sidestep.catalog.slo import SLO_HANDLERS, SLO_UNDECIDED, Objectives
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.slo_counter import SloCounter
from sidestep.protocol.engine_totals import Totals
from sidestep.protocol.limits import COUNT_LIMIT, MAX_OPEN_VALUES
from sidestep.protocol.messages import (
    CORE_INFO,
    ENGINE_CORE,
    KV_SAMPLING,
    LIMITS,
    MISSING,
    MISSING_FIELDS,
    REQUEST_EVENTS,
    EngineInfo,
)

Number = int | float
Key = tuple[str, ...]

ORIGIN = "origin"
"""The label with its identity that an engine gets if an earlier one has the same labels."""
MIN_SAMPLE_RATE = 1e-9
CACHE_CONFIG = "cache_config"
"""Info metric of vLLM's cache."""
MAX_SIZE_DIGITS = 9
_label_versions = itertools.count()


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


@dataclasses.dataclass(slots=True)
class Description:
    """An engine as its processes describe it; the next Hello replaces the description as a whole.

    Attributes:
        core_info: Info metrics by short name, as the engine core last sent them.
        front_info: Info metrics as a front end last sent them.
        features: Options that the engine has.
        closed: All values that a label can have, by label name, as the Hello lists them.
        sent_bounds: Bucket bounds that the engine sent, by bucket family.
        bounds: Bucket bounds in use, by bucket family.
        encoded_head: The encoded head of the engine's totals; empty until it is needed.
        excess_bytes: Bytes by which the engine's page may exceed an ordinary engine's; see
            ``description_limits``.
    """

    core_info: Mapping[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    front_info: Mapping[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    features: frozenset[str] = frozenset()
    closed: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    sent_bounds: Mapping[str, list[float]] = dataclasses.field(default_factory=dict)
    bounds: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)
    encoded_head: bytes = b""
    excess_bytes: int = 0

    @property
    def missing_fields(self) -> dict[str, str]:
        """Paths of fields that the engine's release lacks, with ``MISSING`` or ``ABSENT``."""
        return {
            name.replace("__", "."): status
            for info in (self.core_info, self.front_info)
            for name, status in info.get(MISSING_FIELDS, {}).items()
        }


@dataclasses.dataclass(slots=True)
class Feeds:
    """The streams that feed an engine.

    Attributes:
        streams: Incarnations that feed it now.
        lost_cores: Streams of its core that are silent or closed.
        front_ends: Streams of front ends that send what users waited, or have sent it until recently.
        contested: Whether another living server had the ids of its server first.
        seen_at: Monotonic time at which the exporter last received anything for it.
        caught_up_at: Monotonic time since which its counters grow as things happen; NaN while a stream
            delivers what it has held.
    """

    streams: set[int] = dataclasses.field(default_factory=set)
    lost_cores: set[str] = dataclasses.field(default_factory=set)
    front_ends: set[str] = dataclasses.field(default_factory=set)
    contested: bool = False
    seen_at: float = 0.0
    caught_up_at: float = 0.0

    def remove(self, incarnation: int, seen_at: float) -> None:
        """Remove a stream from which the exporter last received something at ``seen_at``."""
        self.streams.discard(incarnation)
        self.seen_at = max(self.seen_at, seen_at)


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

    An engine has at most one part of a class; ``Engine.part`` makes it. The engine calls the methods,
    which do nothing by default.
    """

    def detach_core(self, engine: Engine) -> None:
        """End what depends on the events of the engine's core, which no stream sends any more."""

    def save(self, totals: Totals) -> None:
        """Write to ``totals`` what a snapshot, or a sender that folds items, is to hold."""

    def add(self, totals: Totals) -> None:
        """Add what ``save`` has written."""


AnyPart = TypeVar("AnyPart", bound=Part)


class Engine:
    """An engine: its series and the state from which they are derived.

    Only the registry and the code that applies items hold references to it.

    Attributes:
        id: Identity, which is unique in the registry.
        layout: The slots of its dialect's rows.
        labels: The labels of every series: engine and model_name, and ``origin`` where another
            engine would have the same labels.
        label_version: A number that no other engine has; it changes when the labels may change.
        description: Its description in the Hellos of its processes.
        info: Info metrics as exposed.
        missing_slots: Storage and slot of the series that need fields which its release lacks; they
            have no sample.
        settings: Settings of its series.
        values: Scalars by slot; None: no sample.
        histograms: Histograms by slot; None: not exposed yet.
        keyed: Scalars with open label values, by slot and own label values.
        open_families: Self-described families by name.
        exposed_paths: Paths of the layout whose optional families are exposed.
        parts: Further state, by class.
        statistics: The last item of cumulative statistics that the engine's server keeps.
        created: Unix time at which the counters began.
        restarts: How often another process has continued the engine.
        gauge_stamp: Host-monotonic stamp of the newest gauges applied.
        last_seen: Unix time at which the exporter received the engine's last item.
        feeds: The streams that feed it.
        live: Whether gauges are exposed; they expire soon after the last stream detaches.
        absent: Whether the server no longer has the engine; nothing of it is exposed then.
        version: The registry's version when this engine last changed.
    """

    def __init__(
        self,
        layout: Layout,
        info: EngineInfo,
        settings: SeriesSettings | None = None,
        *,
        created: float = 0.0,
    ) -> None:
        self.id = info.id
        self.layout = layout
        self.labels: dict[str, str] = dict(info.labels)
        self.description = Description()
        self.info: Mapping[str, Mapping[str, str]] = {}
        self.missing_slots: Sequence[tuple[Storage, int]] = ()
        self.settings = settings or SeriesSettings()
        self.values: list[Number | None] = [None] * layout.scalars
        self.histograms: list[Histogram | None] = [None] * len(layout.histograms)
        self.keyed: list[dict[Key, Number]] = [{} for _ in layout.keyed]
        self.open_families: dict[str, OpenFamily] = {}
        self.exposed_paths: set[str] = set()
        self.parts: dict[type[Part], Part] = {}
        self.statistics: Polled | None = None
        self.created = created
        self.restarts = self.version = self.label_version = 0
        self.gauge_stamp = self.last_seen = 0.0
        self.feeds = Feeds()
        self.live = True
        self.absent = False
        self.update(info)

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

    def update(self, info: EngineInfo) -> None:
        """Apply a new Hello; counters continue.

        A histogram whose bounds changed restarts at 0, since its counts cannot be moved; with
        native buckets they can.
        """
        features = frozenset(info.features)
        if ENGINE_CORE in features:
            features |= {REQUEST_EVENTS}
        if (self.description.features - features) & {ENGINE_CORE, REQUEST_EVENTS}:
            self.detach_core()
        core, front = self.description.core_info, self.description.front_info
        if any(name.startswith(CORE_INFO) for name in info.info):
            core = {n.removeprefix(CORE_INFO): labels for n, labels in info.info.items()}
        else:
            front = info.info
        # A front end's labels replace the core's, whichever Hello arrives last.
        self.info = {**core, **front}
        self.renew_label_version()
        sent = {name: tuple(bounds) for name, bounds in info.bounds.items()}
        bounds = {**DEFAULTS, **sent, **self.settings.overrides}
        self.description = Description(core, front, features, info.closed, info.bounds, bounds)
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
        for assignment in self.layout.assignments:
            # Self-described families start at 0 only for a named option, since few engines have
            # them. The same holds for rows that only some engines of the dialect can have.
            if assignment.row.feature in features or (
                not assignment.row.feature
                and assignment.storage != "sampled"
                and self.layout.required_labels.issuperset(assignment.row.shared)
            ):
                self.start_family(assignment)
        self._find_missing()

    def set_info(
        self, core_info: Mapping[str, dict[str, str]], front_info: Mapping[str, dict[str, str]]
    ) -> None:
        """Replace the info metrics."""
        self.description = dataclasses.replace(
            self.description, core_info=core_info, front_info=front_info, encoded_head=b""
        )
        info = {**core_info, **front_info}
        if info != self.info:
            self.info = info
            self.renew_label_version()
        self._find_missing()

    def _find_missing(self) -> None:
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

    @property
    def renamed_fields(self) -> list[str]:
        """The missing fields that the engine's release should have."""
        missing = self.description.missing_fields
        return [path for path, status in missing.items() if status == MISSING]

    def renew_label_version(self) -> None:
        """Note that the labels may have changed."""
        self.label_version = next(_label_versions)

    @property
    def is_up(self) -> bool:
        """True if streams feed the engine, among them that of its core if it has one."""
        return bool(self.feeds.streams) and not self.feeds.lost_cores

    @property
    def sent_labels(self) -> dict[str, str]:
        """The labels without ``origin``, which the exporter adds."""
        return {name: value for name, value in self.labels.items() if name != ORIGIN}

    @property
    def name(self) -> str:
        """The label ``engine``, or the identity where the dialect has no such label."""
        return self.labels.get("engine") or self.id

    @property
    def own_sample_rate(self) -> float | None:
        """The share of KV blocks that the engine itself samples; None where it does not sample."""
        try:
            rate = float(self.info.get(KV_SAMPLING, {}).get("rate", ""))
        except ValueError:
            return None
        return rate if MIN_SAMPLE_RATE <= rate <= 1.0 else None

    @property
    def max_running_requests(self) -> int | None:
        """The most requests that fit into the batch; None where the Hello does not have it."""
        return self._limit("max_running_requests")

    @property
    def max_step_tokens(self) -> int | None:
        """The most tokens that a step computes; None where the Hello does not have it."""
        return self._limit("max_step_tokens")

    def _limit(self, name: str) -> int | None:
        try:
            most = int(self.info.get(LIMITS, {}).get(name, ""))
        except ValueError:
            return None
        return most if 0 < most <= COUNT_LIMIT else None

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; 0 where the Hello does not have it."""
        size = self.info.get(CACHE_CONFIG, {}).get("block_size", "")
        return int(size) if size.isdecimal() and len(size) <= MAX_SIZE_DIGITS else 0

    def detach_core(self) -> None:
        """End what depends on the events of the engine's core, which no stream sends any more."""
        for part in [*self.parts.values()]:
            part.detach_core(self)
        self.feeds.lost_cores.clear()
        self.description = dataclasses.replace(self.description, core_info={}, encoded_head=b"")

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
        """Return the SLO counter of ``family``; None where no objective names it."""
        limits = self.settings.objectives.limits(family)
        if not limits:
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
