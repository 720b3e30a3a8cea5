"""Counters of the service: what several engines do for a request is counted by one of them."""

from __future__ import annotations

import functools

from sidestep.catalog.layout import Layout
from sidestep.engines.shared_rows import (
    RECEIVED_PROMPT,
    SERVICE_GENERATED,
    SERVICE_PROMPT,
    SERVICE_REQUESTS,
)
from sidestep.engines.vllm.own_rows import HANDED_OVER_REQUESTS, HANDED_OVER_TOKENS
from sidestep.metrics.engine import Engine
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import PREFILL

ENDS, PROMPT, SOURCES, GENERATED = (
    "vllm:request_success_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_by_source_total",
    "vllm:generation_tokens_total",
)


@functools.cache
def service_counters(layout: Layout) -> ServiceCounters:
    """Return the counters of the engines with this layout."""
    return ServiceCounters(layout)


def update_service(engine: Engine) -> None:
    """Compute ``sidestep_service_*`` of an engine."""
    service_counters(engine.layout).update(engine)


class ServiceCounters:
    """Sets ``sidestep_service_*`` to vLLM's own counters, less what another engine counts, but not below 0."""

    def __init__(self, layout: Layout) -> None:
        def slots(name: str) -> tuple[int, ...]:
            return tuple(layout.find(name).slots)

        self._handed_over, (self._handed_over_tokens,) = map(
            slots, (HANDED_OVER_REQUESTS, HANDED_OVER_TOKENS)
        )
        self._received = computed, local, external, *_ = slots(RECEIVED_PROMPT)
        (prompt,), (generated,) = slots(PROMPT), slots(GENERATED)
        _, own_local, own_external, *_ = slots(SOURCES)
        self._plain = [
            *zip(slots(SERVICE_REQUESTS), slots(ENDS), self._handed_over, strict=True),
            (slots(SERVICE_GENERATED)[0], generated, self._handed_over_tokens),
        ]
        self._computed, self._cached, *_ = slots(SERVICE_PROMPT)
        self._parts = prompt, own_local, own_external, computed, local, external

    def update(self, engine: Engine) -> None:
        """Compute the counters from the engine's own."""
        values = engine.values
        for slot, own, elsewhere in self._plain:
            count = values[own]
            if count is not None:
                values[slot] = max(count - (values[elsewhere] or 0), 0)
        prompt, local, external, *received = (values[slot] or 0 for slot in self._parts)
        # Releases before the split by source count all prompt tokens only.
        values[self._computed] = max(prompt - local - external - received[0], 0)
        values[self._cached] = max(local + external - received[1] - received[2], 0)

    def leave_to_others(self, engine: Engine, stats: IterationStats) -> None:
        """Count what another engine counts of a step that no request events describe."""
        values = engine.values
        prompts = stats.prompt_token_stats
        if prompts is not None and prompts.external_kv_transfer and not engine.external_is_cached:
            slot = self._received[2]
            values[slot] = (values[slot] or 0) + prompts.external_kv_transfer
        if engine.role == PREFILL:
            slot = self._handed_over_tokens
            values[slot] = (values[slot] or 0) + stats.num_generation_tokens
            for request in stats.finished_requests:
                slot = self._handed_over[min(request.finish_reason, len(self._handed_over) - 1)]
                values[slot] = (values[slot] or 0) + 1
