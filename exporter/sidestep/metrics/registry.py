"""The registry of engines, with the trackers of their events and the counts of their tenants."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TypeVar

from sidestep.catalog.layout import Layout
from sidestep.catalog.prices import Prices
from sidestep.metrics.ended_counter import ended_counter, part_counter
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key, Number, SeriesSettings
from sidestep.metrics.exposed_engines import ExposedEngines
from sidestep.metrics.step_limits import limit_seconds
from sidestep.metrics.timeline import SECONDS, Timeline
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.limits import OTHER
from sidestep.tracking.kv_blocks.lookups import LookupSettings, LookupTracker
from sidestep.tracking.kv_blocks.tracker import BlockTracker, Sampling
from sidestep.tracking.requests.handovers import HandOvers
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outcomes import RequestSink
from sidestep.tracking.requests.parallel_samples import SampleGroups
from sidestep.tracking.requests.parts import KEYS
from sidestep.tracking.requests.settings import RequestSettings

TENANT = "tenant"
"""Label of the families by tenant."""
TENANT_REQUESTS = "tenant_requests"
"""Handler of the requests by tenant."""
COST = "cost"
"""Handler of the engine's cost."""
Tracker = TypeVar("Tracker", bound=BlockTracker)

FULL_SHARES = 10
"""Engines that may each track the full number of KV blocks; with more engines, they share it."""


@dataclasses.dataclass(slots=True)
class Tracking:
    """Settings of the trackers of all engines.

    Attributes:
        sampling: Settings of KV block tracking; see ``Registry.sample_blocks``.
        request_sink: Returns the receiver of an engine's ended requests; None: they are not needed.
        keeps_timeline: Whether engines have a ``Timeline``.
    """

    requests: RequestSettings = dataclasses.field(default_factory=RequestSettings)
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    lookups: LookupSettings = dataclasses.field(default_factory=LookupSettings)
    request_sink: Callable[[Engine], RequestSink] | None = None
    keeps_timeline: bool = False


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


class Registry(ExposedEngines):
    """All engines; scrapes read them, and applied items change them.

    Attributes:
        refused_blocks: KV blocks that were refused at the capacity, by engine; logged and cleared.
        refused_requests: Requests that were refused at the capacity, likewise.
        sample_groups: Groups of parallel samples, which may be spread over engines.
        hand_overs: Requests that an engine has handed over to another.
        has_exemplars: Whether a histogram has had exemplars.
        clock: Returns the monotonic time, at which steps are received.
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
        clock: Callable[[], float] = float,
    ) -> None:
        super().__init__(layouts, series, reserved, wall)
        self.tracking = tracking or Tracking()
        self.accounting = accounting or Accounting()
        self.is_exposed = is_exposed
        self.clock = clock
        self.has_exemplars = False

    def clear(self) -> None:
        """Delete all engines."""
        super().clear()
        self.refused_blocks: Counter[str] = Counter()
        self.refused_requests: Counter[str] = Counter()
        self.sample_groups = SampleGroups()
        self.hand_overs = HandOvers()

    def expire(self, now: float) -> None:
        """Pass on requests that have waited too long for a front end; expire silent engines and old steps."""
        for engine in [*self.engines.values()]:
            requests = engine.part(Trackers).requests
            if requests is not None and requests.reports.release_overdue(now):
                self.touch(engine)
        super().expire(now)
        if self.tracking.keeps_timeline:
            self._update_timelines(now)

    def _update_timelines(self, now: float) -> None:
        for engine in self.engines.values():
            seconds = limit_seconds(engine)
            if seconds:
                engine.part(Timeline).add_limits(seconds, now)
        found = [engine.find_part(Timeline) for engine in self.engines.values()]
        timelines = [timeline for timeline in found if timeline is not None]
        for timeline in timelines:
            timeline.trim(now - SECONDS, len(timelines))

    def release_requests(self) -> None:
        """Pass on all requests that wait for a front end, because the exporter ends."""
        for engine in self.engines.values():
            requests = engine.part(Trackers).requests
            if requests is not None:
                requests.reports.release()

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
            count_parts = part_counter(engine)
            if count_parts is not None:
                # A rate needs a value before the first request, by tenant, too.
                count_parts(dict.fromkeys(KEYS, 0.0))
            sink = self.sink_of(engine)
            trackers.requests = RequestTracker(
                self.tracking.requests,
                self.sample_groups,
                deployment,
                sink,
                ended_counter(engine, self.hand_overs),
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
                # The tenant is the last of the labels.
                for key in [key for key in children if key[-1] == name]:
                    other = (*key[:-1], OTHER)
                    children[other] = children.get(other, 0) + children.pop(key)
                    self.touch(engine)

    def drop_tenants(self) -> None:
        """Delete all series by tenant, since tenants are not counted any more."""
        for engine in self:
            for children in _by_tenant(engine):
                children.clear()


def _by_tenant(engine: Engine) -> Iterator[dict[Key, Number]]:
    """Yield the children of the families by tenant."""
    for row, children in zip(engine.layout.keyed, engine.keyed, strict=True):
        if row.own_labels[-1:] == (TENANT,):
            yield children
