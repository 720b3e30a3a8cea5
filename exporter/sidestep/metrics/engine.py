"""One engine: its series, and what it takes to derive them."""

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
from sidestep.metrics.native_histogram import Native
from sidestep.metrics.saturation import Saturation
from sidestep.metrics.slo_histogram import Judge, judged
from sidestep.protocol.limits import MAX_OPEN_VALUES
from sidestep.protocol.messages import CORE_INFO, ENGINE_CORE, KV_SAMPLING, EngineInfo
from sidestep.tracking.kv_blocks.tracker import Residency
from sidestep.tracking.requests.machine import Lifecycle
from sidestep.tracking.requests.rules import UNTRACKED

Number = int | float
Key = tuple[str, ...]

ORIGIN = "origin"
"""Label of the later of two engines that would look alike: its identity."""
LEAST_RATE = 1e-9
RESTART = UNTRACKED.index("restart")
QUESTIONS = ("vllm:request_params_n", "vllm:request_max_num_generation_tokens")
"""Families of parallel samples: how many they are, and the tokens of the longest."""
_LOOKS = itertools.count()
LINE = 32
"""Bytes of a line on a page beside names and labels."""


@dataclasses.dataclass(slots=True)
class OpenFamily:
    """A family that a Samples item described, or a catalogue row that such items feed."""

    name: str
    kind: Kind
    help: str
    labels: Key
    bounds: Bounds
    children: dict[Key, Number | Histogram] = dataclasses.field(default_factory=dict)
    born: int = 0
    """Times that the engine's processes had been replaced when it began."""

    def size(self, key: Key, engine: Engine) -> int:
        """Bytes, about, that the child of those label values takes on a page."""
        line = LINE + len(self.name) + engine.label_chars + sum(map(len, (*self.labels, *key)))
        return line * (len(self.bounds) + 3 if self.kind in OBSERVED else 1)


