"""All state: engines and their series. What a scrape reads, and apply alone writes."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.catalog.slo import Objectives
from sidestep.errors import WireError
from sidestep.exposition.passthrough.registry import Passed
from sidestep.metrics.engine import ORIGIN, Engine, Key
from sidestep.metrics.native_histogram import Native
from sidestep.metrics.quotas import Room
from sidestep.protocol.limits import MAX_LABEL_CHARS, MAX_OPEN_VALUES, OTHER, is_printable
from sidestep.protocol.messages import EngineInfo
from sidestep.tracking.kv_blocks.tracker import Residency
from sidestep.tracking.requests.machine import Lifecycle
from sidestep.tracking.requests.parallel_samples import Questions
from sidestep.tracking.requests.rules import Rules

Look = tuple[bool, frozenset[tuple[str, str]]]

MAX_ENGINES = 1024
"""Shown, and as many that are kept."""
SILENT = 30.0
"""Seconds after which nobody knows any more whether a gauge is true."""
GONE = 300.0
"""After which an engine is not shown any more."""
KEPT = 86_400.0
"""After which its totals are forgotten: should it come back, they begin at 0."""
FULL_SHARES = 10
"""Engines that may follow as many KV blocks as one may; more of them share."""
LIMITS = (
    "label_values",
    "engine_series",
    "series",
    "engine_bytes",
    "bytes",
    "families",
    "engines",
    "descriptions",
)


@dataclasses.dataclass(slots=True)
class Sampling:
    """How KV blocks are followed.

    Attributes:
        rate: Which share of them.
        scale: Whether each counts for all that it stands for.
        capacity: How many at once, per engine.
    """

    rate: float = 0.01
    scale: bool = False
    capacity: int = 100_000


class Registry:
    """Engines by identity.

    Attributes:
        rules: How request events are read.
        sampling: How KV blocks are followed; see ``sample_blocks``.
        native: How native histograms are kept; None: they are not.
        objectives: What requests are held against that are counted here.
        questions: Parallel samples, which may be spread over engines.
        kept: Engines of which nothing was heard for long: not shown, but when one
            comes back its counters go on.
        version: Changes with every applied item, so that a page can be reused.
        limited: What went to ``__other__`` or was refused since there were too many, by limit.
        parts: How many engines are but parts of others.
        room: What families take that describe themselves.
        reserved: Those that the exporter's own collectors take.
        passed: Other exporters' families.
        shows: Whether a family is to be on pages.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        overrides: Mapping[str, Bounds],
        rules: Rules | None = None,
        sampling: Sampling | None = None,
        native: Native | None = None,
        *,
        objectives: Objectives | None = None,
    ) -> None:
        self.layouts = layouts
        self.overrides = overrides
        self.rules = rules or Rules()
        self.sampling = sampling or Sampling()
        self.native = native
        self.objectives = objectives or Objectives()
        self.questions = Questions()
        self.engines: dict[str, Engine] = {}
        self.kept: dict[str, Engine] = {}
        self.version = 0
        self.limited: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        self.parts = 0
        self.room = Room()
        self.reserved: frozenset[str] = frozenset()
        self.passed = Passed(self._names)
        self.shows: Callable[[str], bool] = lambda _: True
        self._looks: set[Look] = set()
        """Labels of the engines that are shown."""

    def check(self, info: EngineInfo) -> None:
        """Whether ``info``'s engine can be shown.

        Raises:
            WireError: An unknown dialect, or not the one that others feed it in, or labels that
                cannot be.
        """
        layout = self.layouts.get(info.dialect)
        if layout is None:
            raise WireError("unknown_dialect", info.dialect)
        names = set(info.labels)
        if not layout.required_labels <= names or (layout.own_labels | {ORIGIN}) & names:
            raise WireError("bad_label", f"an engine cannot have the labels {sorted(names)}")
        known = self.engines.get(info.id) or self.kept.get(info.id)
        if known is None or known.forwarded:
            return
        if known.streams and known.layout is not layout:
            # Whoever feeds it would go on with what nobody shows.
            raise WireError("changed_dialect", f"{info.id} is one of {known.layout.dialect}")

    def register(self, info: EngineInfo) -> Engine:
        """The engine that ``info`` names, known or new.

        Raises:
            WireError: See ``check``.
        """
        self.check(info)
        self._make_way(info.id)
        layout = self.layouts[info.dialect]
        engine = self.engines.get(info.id) or self.kept.pop(info.id, None)
        if engine is not None and (engine.layout is not layout or self._is_renamed(engine, info)):
            self._hide(engine)
            self._forget(engine)
            engine = None
        if engine is None:
            engine = Engine(layout, info, self.overrides, self.native, self.objectives)
        else:
            engine.update(info)
        if info.id not in self.engines:
            self.enter(engine)
        self.touch(engine)
        return engine

    def _make_way(self, name: str) -> None:
        """Call an engine that another exporter counts something else: its name is ours to give."""
        engine = self.engines.get(name) or self.kept.get(name)
        if engine is None or not engine.forwarded:
            return
        free = (f"{name[: MAX_LABEL_CHARS - 8]}/{number}" for number in itertools.count(2))
        engine.id = next(n for n in free if n not in self.engines and n not in self.kept)
        for engines in (self.engines, self.kept):
            if engines.pop(name, None) is not None:
                engines[engine.id] = engine

    def enter(self, engine: Engine) -> None:
        """Show ``engine``; never two samples of one name and labels."""
        if _look(engine) in self._looks:
            # The later engine says where it is from.
            engine.labels[ORIGIN] = engine.id
            engine.look_anew()
        self._looks.add(_look(engine))
        self.engines[engine.id] = engine
        self.parts += _is_part(engine)

    def _hide(self, engine: Engine) -> None:
        if self.engines.pop(engine.id, None) is not None:
            self._looks.discard(_look(engine))
            self.parts -= _is_part(engine)

    def _forget(self, engine: Engine) -> None:
        """Nobody will hear of ``engine`` again: what it took is there for others."""
        engine.forget_core()
        self.room.release(engine)

    def empty(self, engine: Engine) -> None:
        """Let ``engine`` have no series at all, not even those that begin at 0."""
        self.room.release(engine)
        engine.empty()

    def retire(self, engine: Engine) -> None:
        """Show ``engine`` no more, and remember what it has counted."""
        self._hide(engine)
        self.kept[engine.id] = engine
        self.touch(engine)

    def recall(self, engine: Engine) -> None:
        """Show ``engine`` again, if it is only remembered."""
        if self.kept.pop(engine.id, None) is not None:
            self.enter(engine)
            self.touch(engine)

    def discard(self, engine: Engine) -> None:
        """Forget ``engine``, shown or remembered."""
        if self.engines.get(engine.id) is engine:
            self._hide(engine)
        if self.kept.get(engine.id) is engine:
            del self.kept[engine.id]
        self._forget(engine)
        self.version += 1

    def _names(self) -> list[AbstractSet[str]]:
        """What no other exporter's family may be called: also what is not on the page just now."""
        features: dict[Layout, set[str]] = {}
        for engine in self.engines.values():
            features.setdefault(engine.layout, set()).update(engine.features)
        names = [layout.names_for(found) for layout, found in features.items()]
        return [self.reserved, self.room.names, *names]

    def _is_renamed(self, engine: Engine, info: EngineInfo) -> bool:
        """Whether it comes back under other labels; while one stream says others, the first stand."""
        before = {name: value for name, value in engine.labels.items() if name != ORIGIN}
        return not engine.streams and before != info.labels

    def clear(self) -> None:
        """Forget all there is."""
        self.engines.clear()
        self.kept.clear()
        self._looks.clear()
        self.parts = 0
        self.room = Room()
        self.limited = Counter(dict.fromkeys(LIMITS, 0))
        self.questions = Questions()
        self.version += 1

    def touch(self, engine: Engine) -> None:
        """Note that ``engine`` changed."""
        self.version += 1
        engine.version = self.version

    def renew(self, engine: Engine) -> None:
        """Another process has the engine: what the last one said of its state is over."""
        # Its host may have been started anew, and the monotonic clock with it.
        engine.gauge_stamp = 0.0
        if engine.streams:
            return
        for slot in engine.layout.scalar_gauges:
            engine.values[slot] = None
        for children, row in zip(engine.keyed, engine.layout.keyed, strict=True):
            if row.kind == "gauge":
                children.clear()
        self.room.without_gauges(engine)

    def pass_time(self, now: float) -> None:
        """Hide what nobody tells of any more: first gauges, then all of an engine."""
        for engine in list(self.engines.values()):
            silence = 0.0 if engine.streams else now - engine.heard
            # It is shown again by a word of its own only.
            if engine.live and silence >= SILENT:
                engine.live = False
                self.touch(engine)
            if silence >= GONE or (engine.absent and not engine.streams):
                if not engine.forwarded:
                    engine.forget_core()
                self.retire(engine)
        # What a polled server once had goes first: it can have another name every second. Then what
        # other exporters count, who remember it themselves.
        for engine in sorted(self.kept.values(), key=lambda e: (not e.absent, not e.forwarded)):
            if now - engine.heard >= KEPT or len(self.kept) > MAX_ENGINES:
                del self.kept[engine.id]
                self._forget(engine)
                self.version += 1

    def sample_blocks(self, rate: float) -> None:
        """Follow this share of KV blocks from now on."""
        self.version += 1
        self.sampling.rate = rate
        for engine in self.engines.values():
            if engine.blocks is not None:
                engine.blocks.rate = rate

    def requests_of(self, engine: Engine) -> Lifecycle:
        """The requests of ``engine``, followed from now on."""
        if engine.requests is None:
            engine.requests = Lifecycle(self.rules, self.questions)
        return engine.requests

    def blocks_of(self, engine: Engine) -> Residency:
        """The KV blocks of ``engine``, followed from now on."""
        if engine.blocks is None:
            chosen = self.sampling
            engine.blocks = Residency(
                rate=chosen.rate, scale=chosen.scale, capacity=chosen.capacity
            )
            self._share_blocks()
        return engine.blocks

    def _share_blocks(self) -> None:
        """All engines together may follow so many blocks, and each as many as any other."""
        following = [e.blocks for e in self.engines.values() if e.blocks is not None]
        capacity = self.sampling.capacity
        share = max(FULL_SHARES * capacity // max(len(following), 1), 1)
        for blocks in following:
            blocks.capacity = min(capacity, share)

    def add(self, engine: Engine, assignment: SlotAssignment, value: str, count: int) -> None:
        """Add to the child of a counter whose own label is ``value``."""
        if assignment.storage == "keyed":
            children = engine.keyed[assignment.slots[0]]
            key = self.capped(children, (value,))
            children[key] = children.get(key, 0) + count
            return
        closed = assignment.row.closed
        slot = assignment.slots[closed.index(value) if value in closed else len(closed)]
        if count or value in closed:
            engine.values[slot] = (engine.values[slot] or 0) + count

    def capped(self, children: Mapping[Key, object], key: Key) -> Key:
        """``key``, or the one for all others where ``children`` is full."""
        if key in children or (len(children) < MAX_OPEN_VALUES and all(map(is_printable, key))):
            return key
        self.limited["label_values"] += 1
        return (OTHER,) * len(key)


def _look(engine: Engine) -> Look:
    """What tells an engine's series from others': to Prometheus an empty label is none."""
    return engine.layout.has_own_namespace, frozenset((n, v) for n, v in engine.labels.items() if v)


def _is_part(engine: Engine) -> bool:
    return engine.layout.tables.is_part(engine.labels)
