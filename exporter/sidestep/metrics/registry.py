"""The registry of engines and their series; scrapes read it, and applied items change it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

from sidestep.catalog.layout import Layout, SlotAssignment
from sidestep.catalog.prices import Prices
from sidestep.errors import WireError
from sidestep.metrics.engine import ORIGIN, Engine, Key, Number, SeriesSettings
from sidestep.metrics.quotas import OpenFamilyQuota
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.limits import MAX_OPEN_VALUES, OTHER, is_printable
from sidestep.protocol.messages import EngineInfo
from sidestep.tracking.kv_blocks.lookups import LookupSettings, LookupTracker
from sidestep.tracking.kv_blocks.tracker import BlockTracker, Sampling
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outcomes import RequestSink
from sidestep.tracking.requests.parallel_samples import SampleGroups
from sidestep.tracking.requests.settings import RequestSettings

TENANT = "tenant"
"""Label of the families by tenant."""
TENANT_REQUESTS = "tenant_requests"
"""Handler of the requests by tenant."""
COST = "cost"
"""Handler of the engine's cost."""
LabelKey = tuple[bool, frozenset[tuple[str, str]]]
Tracker = TypeVar("Tracker", bound=BlockTracker)

MAX_ENGINES = 1024
"""Most engines that are exposed; at most as many more are retired."""
GAUGES_EXPIRE_SECONDS = 30.0
"""Seconds without a stream after which an engine's gauges are stale and no longer exposed."""
ENGINE_EXPIRES_SECONDS = 300.0
"""Seconds without a stream after which an engine is retired: it is no longer exposed."""
TOTALS_EXPIRE_SECONDS = 86_400.0
"""Seconds without a stream after which a retired engine is deleted; if it returns, it starts at 0."""
FULL_SHARES = 10
"""Engines that may each track the full number of KV blocks; with more engines, they share it."""
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
class Tracking:
    """Settings of the trackers of all engines.

    Attributes:
        requests: Settings for reading request events.
        sampling: Settings of KV block tracking; see ``Registry.sample_blocks``.
        lookups: Settings of lookup tracking.
        request_sink: Returns the receiver of an engine's ended requests; None: they are not needed.
    """

    requests: RequestSettings = dataclasses.field(default_factory=RequestSettings)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    lookups: LookupSettings = dataclasses.field(default_factory=LookupSettings)
    request_sink: Callable[[Engine], RequestSink] | None = None


class Accounting:
    """Accounting of tokens.

    Attributes:
        tenants: Names of the tenants that are shown; None: tenants are not counted.
        prices: Prices of tokens now; cost that was counted stays.
        is_on: Whether tokens are counted by tenant or have had prices.
    """

    def __init__(self, tenants: Container[str] | None = None, prices: Prices | None = None) -> None:
        self.tenants = tenants
        self.prices = prices or Prices()
        self.is_on = tenants is not None or bool(self.prices)

    def change_prices(self, prices: Prices) -> None:
        """Count with these prices from now on."""
        self.prices = prices
        self.is_on = self.is_on or bool(prices)


