"""Items of vLLM applied to an engine of a registry."""

from __future__ import annotations

from typing import Any

from rendered import copied
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item
from sidestep.engines.vllm.wire import (
    SchedulerStats,
    VllmStep,
)
from sidestep.exposition.aggregated_series import AggregatedSeries, aggregate_native
from sidestep.exposition.families import families
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.iteration_stats import (
    IterationStats,
    PromptTokenStats,
)
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples


class Bench:
    """A registry with engines, items to apply, and the resulting samples."""

    def __init__(self, *, legacy: bool = False) -> None:
        layouts = DIALECTS.layouts(legacy=legacy)
        self.registry = Registry(layouts)
        self.applier = Applier(self.registry)
        self.engines: dict[str, Engine] = {}

    def engine(self, name: str = "0", **info: Any) -> Engine:
        """Register an engine of model ``m``."""
        labels = info.pop("labels", {"engine": name, "model_name": "m"})
        identity = info.pop("id", name)
        dialect = info.pop("dialect", "vllm")
        engine = self.registry.register(EngineInfo(identity, dialect, labels, **info))
        self.engines[name] = engine
        return engine

    def apply(self, *items: Item, to: str = "0") -> None:
        """Apply ``items`` in order."""
        for item in items:
            self.applier.apply(self.engines[to], item)

    def values(self, name: str) -> dict[tuple[str, ...], Any]:
        """Return the samples of ``name`` by the label values other than engine and model."""
        values = copied(self.registry)
        (family,) = families(values, {name})
        if family.is_shared:
            found = AggregatedSeries().series(values, family, aggregate_native)
            return {tuple(text for _, text in labels): value for labels, value in found}
        children = [family.children(engine)[1] for engine in family.engines(values)]
        return {key: value for some in children for key, value in some}

    def value(self, name: str) -> Any:
        """Return the only sample of ``name``."""
        (value,) = self.values(name).values()
        return value


def step(
    scheduler: SchedulerStats | None = None,
    iteration: IterationStats | None = None,
    *,
    stamp: float = 1.0,
    more: bool = False,
) -> VllmStep:
    """Return a step at ``stamp``."""
    return VllmStep(0, stamp, 1e9, scheduler, iteration, None, more)


def tokens(generated: int, computed: int = 0) -> IterationStats:
    """Return a front end's statistics of a step."""
    prompt = PromptTokenStats(computed=computed, total=computed)
    return IterationStats(num_generation_tokens=generated, prompt_token_stats=prompt)


def family(name: str = "vllm:new_total", kind: Any = "counter", **fields: Any) -> Samples:
    """Return a self-described family with one sample."""
    sample = Sample(fields.pop("values", []), fields.pop("value", 1.0), fields.pop("seen", []))
    return Samples(0, 1.0, [Family(name, kind, samples=[sample], **fields)])
