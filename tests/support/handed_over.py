"""Simulated engines of a service that computes prompts on one engine and generates on another."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from sidestep.engines.items import Item
from sidestep.engines.sglang.wire import (
    QueueCount,
    SglangRequest,
    SglangRequests,
    SglangSchedulerStats,
    SglangStats,
)
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.messages import DECODE, ENGINE_CORE, PREFILL, REQUEST_EVENTS, EngineInfo
from sidestep.protocol.request_events import (
    HANDED_OVER,
    RECEIVED,
    WHOLE,
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.vllm.connectors import families

LENGTH = FINISH_REASONS.index("length")
NIXL = {
    "transfer_duration": [0.02],
    "post_duration": [0.001],
    "bytes_transferred": [1e6],
    "num_descriptors": [20],
    "num_failed_transfers": [1],
}
"""Statistics of a transfer, as vLLM's connector reports them."""


def served(
    number: int,
    prompt: tuple[int, int, int],
    tokens: int,
    transfer: int = WHOLE,
    *,
    name: str = "a-1",
    join: str = "",
    start: float = 1.0,
    reason: int = LENGTH,
    waited: float = 0.0,
) -> list[Event]:
    """Return the events of a request that arrives at ``start``, in an engine whose Unix time is 100 more."""
    size = sum(prompt)
    identity = Identity(name, join=join)
    queued = Queued(number, start, 100.0 + start, size, identity=identity, max_tokens=tokens)
    queued.transfer = transfer
    events: list[Event] = [queued]
    scheduled = Scheduled(number, start + waited + 0.25)
    if waited:
        scheduled.asked, scheduled.loaded = start + 0.125, start + 0.125 + waited
    events.append(scheduled)
    at = start + waited + 1.0
    for index in range(tokens):
        prompts = [Prompt(number, *prompt)] if not index else []
        step = Iteration(at - 0.5, at, 100.0 + at, [Output(at, [number])], prompts=prompts)
        events.append(step)
        at += 1.0
    ended = Finished(number, at, 100.0 + at, reason, size, tokens, max_tokens=tokens)
    ended.transfer = transfer
    return [*events, ended]


def tokenizer(number: int, tokens: int, **times: Any) -> SglangRequests:
    """Return a request of 8 prompt tokens, 3 of them cached, with what SGLang's tokenizer counts for it."""
    sent = {
        "sglang:num_requests_total": 1,
        "sglang:prompt_tokens_total": 8,
        "sglang:cached_tokens_total": 3,
        "sglang:generation_tokens_total": tokens,
    }
    ended = SglangRequest(number, 1e9, 10.0, 20.0, "length", **times)
    ended.prompt_tokens, ended.cached_tokens, ended.output_tokens = 8, 3, tokens
    ended.counted, ended.identity = True, Identity("a-1", join="/77")
    counters = [Family(name, "counter", [], [Sample([], count)]) for name, count in sent.items()]
    return SglangRequests(0, 1.0, 1, [ended], counters=counters)


class HandOvers:
    """Publishers of ``engines`` to an exporter; their gauges are there until they close."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._publishers: dict[str, Publisher] = {}
        self._rounds = 0

    def play(self) -> None:
        """Send what the engines do in ten seconds."""
        self._rounds += 1
        for info, items in engines(time.monotonic() + 10 * self._rounds):
            if info.id not in self._publishers:
                self._publishers[info.id] = Publisher(self._endpoint, f"{info.id}/core", [info])
            for item in items:
                self._publishers[info.id].push(item)

    def close(self) -> None:
        """Close the publishers; the exporter may run in the caller's thread."""
        for publisher in self._publishers.values():
            publisher.close(wait=False)


def engines(start: float) -> Iterator[tuple[EngineInfo, list[Item]]]:
    """Return a vLLM and an SGLang that compute prompts, and one of each that generates, with their items.

    Both engines of vLLM have the same labels, as where each is the only one of its server.
    """
    prompts = [
        event
        for number in (1, 2)
        for event in served(number, (9, 0, 0), 1, HANDED_OVER, name=f"{number}", start=start)
    ]
    # The second prompt is computed again.
    answers = [
        *served(1, (1, 0, 8), 3, RECEIVED, name="1", start=start, waited=1.0),
        *served(2, (9, 0, 0), 3, RECEIVED, name="2", start=start),
    ]
    for role, events in ((PREFILL, prompts), (DECODE, answers)):
        yield _vllm(role), _vllm_items(role, events, start)
        yield _sglang(role), _sglang_items(role, start)


def _vllm(role: str) -> EngineInfo:
    transfer = {"role": role, "connectors": "NixlConnector"}
    info = {"kv_transfer": transfer, "cache_config": {"block_size": "4"}}
    features = [ENGINE_CORE, REQUEST_EVENTS, "kv_transfer", "nixl"]
    labels = {"engine": "0", "model_name": "separate"}
    return EngineInfo(f"{role}/separate/0", "vllm", labels, info, features=features)


def _vllm_items(role: str, events: list[Event], start: float) -> list[Item]:
    held = {"requests": 1, "blocks": 3, "longest_seconds": 0.5} if role == PREFILL else {}
    gauges = [
        Family(f"sidestep_kv_held_{name}", "gauge", [], [Sample([], value)])
        for name, value in held.items()
    ]
    state = SchedulerStats(num_running_reqs=1, num_waiting_reqs=1, kv_cache_usage=0.5)
    moved = families(NIXL, "NixlConnector") if role == DECODE else []
    return [
        VllmStep(0, start, time.time(), state, None),
        RequestEvents(0, start, int(start * 1000), events),
        Samples(0, start, [*gauges, *moved]),
    ]


def _sglang(role: str) -> EngineInfo:
    labels = {"engine_type": role, "model_name": "separate"}
    return EngineInfo(f"{role}/separate/sglang", "sglang", labels, {"kv_transfer": {"role": role}})


def _sglang_items(role: str, start: float) -> list[Item]:
    one = QueueCount(1)
    state = SglangSchedulerStats(num_running_reqs=one, num_queue_reqs=one, token_usage=0.5)
    if role == PREFILL:
        state.num_prefill_inflight_queue_reqs = one
    else:
        state.num_decode_prealloc_queue_reqs = one
    histograms = {"sglang:kv_transfer_latency_ms": 20.0, "sglang:kv_transfer_total_mb": 1.5}
    counters = ("sglang:num_transfer_failed_reqs_total", "sglang:num_bootstrap_failed_reqs_total")
    return [
        SglangStats(0, start, time.time(), state),
        tokenizer(1, 1 if role == PREFILL else 4, queued=15.0, scheduled=16.0, first=17.0),
        Samples(
            0,
            start,
            [
                *(
                    Family(name, "histogram", [], [Sample([], observations=[value])])
                    for name, value in histograms.items()
                ),
                *(Family(name, "counter", [], [Sample([], 1)]) for name in counters),
                Family("sidestep_unfinished_prefill_tokens", "gauge", [], [Sample([], 8)]),
            ],
        ),
    ]