class Registry:
    """All engines, by identity.

    Attributes:
        engines: Engines that are exposed.
        retired: Engines that were silent for long: they are not exposed, but the counters of one
            that returns continue.
        series: Settings of the engines' series.
        tracking: Settings of their trackers.
        accounting: Accounting of their tokens.
        reserved: Names that the exporter's own collectors use.
        is_exposed: Returns whether pages contain a family.
        wall: Returns the current Unix time, at which the counters of a new engine begin; 0.0 where
            that is not needed.
        refused_blocks: KV blocks that were refused at the capacity, by engine; logged and cleared.
        sample_groups: Groups of parallel samples, which may be spread over engines.
        version: Increases with every change, so that an unchanged page can be reused.
        limited: Updates that went to ``__other__`` or were refused, by limit.
        parts: Number of engines that are part of another engine.
        quota: Limits on self-described families, and their current use.
        has_exemplars: Whether a histogram has had exemplars.
    """

    def __init__(
        self,
        layouts: Mapping[str, Layout],
        series: SeriesSettings | None = None,
        tracking: Tracking | None = None,
        accounting: Accounting | None = None,
        *,
        reserved: frozenset[str] = frozenset(),
        is_exposed: Callable[[str], bool] = lambda _: True,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self.layouts = layouts
        self.series = series or SeriesSettings()
        self.tracking = tracking or Tracking()
        self.accounting = accounting or Accounting()
        self.reserved = reserved
        self.is_exposed = is_exposed
        native = self.series.native
        self.wall = wall or (native.wall if native is not None else float)
        self.has_exemplars = False
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
        """Return the engine that ``info`` names; create it if it is new.

        Raises:
            WireError: See ``check``.
        """
        self.check(info)
        layout = self.layouts[info.dialect]
        engine = self.engines.get(info.id) or self.retired.pop(info.id, None)
        if engine is not None and (engine.layout is not layout or self._is_renamed(engine, info)):
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

    def _is_renamed(self, engine: Engine, info: EngineInfo) -> bool:
        """Return whether ``engine`` returns with other labels; a stream that feeds it keeps them."""
        return not engine.feeds.streams and engine.sent_labels != info.labels

    def clear(self) -> None:
        """Delete all engines."""
        self.engines: dict[str, Engine] = {}
        self.retired: dict[str, Engine] = {}
        self._label_keys: set[LabelKey] = set()
        """Labels of the engines that are exposed."""
        self.parts = 0
        self.quota = OpenFamilyQuota()
        self.limited: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
        self.refused_blocks: Counter[str] = Counter()
        self.sample_groups = SampleGroups()
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
            requests = engine.part(Trackers).requests
            if requests is not None and requests.release_overdue(now):
                self.touch(engine)
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

    def release_requests(self) -> None:
        """Pass on all requests that wait for a front end, because the exporter ends."""
        for engine in self.engines.values():
            requests = engine.part(Trackers).requests
            if requests is not None:
                requests.release_held()

    def sample_blocks(self, rate: float) -> None:
        """Track this share of KV blocks from now on."""
        self.tracking.sampling.rate = rate
        for engine in self:
            self.touch(engine)

    def requests_of(self, engine: Engine) -> RequestTracker:
        """Return the request tracker of ``engine``; create it if there is none."""
        trackers = engine.part(Trackers)
        if trackers.requests is None:
            # An identity is a deployment's, followed by the engine's number.
            deployment = engine.id.rpartition("/")[0]
            sink = self.sink_of(engine)
            trackers.requests = RequestTracker(
                self.tracking.requests, self.sample_groups, deployment, sink
            )
        return trackers.requests

    def sink_of(self, engine: Engine) -> RequestSink | None:
        """Return the receiver of the requests of ``engine`` that end; create it if there is none."""
        trackers = engine.part(Trackers)
        if trackers.sink is None and self.tracking.request_sink is not None:
            trackers.sink = self.tracking.request_sink(engine)
        return trackers.sink

    def blocks_of(self, engine: Engine, kind: type[Tracker]) -> Tracker:
        """Return the tracker of ``engine``'s KV blocks, a new one where there is none of ``kind``."""
        blocks = engine.part(Trackers).blocks
        if not isinstance(blocks, kind):
            blocks = engine.part(Trackers).blocks = kind(self.tracking.sampling)
            self._share_blocks()
        return blocks

    def lookups_of(self, engine: Engine) -> LookupTracker:
        """Return the tracker of ``engine``'s lookups; create it if there is none."""
        trackers = engine.part(Trackers)
        if trackers.lookups is None:
            trackers.lookups = LookupTracker(self.tracking.lookups)
        return trackers.lookups

    def _share_blocks(self) -> None:
        """Divide the capacity for KV blocks equally among the engines."""
        found = [(e, e.part(Trackers).blocks) for e in self.engines.values()]
        tracked = [(engine, blocks) for engine, blocks in found if blocks is not None]
        capacity = self.tracking.sampling.capacity
        share = max(FULL_SHARES * capacity // max(len(tracked), 1), 1)
        for engine, blocks in tracked:
            blocks.resize(min(capacity, share))
            # Pages have the number of tracked blocks.
            self.touch(engine)

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

    def requests_by_tenant(self) -> Counter[str]:
        """Return the requests that ended by tenant, as the series of engines that are counted here have them."""
        found: Counter[str] = Counter()
        for engine in self:
            if TENANT_REQUESTS in engine.layout.handled:
                (slot,) = engine.layout.handled[TENANT_REQUESTS].slots
                for (name,), count in engine.keyed[slot].items():
                    found[name] += int(count)
        return found

    def hide_tenant(self, name: str) -> None:
        """Add the counts of a tenant to those of ``__other__``."""
        for engine in self:
            for children in _by_tenant(engine):
                if (name,) in children:
                    children[(OTHER,)] = children.get((OTHER,), 0) + children.pop((name,))
                    self.touch(engine)

    def drop_tenants(self) -> None:
        """Delete all series by tenant, since tenants are not counted any more."""
        for engine in self:
            for children in _by_tenant(engine):
                children.clear()

    def over_limit(self, limit: str, detail: str) -> WireError:
        """Count a refusal by ``limit`` and return its error."""
        self.limited[limit] += 1
        return WireError("over_limit", detail)

    def capped(self, children: Mapping[Key, object], key: Key) -> Key:
        """Return ``key``, or the key of ``__other__`` where ``children`` is full."""
        if key in children or (len(children) < MAX_OPEN_VALUES and all(map(is_printable, key))):
            return key
        self.limited["label_values"] += 1
        return (OTHER,) * len(key)


def _by_tenant(engine: Engine) -> Iterator[dict[Key, Number]]:
    """Yield the children of the families by tenant."""
    for row, children in zip(engine.layout.keyed, engine.keyed, strict=True):
        if row.own_labels == (TENANT,):
            yield children


def _label_key(engine: Engine) -> LabelKey:
    """Return the labels that distinguish an engine; to Prometheus, an empty label is a missing one."""
    return engine.layout.tables.has_own_namespace, frozenset(
        (n, v) for n, v in engine.labels.items() if v
    )


def _is_part(engine: Engine) -> bool:
    return engine.layout.tables.is_part(engine.labels)
