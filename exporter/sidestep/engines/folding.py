"""Folding: the items that do not fit into a full ring become totals of their series.

The sending process adds them to a registry of its own, with the exporter's applier. So counters and
buckets are the same as if each item had arrived. Lost are only intervals of requests and lifetimes of
blocks that are in progress when folding begins or ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.slo import SLO_REQUESTS, Objective, Objectives
from sidestep.engines.apply import Applier
from sidestep.engines.dialect import Dialects
from sidestep.engines.dialects import DIALECTS
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import SeriesSettings
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import Registry, Tracking
from sidestep.metrics.totals_codec import encode_totals, totals_of
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.engine_totals import Child, Totals
from sidestep.protocol.limits import COUNT_LIMIT, MAX_FRAME_BYTES
from sidestep.protocol.messages import EngineInfo, Settings
from sidestep.protocol.sender import Folded
from sidestep.tracking.kv_blocks.tracker import Sampling
from sidestep.tracking.requests.settings import RequestSettings

ENVELOPE = 1024
"""An upper limit on the bytes of a frame besides its totals."""


class ItemFolder:
    """Folds the items of one stream between two calls of ``seal``.

    Attributes:
        settings: The exporter's latest settings, so that items are counted as it would count them.
        kv_sample_rate: The share of KV blocks to track, as the exporter last requested.
    """

    def __init__(self, dialects: Dialects = DIALECTS) -> None:
        self._dialects = dialects
        self.count = 0
        self.settings = Settings()
        self.kv_sample_rate: float | None = None
        self._registry = Registry({})
        self._applier: Applier | None = None
        self._engines: dict[int, Engine] = {}

    def prepare(self, engines: Iterable[EngineInfo]) -> Applier:
        """Compile the catalogue, which takes 90 ms, before folding is needed.

        The layout includes common and former names; the exporter ignores families that it does not
        expose.
        """
        names = {engine.dialect for engine in engines} & self._dialects.keys()
        layouts = {
            name: compile_layout(self._dialects[name], legacy=True, common=True)
            for name in sorted(names)
        }
        if self._applier is None or self._registry.layouts != layouts:
            self._registry.layouts = layouts
            self._applier = Applier(self._registry, self._dialects)
        return self._applier

    def fold(self, data: bytes, engines: Sequence[EngineInfo]) -> bool:
        """Add an encoded item; return whether it could be counted. ``count`` increases either way."""
        if not self.count:
            self._begin()
        self.count += 1
        try:
            item = self._dialects.decode(data)
            if item.engine >= len(engines):
                return False
            applier = self._applier
            if applier is None or engines[item.engine].dialect not in self._registry.layouts:
                # A later Hello of the stream may name engines of other dialects.
                applier = self.prepare(engines)
            applier.apply(self._engine(item.engine, engines), item)
        except Exception:  # noqa: BLE001 - this runs in an engine: a bug of ours costs the item
            return False
        return True

    def _begin(self) -> None:
        registry, settings = self._registry, self.settings
        schemas = settings.schemas
        registry.series = SeriesSettings(
            {name: tuple(bounds) for name, bounds in settings.buckets.items()},
            # Created 0.0: the histograms of the exporter are older than these.
            None if schemas is None else NativeSettings(schemas, lambda: 0.0),
            Objectives(
                Objective(o.name, tuple(o.families), o.threshold) for o in settings.objectives
            ),
        )
        before = registry.tracking.sampling.rate
        rate = before if self.kv_sample_rate is None else self.kv_sample_rate
        registry.tracking = Tracking(
            RequestSettings(
                settings.scheduled, settings.latency, settings.max_tracked, settings.max_age
            ),
            Sampling(rate, settings.kv_scale, max(settings.kv_max_tracked, 1)),
        )

    def seal(self) -> Folded:
        """Return the folded items, and start again from nothing."""
        frames: list[list[bytes]] = [[]]
        free_bytes = MAX_FRAME_BYTES - ENVELOPE
        for engine in self._engines.values():
            for totals in self._encoded(engine):
                if len(totals) > free_bytes and frames[-1]:
                    frames.append([])
                    free_bytes = MAX_FRAME_BYTES - ENVELOPE
                frames[-1].append(totals)
                free_bytes -= len(totals)
        # Each frame uses at least one sequence number, of which there is one per item.
        folded = Folded(self.count, frames[: self.count])
        self._registry.clear()
        self._engines.clear()
        self.count = 0
        return folded

    def _engine(self, index: int, engines: Sequence[EngineInfo]) -> Engine:
        known = self._engines.get(index)
        if known is None:
            known = self._engines[index] = self._registry.register(engines[index])
            # The exporter counts the requests that were in flight when the first item was folded.
            if known.layout.tables.has_requests:
                self._registry.requests_of(known).requests.cut_off = COUNT_LIMIT
        return known

    def _encoded(self, engine: Engine) -> list[bytes]:
        """Return the engine's totals, in parts if self-described families make it too large."""
        totals = self._totals(engine)
        whole = encode_totals(engine, totals)
        if len(whole) <= MAX_FRAME_BYTES - ENVELOPE:
            return [whole]
        families, totals.open = totals.open, []
        # The first part has the SLO counts. The others name the objectives with a count of 0, or
        # the exporter would count the same observations again.
        slo_counts = [
            [Child(child.labels, 0) for child in children] if row.name == SLO_REQUESTS else []
            for row, children in zip(engine.layout.keyed, totals.keyed, strict=True)
        ]
        parts = [Totals(
            [None] * len(totals.scalars),
            [None] * len(totals.histograms),
            slo_counts,
            [family],
        ) for family in families]  # fmt: skip
        return [encode_totals(engine, part) for part in (totals, *parts)]

    def _totals(self, engine: Engine) -> Totals:
        applier = self._applier or Applier(self._registry, self._dialects)
        trackers = engine.part(Trackers)
        while trackers.blocks is not None and trackers.blocks.waiting:
            applier.flush_block_lifetimes()
        blocks = trackers.blocks is not None or trackers.lookups is not None
        applier.abandon_blocks(engine)
        totals = totals_of(engine)
        totals.blocks = blocks
        totals.limited = self._registry.limited["label_values"]
        self._registry.limited["label_values"] = 0
        tracker = trackers.requests
        if tracker is not None and tracker.sources:
            totals.cut_off = tracker.requests.whole
            (totals.process,), totals.processes = tracker.sources, tracker.processes
        return totals