class Engine:
    """One engine's series and what it takes to derive them. One owner, no references elsewhere.

    Attributes:
        labels: What every series carries: engine and model_name, and an origin
            where another engine would show the same.
        core_info: Info metrics by short name, as its core told them last.
        front_info: As a front end did.
        info: As they are shown.
        values: Scalars by slot; None is no sample.
        histograms: By slot; None is not shown yet.
        keyed: Scalars with open label values, by slot and own label values.
        gauge_stamp: Host-monotonic stamp of the newest gauges applied.
        last_seen: Unix time here when its last item came.
        streams: Incarnations that feed it now.
        heard: Monotonic time here when the last of them was heard.
        live: Whether its gauges are shown: what they say goes soon after the last stream.
        sent_bounds: Bucket bounds as the engine has them.
        objectives: What its requests are held against; None where whoever counts has done so.
        version: The registry's, when this engine last changed.
        seen: Paths of the plan whose families are shown.
        series: Children of its self-described families.
        open_bytes: What they take on a page, about.
        label_chars: Characters of the labels that stand in each of its lines.
        excess: Bytes that its page can have over an ordinary engine's; see ``descriptions``.
        looks: A number that it alone has, and another one when its labels may be others.
        head: The records' own: what changes with a hello only, encoded.
        throughput: Prompt and generated tokens per second of the last interval.
        saturation: Of what it can serve, how much it is asked for; None where that is not followed.
        requests: Its requests in flight, where it sends request events.
        blocks: Its KV blocks, where it sends events of them.
        looked: What was last read of statistics that its server keeps.
        absent: Whether its server does not have it now: nothing of it is shown.
        forwarded: Whether other exporters count it: nothing is applied to it here.
        told: Its computed gauges by their readings' names, where it is.
        native: How native histograms are kept beside the classic ones; None where they are not.
        created: Unix time since when its counters count, where native histograms are kept.
        marks: The protobuf renderer's own: labels of a child, by family and key.
    """

    __slots__ = (
        "absent",
        "blocks",
        "bounds",
        "closed",
        "core_info",
        "created",
        "excess",
        "external_hits",
        "features",
        "forwarded",
        "front_info",
        "gauge_stamp",
        "head",
        "heard",
        "held_tokens",
        "histograms",
        "id",
        "info",
        "keyed",
        "label_chars",
        "labels",
        "last_seen",
        "layout",
        "live",
        "looked",
        "looks",
        "marks",
        "mm_hits",
        "native",
        "objectives",
        "open",
        "open_bytes",
        "overrides",
        "prefix_hits",
        "requests",
        "restarts",
        "saturation",
        "seen",
        "sent_bounds",
        "series",
        "streams",
        "throughput",
        "told",
        "values",
        "version",

    )  # fmt: skip

    def __init__(
        self,
        layout: Layout,
        info: EngineInfo,
        overrides: Mapping[str, Bounds],
        native: Native | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self.id = info.id
        self.objectives = objectives
        self.native = native
        self.created = 0.0 if native is None else native.wall()
        self.marks: dict[tuple[str, Key], bytes] = {}
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
        self.open: dict[str, OpenFamily] = {}
        self.sent_bounds: Mapping[str, list[float]] = {}
        self.gauge_stamp = self.last_seen = self.heard = 0.0
        self.held_tokens = self.version = self.looks = 0
        self.live = True
        self.head = b""
        self.prefix_hits, self.external_hits, self.mm_hits = HitWindow(), HitWindow(), HitWindow()
        self.throughput: tuple[float, float] | None = None
        self.saturation: Saturation | None = None
        self.requests: Lifecycle | None = None
        self.blocks: Residency | None = None
        self.looked: Any = None
        self.absent = self.forwarded = False
        self.told: Mapping[str, float] = {}
        self.restarts = 0
        self.streams: set[int] = set()
        self.seen: set[str] = set()
        self.series = self.open_bytes = self.excess = 0
        self.label_chars = sum(len(name) + len(value) + 4 for name, value in info.labels.items())
        self.update(info)

    def update(self, info: EngineInfo) -> None:
        """Take over what a new hello says; counters that are shown go on.

        A histogram whose bounds changed starts anew, since its counts cannot be moved; with native
        buckets they can.
        """
        features = frozenset(info.features)
        if ENGINE_CORE in self.features - features:
            self.forget_core()
        self.features = features
        if any(name.startswith(CORE_INFO) for name in info.info):
            self.core_info = {n.removeprefix(CORE_INFO): said for n, said in info.info.items()}
        else:
            self.front_info = info.info
        # In this order: a front end's word replaces the core's, whoever greets last.
        self.info = {**self.core_info, **self.front_info}
        self.look_anew()
        self.head = b""
        self.closed = info.closed
        self.sent_bounds = info.bounds
        sent = {name: tuple(bounds) for name, bounds in info.bounds.items()}
        self.bounds = {**DEFAULTS, **sent, **self.overrides}
        for slot, known in enumerate(self.histograms):
            if known is not None and known.bounds != self.bounds_of(slot):
                self.histograms[slot] = known.rebounded(self.bounds_of(slot))
        for name, family in self.open.items():
            row = self.layout.sampled_rows.get(name)
            if row is not None and row.buckets and family.bounds != self.bounds[row.buckets]:
                family.bounds = self.bounds[row.buckets]
                family.children = {
                    key: child.rebounded(family.bounds)
                    for key, child in family.children.items()
                    if isinstance(child, Histogram)
                }
        for assignment in self.layout.assignments:
            # What describes itself is shown at 0 for an option only: most of it nobody ever has.
            # So is what only some kinds of the dialect's engines can have.
            if assignment.row.feature in self.features or (
                not assignment.row.feature
                and assignment.storage != "sampled"
                and self.layout.required_labels.issuperset(assignment.row.shared)
            ):
                self.show(assignment)

    def look_anew(self) -> None:
        """Its labels are others now."""
        self.looks = next(_LOOKS)
        self.marks.clear()

    @property
    def name(self) -> str:
        """Value of its label ``engine``; its identity, where its dialect has no such label."""
        return self.labels.get("engine") or self.id

    @property
    def own_sample_rate(self) -> float | None:
        """Share of KV blocks that the engine itself samples; None where it does not."""
        try:
            rate = float(self.info.get(KV_SAMPLING, {}).get("rate", ""))
        except ValueError:
            return None
        return rate if LEAST_RATE <= rate <= 1.0 else None

    def forget_core(self) -> None:
        """Nobody tells of its requests and blocks any more."""
        hooks = self.layout.handled
        if self.requests is not None:
            slot = hooks["untracked_requests"].slots[RESTART]
            self.values[slot] = (self.values[slot] or 0) + self.requests.close()
            # Questions that ended just now, or elsewhere since its last word.
            for numbers in self.requests.siblings.observed:
                for name, number in zip(QUESTIONS, numbers, strict=True):
                    self.histogram(self.layout.find(name).slots[0]).observe(number)
        self.requests = self.blocks = None
        self.core_info = {}
        for name in ("requests_by_state", "longest_preemption"):
            for slot in hooks[name].slots if name in hooks else ():
                self.values[slot] = None

    def empty(self) -> None:
        """Have no series at all, not even those that begin at 0."""
        self.values[:] = [None] * len(self.values)
        self.histograms[:] = [None] * len(self.histograms)
        self.keyed[:] = [{} for _ in self.keyed]
        self.open = {}
        self.series = self.open_bytes = self.restarts = 0
        self.seen.clear()
        for window in (self.prefix_hits, self.external_hits, self.mm_hits):
            window.reset()

    def apart(self) -> Engine:
        """Another of its description, which has no series at all and no place anywhere."""
        made = copy.copy(self)
        made.values, made.histograms = [None] * len(self.values), [None] * len(self.histograms)
        made.keyed, made.open = [{} for _ in self.keyed], {}
        made.seen, made.streams, made.marks = set(), set(), {}
        made.prefix_hits, made.external_hits, made.mm_hits = HitWindow(), HitWindow(), HitWindow()
        made.series = made.open_bytes = made.restarts = 0
        made.last_seen = 0.0
        made.created = 0.0 if self.native is None else self.native.wall()
        made.requests = made.blocks = made.looked = None
        return made

    def show(self, assignment: SlotAssignment) -> None:
        """Start ``placed``'s counters and histograms at 0 where the engine does; gauges wait."""
        row = assignment.row
        if assignment.storage == "histogram":
            for slot in assignment.slots:
                self.histogram(slot)
        elif assignment.storage == "sampled":
            self.open.setdefault(row.name, self.sampled(row))
        elif row.kind != "counter":
            return
        elif assignment.storage == "scalars":
            for slot in assignment.slots[: len(row.closed) or 1]:
                self.values[slot] = self.values[slot] or 0
        elif assignment.storage == "keyed" and len(row.own_labels) == 1:
            children = self.keyed[assignment.slots[0]]
            # Objectives are the operator's: no engine knows them.
            known = () if row.name == SLO_UNDECIDED else self.closed.get(row.own_labels[0], ())
            for value in known:
                # Every hello may know others beforehand.
                if len(children) < MAX_OPEN_VALUES:
                    children.setdefault((value,), 0)

    def sampled(self, row: Row) -> OpenFamily:
        """A family for a row that Samples items feed; with known label values it starts at 0."""
        bounds: Bounds = ()
        if row.kind == "histogram":
            bounds = row.bounds or self.bounds[row.buckets]
        made = OpenFamily(
            row.name, row.kind, row.exposed_help, row.own_labels, bounds, born=self.restarts
        )
        if row.kind != "gauge" and (row.closed or not row.own_labels):
            keys: list[Key] = [(value,) for value in row.closed] or [()]
            for key in keys:
                made.children[key] = self.child(made) if row.kind in OBSERVED else 0
        return made

    def child(self, family: OpenFamily) -> Histogram:
        """An empty histogram of a family that Samples items feed."""
        row = self.layout.sampled_rows.get(family.name)
        return self._made(family.bounds, "" if row is None else row.buckets, family.name)

    def _made(self, bounds: Bounds, buckets: str, family: str) -> Histogram:
        """An empty histogram of a bucket family; a summary's has no buckets of any kind."""
        if self.native is None or not bounds:
            made = Histogram(bounds)
        else:
            made = self.native.histogram(bounds, buckets)
        judge = self.judge(family)
        return made if judge is None else judged(made, judge)

    def judge(self, family: str) -> Judge | None:
        """Who counts which observations of ``family`` meet objectives; None where there are none."""
        limits = () if self.objectives is None else self.objectives.limits(family)
        if not limits:
            return None
        requests, unjudged = (self.layout.handled[hook].slots[0] for hook in SLO_HANDLERS)
        return Judge(self.keyed[requests], self.keyed[unjudged], limits)

    def histogram(self, slot: int) -> Histogram:
        """The histogram in ``slot``, shown from now on."""
        found = self.histograms[slot]
        if found is None:
            row = self.layout.histograms[slot]
            found = self._made(self.bounds_of(slot), row.buckets, row.name)
            self.histograms[slot] = found
        return found

    def bounds_of(self, slot: int) -> Bounds:
        """What the histogram in ``slot`` has as bounds."""
        row = self.layout.histograms[slot]
        return row.bounds or self.bounds[row.buckets]
