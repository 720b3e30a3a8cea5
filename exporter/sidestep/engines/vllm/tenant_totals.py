"""vLLM's own counters, to which the counters by tenant add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sidestep.catalog.layout import Layout
from sidestep.engines.tenant_counters import Total
from sidestep.engines.vllm.readers import FAILED
from sidestep.metrics.engine import Engine, Number

_ENDS, _PROMPT, _SOURCES, _GENERATED, _HELD = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:generation_tokens_total",
    "sidestep_kv_block_seconds_total",
)


def tenant_totals(layout: Layout) -> Mapping[str, Total]:
    """Return readers of vLLM's counters by field of ``TenantCounts``."""
    ends, sources = layout.find(_ENDS), layout.find(_SOURCES)
    cached = _sum_of(sources.slots[1 : len(sources.row.closed)])
    prompt = _sum_of(layout.find(_PROMPT).slots)
    assert sources.row.closed[0] == "local_compute"
    return {
        "ended": _sum_of(ends.slots),
        "failed": _sum_of([ends.slots[ends.row.closed.index(reason)] for reason in FAILED]),
        # Engines without the tap, whose cost is counted too, may have no sources.
        "computed": lambda engine: prompt(engine) - cached(engine),
        "cached": cached,
        "generated": _sum_of(layout.find(_GENERATED).slots),
        "held_micros": _sum_of(layout.find(_HELD).slots),
    }


def _sum_of(slots: Sequence[int]) -> Callable[[Engine], Number]:
    def total(engine: Engine) -> Number:
        return sum(engine.values[slot] or 0 for slot in slots)

    return total
