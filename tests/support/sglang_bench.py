"""Items of SGLang applied to engines of a registry."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from collectors import RANK, seen
from rendered import copied, render
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item, encode_item
from sidestep.engines.sglang.wire import SglangSchedulerStats, SglangStats
from sidestep.exposition import json_format
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples

SCHEDULER = EngineInfo("s", "sglang", {name: str(value) for name, value in RANK.items()})


class Bench:
    """A registry with engines, items to apply, and the resulting page."""

    def __init__(self, *infos: EngineInfo, **options: bool) -> None:
        layouts = DIALECTS.layouts(**options)
        self.registry = Registry(layouts)
        self.applier = Applier(self.registry)
        for info in infos or (SCHEDULER,):
            self.registry.register(info)

    def apply(self, *items: Item, to: str = "s") -> Engine:
        """Apply ``items`` in order, as the exporter decodes them."""
        engine = self.registry.engines[to]
        for item in items:
            self.applier.apply(engine, DIALECTS.decode(encode_item(item)))
        return engine

    @property
    def text(self) -> str:
        """Text page."""
        return render(self.registry).decode()

    def samples(self, name: str, *without: str) -> dict[tuple[str, ...], float]:
        """Return the samples of a family, buckets aside, by the label values that are not its engine's."""
        family = seen(self.text).get(name.removesuffix("_total"))
        hidden = {*RANK, *without}
        return {
            (*(() if sample == name else (sample,)),
             *(value for label, value in labels if label not in hidden)): number
            for (sample, labels), number in (family.samples if family else {}).items()
            if not sample.endswith("_bucket")
        }  # fmt: skip

    def typed(self, name: str) -> list[Mapping[str, Any]]:
        """Return the samples of a family in the JSON page."""
        (family,) = self.families(name)
        return list(family["samples"])

    def families(self, name: str) -> list[Any]:
        """Return the JSON page of a family."""
        found: list[Any] = json.loads(json_format.encode(copied(self.registry), names={name}))
        return found


def stats(stamp: float = 1.0, **fields: Any) -> SglangStats:
    """Return a report of a scheduler."""
    return SglangStats(0, stamp, 1e9, SglangSchedulerStats(**fields))


def family(name: str, kind: Any, labels: Sequence[str], *samples: Sample, **more: Any) -> Samples:
    """Return an item with the samples of one family."""
    return Samples(0, 1.0, [Family(name, kind, list(labels), list(samples), **more)])
