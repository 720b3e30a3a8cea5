"""The trackers of one engine's events: of its requests, its KV blocks and its lookups in caches."""

from __future__ import annotations

from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Part
from sidestep.tracking.kv_blocks.lookups import LookupTracker
from sidestep.tracking.kv_blocks.tracker import BlockTracker
from sidestep.tracking.requests.machine import RequestTracker
from sidestep.tracking.requests.outcomes import UNTRACKED, RequestSink

_OF_REQUESTS = ("requests_by_state", "longest_preemption")
"""Handlers of the gauges that a request tracker feeds."""


class Trackers(Part):
    """The trackers of one engine. The registry makes each with the first event that needs it.

    Attributes:
        requests: The engine's requests in flight, where it sends request events.
        sink: Receiver of its requests that end; None before the first one, or where none is needed.
        blocks: The engine's KV blocks, where it sends events of them.
        lookups: Lookups in its prefix cache, where it sends them.
    """

    def __init__(self) -> None:
        self.requests: RequestTracker | None = None
        self.sink: RequestSink | None = None
        self.blocks: BlockTracker | None = None
        self.lookups: LookupTracker | None = None

    def detach_core(self, engine: Engine) -> None:
        """Stop tracking, and count requests whose ends will not be known."""
        handled = engine.layout.handled
        if self.requests is not None:
            slots = dict(zip(UNTRACKED, handled["untracked_requests"].slots, strict=False))
            for reason, count in self.requests.close().items():
                engine.values[slots[reason]] = (engine.values[slots[reason]] or 0) + count
            # Groups of parallel samples that ended now, or on another engine since the last item.
            for numbers in self.requests.samples.observed:
                for name, number in zip(
                    engine.layout.tables.parallel_samples, numbers, strict=True
                ):
                    engine.histogram(engine.layout.find(name).slots[0]).observe(number)
        if self.lookups is not None:
            self.lookups.share(None)
        self.requests = self.sink = self.blocks = self.lookups = None
        for name in _OF_REQUESTS:
            for slot in handled[name].slots if name in handled else ():
                engine.values[slot] = None
