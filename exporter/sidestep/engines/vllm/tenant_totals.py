"""vLLM's own counters, to which the counters by tenant add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sidestep.catalog.layout import Layout
from sidestep.engines.tenant_counters import Total
from sidestep.engines.vllm.readers import FAILED
from sidestep.metrics.engine import Engine, Number

_ENDS, _SOURCES, _GENERATED = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:generation_tokens_total",
)


def tenant_totals(layout: Layout) -> Mapping[str, Total]:
    """Return readers of vLLM's counters by field of ``TenantCounts``."""
    ends, sources = layout.find(_ENDS), layout.find(_SOURCES)
    computed, *cached = sources.slots
    assert sources.row.closed[0] == "local_compute"
    return {
        "ended": _sum_of(ends.slots),
        "failed": _sum_of([ends.slots[ends.row.closed.index(reason)] for reason in FAILED]),
        "computed": _sum_of([computed]),
        "cached": _sum_of(cached[: len(sources.row.closed) - 1]),
        "generated": _sum_of(layout.find(_GENERATED).slots),
    }


def _sum_of(slots: Sequence[int]) -> Total:
    def total(engine: Engine) -> Number:
        return sum(engine.values[slot] or 0 for slot in slots)

    return total
