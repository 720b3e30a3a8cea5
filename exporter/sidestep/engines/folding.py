"""Where items go that find the ring full: into the series they would have become.

The exporter's own applier adds them up, over a registry of this process's own, so that
counters and buckets are the same as if each item had arrived. What is lost are the
intervals of requests and the lives of blocks that were under way when it began or ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.slo import SLO_REQUESTS, Objective, Objectives
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import decode_item
from sidestep.metrics.engine import Engine
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.record_codec import encode_record, totals_of
from sidestep.metrics.registry import Registry, Sampling
from sidestep.protocol.folding import Folded
from sidestep.protocol.limits import COUNT_LIMIT, MAX_FRAME_BYTES
from sidestep.protocol.messages import EngineInfo, Settings
from sidestep.protocol.records import Child, Totals
from sidestep.tracking.requests.rules import Rules

ENVELOPE = 1024
"""Bytes of a frame that are not records, and more."""


class ItemFolder:
    """Adds up the items of one stream, from one ``seal`` to the next.

    Attributes:
        count: Items folded since the last seal.
        settings: What the exporter said last: fold as it would have counted.
        kv_sample_rate: Share of KV blocks to follow, as it said last.
    """

    def __init__(self) -> None:
        self.count = 0
        self.settings = Settings()
        self.kv_sample_rate: float | None = None
        self._registry = Registry({}, {})
        self._applier: Applier | None = None
        self._engines: dict[int, Engine] = {}

    def prepare(self, engines: Iterable[EngineInfo]) -> Applier:
        """Compile the catalogue: 90 ms that are better spent before the exporter has gone.

        With common names, whether the exporter shows them or not: it leaves out what it has
        no place for.
        """
        dialects = {engine.dialect for engine in engines} & DIALECTS.keys()
        layouts = {name: compile_layout(DIALECTS[name], common=True) for name in sorted(dialects)}
        if self._applier is None or self._registry.layouts != layouts:
            self._registry.layouts = layouts
            self._applier = Applier(self._registry)
        return self._applier

    def fold(self, data: bytes, engines: Sequence[EngineInfo]) -> bool:
        """Add an encoded item; whether it could be counted. Its place is used up either way."""
        if not self.count:
            self._begin()
        self.count += 1
        try:
            item = decode_item(data)
            if item.engine >= len(engines):
                return False
            applier = self._applier
            if applier is None or engines[item.engine].dialect not in self._registry.layouts:
                # A stream may come to feed others than those that it greeted with.
                applier = self.prepare(engines)
            applier.apply(self._engine(item.engine, engines), item)
        except Exception:  # noqa: BLE001 - this runs in an engine: a bug of ours costs the item
            return False
        return True

    def _begin(self) -> None:
        registry, said = self._registry, self.settings
        registry.overrides = {name: tuple(bounds) for name, bounds in said.buckets.items()}
        # When they were begun here is nobody's concern: the exporter's count since before.
        registry.native = (
            None if said.schemas is None else NativeSettings(said.schemas, lambda: 0.0)
        )
        registry.objectives = Objectives(
            Objective(one.name, tuple(one.families), one.threshold) for one in said.objectives
        )
        registry.rules = Rules(said.scheduled, said.latency, said.max_tracked, said.max_age)
        rate = registry.sampling.rate if self.kv_sample_rate is None else self.kv_sample_rate
        registry.sampling = Sampling(rate, said.kv_scale, max(said.kv_max_tracked, 1))

    def seal(self) -> Folded:
        """What was folded; the next item begins anew."""
        frames: list[list[bytes]] = [[]]
        room = MAX_FRAME_BYTES - ENVELOPE
        for engine in self._engines.values():
            for record in self._records(engine):
                if len(record) > room and frames[-1]:
                    frames.append([])
                    room = MAX_FRAME_BYTES - ENVELOPE
                frames[-1].append(record)
                room -= len(record)
        # A frame takes a seq at least; records outnumber items only where the last ones do not fit.
        folded = Folded(self.count, frames[: self.count])
        self._registry.clear()
        self._engines.clear()
        self.count = 0
        return folded

    def _engine(self, index: int, engines: Sequence[EngineInfo]) -> Engine:
        known = self._engines.get(index)
        if known is None:
            known = self._engines[index] = self._registry.register(engines[index])
            # The exporter counts those that were under way when the first item was folded.
            if known.layout.has_requests:
                self._registry.requests_of(known).requests.cut_off = COUNT_LIMIT
        return known

    def _records(self, engine: Engine) -> list[bytes]:
        """The engine's record; in parts where its own families make it too large for a frame."""
        totals = self._totals(engine)
        whole = encode_record(engine, totals)
        if len(whole) <= MAX_FRAME_BYTES - ENVELOPE:
            return [whole]
        families, totals.open = totals.open, []
        # What was held against objectives is in the first part: the others add nothing to it, but
        # say that it was done, or the exporter would do it again.
        judged = [
            [Child(child.labels, 0) for child in children] if row.name == SLO_REQUESTS else []
            for row, children in zip(engine.layout.keyed, totals.keyed, strict=True)
        ]
        parts = [Totals(
            [None] * len(totals.scalars),
            [None] * len(totals.histograms),
            judged,
            [family],
        ) for family in families]  # fmt: skip
        return [encode_record(engine, part) for part in (totals, *parts)]

    def _totals(self, engine: Engine) -> Totals:
        applier = self._applier or Applier(self._registry)
        while engine.blocks is not None and engine.blocks.waiting:
            applier.drain()
        blocks = engine.blocks is not None
        applier.abandon(engine)
        totals = totals_of(engine)
        totals.blocks = blocks
        totals.limited = self._registry.limited["label_values"]
        self._registry.limited["label_values"] = 0
        if engine.requests is not None and engine.requests.source is not None:
            totals.cut_off = engine.requests.requests.whole
        return totals
