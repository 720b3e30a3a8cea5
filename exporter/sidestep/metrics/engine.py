"""One engine: its series and the state from which they are derived."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from sidestep.catalog.buckets import DEFAULTS, Bounds
from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.catalog.model import OBSERVED, Kind, Row
from sidestep.catalog.slo import SLO_HANDLERS, SLO_UNDECIDED, Objectives
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.hit_window import HitWindow
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.saturation import Saturation
from sidestep.metrics.slo_histogram import SloCounter, with_slo_counter
from sidestep.protocol.limits import MAX_OPEN_VALUES
from sidestep.protocol.messages import CORE_INFO, ENGINE_CORE, KV_SAMPLING, EngineInfo
from sidestep.tracking.kv_blocks.tracker import Residency
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.rules import UNTRACKED

Number = int | float
Key = tuple[str, ...]

ORIGIN = "origin"
"""The label with its identity that an engine gets if an earlier one has the same labels."""
MIN_SAMPLE_RATE = 1e-9
RESTART_INDEX = UNTRACKED.index("restart")
PARALLEL_SAMPLE_FAMILIES = ("vllm:request_params_n", "vllm:request_max_num_generation_tokens")
"""Families of parallel samples: their number, and the tokens of the longest."""
_label_versions = itertools.count()
LINE_BYTES = 32
"""Approximate bytes of a line on a page without its names and labels."""


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

    def size(self, key: Key, engine: Engine) -> int:
        """Return the approximate bytes that the child with these label values takes on a page."""
        line = (
            LINE_BYTES + len(self.name) + engine.label_chars + sum(map(len, (*self.labels, *key)))
        )
        return line * (len(self.bounds) + 3 if self.kind in OBSERVED else 1)


class Engine:
    """One engine: its series and the state from which they are derived.

    Only the registry and the code that applies items hold references to it.

    Attributes:
        labels: The labels of every series: engine and model_name, and ``origin`` where another
            engine would have the same labels.
        core_info: Info metrics by short name, as the engine core last sent them.
        front_info: Info metrics as a front end last sent them.
        info: Info metrics as exposed.
        values: Scalars by slot; None: no sample.
        histograms: Histograms by slot; None: not exposed yet.
        keyed: Scalars with open label values, by slot and own label values.
        open_families: Self-described families by name.
        gauge_stamp: Host-monotonic stamp of the newest gauges applied.
        last_seen: Unix time at which the exporter received the engine's last item.
        streams: Incarnations that feed the engine now.
        seen_at: Monotonic time at which the exporter last received anything for the engine.
        live: Whether gauges are exposed; they expire soon after the last stream detaches.
        sent_bounds: Bucket bounds that the engine sent.
        objectives: Objectives that its requests count for; None where another process has
            counted them already.
        version: The registry's version when this engine last changed.
        exposed_paths: Paths of the layout whose optional families are exposed.
        open_series: Number of children of ``open_families``.
        open_bytes: Approximate bytes that these take on a page.
        label_chars: Characters of the labels in each line of a page.
        excess_bytes: Bytes by which the engine's page may exceed an ordinary engine's; see
            ``hello_limits``.
        label_version: A number that no other engine has; it changes when the labels may change.
        encoded_head: The encoded head of its records, which changes only with a Hello.
        throughput: Prompt and generated tokens per second of the last interval.
        saturation: The engine's saturation estimate; None where it is not tracked.
        requests: The engine's requests in flight, where it sends request events.
        blocks: The engine's KV blocks, where it sends events of them.
        statistics: The last item of cumulative statistics that the engine's server keeps.
        absent: Whether the server no longer has the engine; nothing of it is exposed then.
        federated: Whether other exporters count the engine; no items are applied to it here.
        computed: Computed gauges by name, as received from another exporter.
        native: Settings of native histograms; None: classic histograms only.
        created: Unix time at which the counters began, where native histograms are on.
        label_cache: Encoded labels of a child, by family and key; the protobuf renderer fills it.
    """

    __slots__ = (
        "absent",
        "blocks",
        "bounds",
        "closed",
        "computed",
        "core_info",
        "created",
        "encoded_head",
        "excess_bytes",
        "exposed_paths",
        "external_hits",
        "features",
        "federated",
        "front_info",
        "gauge_stamp",
        "held_tokens",
        "histograms",
        "id",
        "info",
        "keyed",
        "label_cache",
        "label_chars",
        "label_version",
        "labels",
        "last_seen",
        "layout",
        "live",
        "mm_hits",
        "native",
        "objectives",
        "open_bytes",
        "open_families",
        "open_series",
        "overrides",
        "prefix_hits",
        "requests",
        "restarts",
        "saturation",
        "seen_at",
        "sent_bounds",
        "statistics",
        "streams",
        "throughput",
        "values",
        "version",

    )  # fmt: skip

    def __init__(
        self,
        layout: Layout,
        info: EngineInfo,
        overrides: Mapping[str, Bounds],
        native: NativeSettings | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self.id = info.id
        self.objectives = objectives
        self.native = native
        self.created = 0.0 if native is None else native.wall()
        self.label_cache: dict[tuple[str, Key], bytes] = {}
        self.layout = layout
        self.labels: dict[str, str] = dict(info.labels)
        self.core_info: Mapping[str, dict[str, str]] = {}
        self.front_info: Mapping[str, dict[str, str]] = {}
        self.info: Mapping[str, Mapping[str, str]] = {}
        self.features: frozenset[str] = frozenset()
        self.closed: Mapping[str, list[str]] = {}
        self.overrides = overrides
        self.bounds: Mapping[str, Bounds] = {}
        self.values: list[Number | None] = [None] * layout.scalars
        self.histograms: list[Histogram | None] = [None] * len(layout.histograms)
        self.keyed: list[dict[Key, Number]] = [{} for _ in layout.keyed]
        self.open_families: dict[str, OpenFamily] = {}
        self.sent_bounds: Mapping[str, list[float]] = {}
        self.gauge_stamp = self.last_seen = self.seen_at = 0.0
        self.held_tokens = self.version = self.label_version = 0
        self.live = True
        self.encoded_head = b""
        self.prefix_hits, self.external_hits, self.mm_hits = HitWindow(), HitWindow(), HitWindow()
        self.throughput: tuple[float, float] | None = None
        self.saturation: Saturation | None = None
        self.requests: RequestTracker | None = None
        self.blocks: Residency | None = None
        self.statistics: Any = None
        self.absent = self.federated = False
        self.computed: Mapping[str, float] = {}
        self.restarts = 0
        self.streams: set[int] = set()
        self.exposed_paths: set[str] = set()
        self.open_series = self.open_bytes = self.excess_bytes = 0
        self.label_chars = sum(len(name) + len(value) + 4 for name, value in info.labels.items())
        self.update(info)

    def update(self, info: EngineInfo) -> None:
        """Apply a new Hello; counters continue.

        A histogram whose bounds changed restarts at 0, since its counts cannot be moved; with
        native buckets they can.
        """
        features = frozenset(info.features)
        if ENGINE_CORE in self.features - features:
            self.detach_core()
        self.features = features
        if any(name.startswith(CORE_INFO) for name in info.info):
            self.core_info = {n.removeprefix(CORE_INFO): labels for n, labels in info.info.items()}
        else:
            self.front_info = info.info
        # A front end's labels replace the core's, whichever Hello arrives last.
        self.info = {**self.core_info, **self.front_info}
        self.renew_label_version()
        self.encoded_head = b""
        self.closed = info.closed
        self.sent_bounds = info.bounds
        sent = {name: tuple(bounds) for name, bounds in info.bounds.items()}
        self.bounds = {**DEFAULTS, **sent, **self.overrides}
        for slot, known in enumerate(self.histograms):
            if known is not None and known.bounds != self.bounds_of(slot):
                self.histograms[slot] = known.with_bounds(self.bounds_of(slot))
        for name, family in self.open_families.items():
            row = self.layout.sampled_rows.get(name)
            if row is not None and row.buckets and family.bounds != self.bounds[row.buckets]:
                family.bounds = self.bounds[row.buckets]
                family.children = {
                    key: child.with_bounds(family.bounds)
                    for key, child in family.children.items()
                    if isinstance(child, Histogram)
                }
        for assignment in self.layout.assignments:
            # Self-described families start at 0 only for a named option, since few engines have
            # them. The same holds for rows that only some engines of the dialect can have.
            if assignment.row.feature in self.features or (
                not assignment.row.feature
                and assignment.storage != "sampled"
                and self.layout.required_labels.issuperset(assignment.row.shared)
            ):
                self.start_family(assignment)

    def renew_label_version(self) -> None:
        """Note that the labels may have changed."""
        self.label_version = next(_label_versions)
        self.label_cache.clear()

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

    def detach_core(self) -> None:
        """Stop tracking requests and blocks, since no stream sends their events any more."""
        handled = self.layout.handled
        if self.requests is not None:
            slot = handled["untracked_requests"].slots[RESTART_INDEX]
            self.values[slot] = (self.values[slot] or 0) + self.requests.close()
            # Groups of parallel samples that ended now, or on another engine since the last item.
            for numbers in self.requests.samples.observed:
                for name, number in zip(PARALLEL_SAMPLE_FAMILIES, numbers, strict=True):
                    self.histogram(self.layout.find(name).slots[0]).observe(number)
        self.requests = self.blocks = None
        self.core_info = {}
        for name in ("requests_by_state", "longest_preemption"):
            for slot in handled[name].slots if name in handled else ():
                self.values[slot] = None

    def clear_series(self) -> None:
        """Remove all series, including those that start at 0."""
        self.values[:] = [None] * len(self.values)
        self.histograms[:] = [None] * len(self.histograms)
        self.keyed[:] = [{} for _ in self.keyed]
        self.open_families = {}
        self.open_series = self.open_bytes = self.restarts = 0
        self.exposed_paths.clear()
        for window in (self.prefix_hits, self.external_hits, self.mm_hits):
            window.reset()

    def without_series(self) -> Engine:
        """Return a copy of this engine without series that is in no registry."""
        made = copy.copy(self)
        made.values, made.histograms = [None] * len(self.values), [None] * len(self.histograms)
        made.keyed, made.open_families = [{} for _ in self.keyed], {}
        made.exposed_paths, made.streams, made.label_cache = set(), set(), {}
        made.prefix_hits, made.external_hits, made.mm_hits = HitWindow(), HitWindow(), HitWindow()
        made.open_series = made.open_bytes = made.restarts = 0
        made.last_seen = 0.0
        made.created = 0.0 if self.native is None else self.native.wall()
        made.requests = made.blocks = made.statistics = None
        return made

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
            known = () if row.name == SLO_UNDECIDED else self.closed.get(row.own_labels[0], ())
            for value in known:
                # Each Hello may list further values.
                if len(children) < MAX_OPEN_VALUES:
                    children.setdefault((value,), 0)

    def new_family(self, row: Row) -> OpenFamily:
        """Return a new family for a row that Samples items feed; known label values start at 0."""
        bounds: Bounds = ()
        if row.kind == "histogram":
            bounds = row.bounds or self.bounds[row.buckets]
        made = OpenFamily(
            row.name, row.kind, row.exposed_help, row.own_labels, bounds, born=self.restarts
        )
        if row.kind != "gauge" and (row.closed or not row.own_labels):
            keys: list[Key] = [(value,) for value in row.closed] or [()]
            for key in keys:
                made.children[key] = self.new_histogram(made) if row.kind in OBSERVED else 0
        return made

    def new_histogram(self, family: OpenFamily) -> Histogram:
        """Return an empty histogram for a family that Samples items feed."""
        row = self.layout.sampled_rows.get(family.name)
        return self._new_histogram(family.bounds, "" if row is None else row.buckets, family.name)

    def _new_histogram(self, bounds: Bounds, buckets: str, family: str) -> Histogram:
        """Return an empty histogram of a bucket family; a summary's has no buckets at all."""
        if self.native is None or not bounds:
            made = Histogram(bounds)
        else:
            made = self.native.histogram(bounds, buckets)
        counter = self.slo_counter(family)
        return made if counter is None else with_slo_counter(made, counter)

    def slo_counter(self, family: str) -> SloCounter | None:
        """Return the SLO counter of ``family``; None where no objective names it."""
        limits = () if self.objectives is None else self.objectives.limits(family)
        if not limits:
            return None
        requests, undecided = (self.layout.handled[name].slots[0] for name in SLO_HANDLERS)
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
        return row.bounds or self.bounds[row.buckets]
