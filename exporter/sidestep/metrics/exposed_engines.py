"""The engines by identity: those that pages expose, and those that are retired."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.errors import WireError
from sidestep.metrics.engine import ORIGIN, Engine
from sidestep.metrics.engine_state import Key, SeriesSettings
from sidestep.metrics.quotas import OpenFamilyQuota
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER, is_printable
from sidestep.protocol.messages import EngineInfo

LabelKey = tuple[bool, frozenset[tuple[str, str]]]

MAX_ENGINES = 1024
"""Most engines that are exposed; at most as many more are retired."""
GAUGES_EXPIRE_SECONDS = 30.0
"""Seconds without a stream after which an engine's gauges are stale and no longer exposed."""
ENGINE_EXPIRES_SECONDS = 300.0
"""Seconds without a stream after which an engine is retired: it is no longer exposed."""
TOTALS_EXPIRE_SECONDS = 86_400.0
"""Seconds without a stream after which a retired engine is deleted; if it returns, it starts at 0."""
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


class ExposedEngines:
    """The engines by identity, exposed and retired, and the limits that they share.

    Attributes:
        retired: Engines that were silent for long: they are not exposed, but the counters of one
            that returns continue.
        reserved: Names that the exporter's own collectors use.
        wall: Returns the current Unix time, at which the counters of a new engine begin; 0.0 where
            that is not needed.
        version: Increases with every change, so that an unchanged page can be reused.
        limited: Updates that went to ``__other__`` or were refused, by limit.
        parts: Number of engines that are part of another engine.
        quota: Limits on self-described families, and their current use.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        series: SeriesSettings | None,
        reserved: frozenset[str],
        wall: Callable[[], float] | None,
    ) -> None:
        self.layouts = layouts
        self.series = series or SeriesSettings()
        self.reserved = reserved
        native = self.series.native
        self.wall = wall or (native.wall if native is not None else float)
        self.version = 0
        self.clear()

    def __contains__(self, identity: str) -> bool:
        """Return whether an engine, exposed or retired, has this identity."""
        return identity in self.engines or identity in self.retired

    def __iter__(self) -> Iterator[Engine]:
        """Yield all engines, exposed and retired."""
        return iter((*self.engines.values(), *self.retired.values()))

    def find(self, identity: str) -> Engine | None:
        """Return the engine with this identity, exposed or retired."""
        return self.engines.get(identity) or self.retired.get(identity)

    def check(self, info: EngineInfo) -> None:
        """Check that the engine that ``info`` describes can be exposed.

        Raises:
            WireError: The dialect is unknown, or another stream of the engine has another one, or the
                dialect does not allow the labels.
        """
        layout = self.layouts.get(info.dialect)
        if layout is None:
            raise WireError("unknown_dialect", info.dialect)
        names = set(info.labels)
        if not layout.required_labels <= names or (layout.own_labels | {ORIGIN}) & names:
            raise WireError("bad_label", f"an engine cannot have the labels {sorted(names)}")
        known = self.find(info.id)
        if known is not None and known.feeds.streams and known.layout is not layout:
            # Its streams would keep updating an engine that is no longer exposed.
            raise WireError("changed_dialect", f"{info.id} is one of {known.layout.dialect}")

    def register(self, info: EngineInfo) -> Engine:
        """Return the engine that ``info`` names; create it if it is new."""
        self.check(info)
        layout = self.layouts[info.dialect]
        engine = self.engines.get(info.id) or self.retired.pop(info.id, None)
        # A stream that feeds an engine keeps its labels.
        if engine is not None and (
            engine.layout is not layout
            or (not engine.feeds.streams and engine.sent_labels != info.labels)
        ):
            self._hide(engine)
            self._forget(engine)
            engine = None
        if engine is None:
            engine = Engine(layout, info, self.series, created=self.wall())
        else:
            engine.update(info)
        if info.id not in self.engines:
            self.expose(engine)
        self.touch(engine)
        return engine

    def expose(self, engine: Engine) -> None:
        """Expose ``engine``; add the label ``origin`` if another engine has the same labels."""
        if _label_key(engine) in self._label_keys:
            # Two samples of one name must not have the same labels.
            engine.labels[ORIGIN] = engine.id
            engine.renew_label_version()
        self._label_keys.add(_label_key(engine))
        self.engines[engine.id] = engine
        self.parts += _is_part(engine)

    def _hide(self, engine: Engine) -> None:
        if self.engines.pop(engine.id, None) is not None:
            self._label_keys.discard(_label_key(engine))
            self.parts -= _is_part(engine)

    def _forget(self, engine: Engine) -> None:
        """Release what ``engine`` used of shared limits, since it will not return."""
        engine.detach_core()
        self.quota.release_all(engine)

    def retire(self, engine: Engine) -> None:
        """Stop exposing ``engine``, and keep its totals."""
        self._hide(engine)
        self.retired[engine.id] = engine
        self.touch(engine)

    def names(self) -> list[AbstractSet[str]]:
        """Return the names that other exporters' families must not have, exposed now or not."""
        features: dict[Layout, set[str]] = {}
        for engine in self.engines.values():
            features.setdefault(engine.layout, set()).update(engine.description.features)
        names = [layout.names_for(found) for layout, found in features.items()]
        return [self.reserved, self.quota.names, *names]

    def clear(self) -> None:
        """Delete all engines."""
        self.engines: dict[str, Engine] = {}
        self.retired: dict[str, Engine] = {}
        self._label_keys: set[LabelKey] = set()
        """Labels of the engines that are exposed."""
        self.parts = 0
        self.quota = OpenFamilyQuota()
        self.limited: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        self.version += 1

    def touch(self, engine: Engine) -> None:
        """Record that ``engine`` changed."""
        self.version += 1
        engine.version = self.version

    def reset_gauges(self, engine: Engine) -> None:
        """Remove the gauges of ``engine``, since another process runs it now."""
        # The host may have rebooted, which resets its monotonic clock.
        engine.gauge_stamp = 0.0
        if engine.feeds.streams:
            return
        for slot in engine.layout.scalar_gauges:
            engine.values[slot] = None
        for children, row in zip(engine.keyed, engine.layout.keyed, strict=True):
            if row.kind == "gauge":
                children.clear()
        self.quota.remove_gauges(engine)

    def expire(self, now: float) -> None:
        """Expire silent engines: first their gauges, then all their series, then their totals."""
        for engine in list(self.engines.values()):
            # Gauges are exposed again only when the engine sends an item.
            if (
                engine.live
                and not engine.is_up
                and now - engine.feeds.seen_at >= GAUGES_EXPIRE_SECONDS
            ):
                engine.live = False
                self.touch(engine)
            silence = 0.0 if engine.feeds.streams else now - engine.feeds.seen_at
            if silence >= ENGINE_EXPIRES_SECONDS or (engine.absent and not engine.feeds.streams):
                engine.detach_core()
                self.retire(engine)
        # Engines that a polled server no longer has are deleted first, since their names may change
        # every second.
        for engine in sorted(self.retired.values(), key=lambda e: not e.absent):
            if (
                now - engine.feeds.seen_at >= TOTALS_EXPIRE_SECONDS
                or len(self.retired) > MAX_ENGINES
            ):
                del self.retired[engine.id]
                self._forget(engine)
                self.version += 1

    def over_limit(self, limit: str, detail: str) -> WireError:
        """Count a refusal by ``limit`` and return its error."""
        self.limited[limit] += 1
        return WireError("over_limit", detail)

    def add(self, engine: Engine, assignment: SlotAssignment, value: str, count: int) -> None:
        """Add ``count`` to the child of a counter whose own label is ``value``."""
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
        """Return ``key``, or the key of ``__other__`` where ``children`` is full."""
        if key in children or (len(children) < MAX_OPEN_VALUES and all(map(is_printable, key))):
            return key
        self.limited["label_values"] += 1
        return (OTHER,) * len(key)


def _label_key(engine: Engine) -> LabelKey:
    """Return the labels that distinguish an engine; to Prometheus, an empty label is a missing one."""
    return engine.layout.tables.has_own_namespace, frozenset(
        (n, v) for n, v in engine.labels.items() if v
    )


def _is_part(engine: Engine) -> bool:
    return engine.layout.tables.is_part(engine.labels)
