"""Items of the first engine, whose front end sends steps, with the counts that they add to the page."""

from __future__ import annotations

import dataclasses
from random import Random

from chaos.tally import BOUNDS, Tally
from sidestep.engines.items import Item
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats, SpecDecodingStats, VllmStep
from sidestep.protocol.iteration_stats import (
    FINISH_REASONS,
    FinishedRequestStats,
    IterationStats,
    PromptTokenStats,
)
from sidestep.protocol.self_described import Family, Sample, Samples

UNIT = 1 / 1024
"""Unit of every float, see ``tally``."""
STEPS = 251
SAMPLES = 53
FEWEST, MOST = 8, 256
"""Inter-token latencies of a step."""
ENGINE = 0
EPOCH = 1_700_000_000.0
WAIT = "vllm:chaos_wait_seconds"
ITEMS = "vllm:chaos_items_total"


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """An item without its stamps, the number of its latencies, and the counts that it adds."""

    item: Item
    latencies: int
    adds: Tally


def step(random: Random) -> Template:
    """Return a step of a batch of 8 to 256 requests; one in six has the largest."""
    tally = Tally()
    size = MOST if random.random() < 1 / 6 else random.randint(FEWEST, MOST)
    iteration = IterationStats(num_generation_tokens=size + random.randint(0, 3))
    iteration.inter_token_latencies_iter = [_some(random, 5, 200) for _ in range(size)]
    iteration.num_preempted_reqs = random.choice((0, 0, 0, 1, 2))
    iteration.time_to_first_tokens_iter = [_some(random, 20, 5000) for _ in range(size % 4)]
    _prompts(random, iteration, tally)
    iteration.finished_requests = [_finished(random, tally) for _ in range(random.randint(0, 3))]
    for request in iteration.finished_requests:
        tokens = request.num_generation_tokens or 0
        samples = random.choice((1, 1, 2))
        iteration.max_num_generation_tokens_iter.append(tokens)
        iteration.n_params_iter.append(samples)
        tally.observe("vllm:request_max_num_generation_tokens", "request_tokens", tokens)
        tally.observe("vllm:request_params_n", "request_params_n", samples)
    for name in ("vllm:generation_tokens_total", "sidestep_service_generation_tokens_total"):
        tally.count(name, iteration.num_generation_tokens)
    tally.count("vllm:num_preemptions_total", iteration.num_preempted_reqs)
    tally.observe(
        "vllm:inter_token_latency_seconds",
        "inter_token_latency",
        *iteration.inter_token_latencies_iter,
    )
    tally.observe(
        "vllm:time_to_first_token_seconds",
        "time_to_first_token",
        *iteration.time_to_first_tokens_iter,
    )
    mm_cache = CacheStats(requests=1, queries=1, hits=random.randint(0, 1))
    tally.count("vllm:mm_cache_queries_total", 1)
    tally.count("vllm:mm_cache_hits_total", mm_cache.hits)
    item = VllmStep(ENGINE, 0.0, 0.0, _scheduler(random, tally, size), iteration, mm_cache)
    return Template(item, size, tally)


def samples(random: Random) -> Template:
    """Return a counter and a histogram outside the catalogue, as a KV connector sends them."""
    tally = Tally()
    kind = random.choice(("load", "store"))
    waits = [_some(random, 1, 6000) for _ in range(random.randint(1, 20))]
    families = [
        Family(ITEMS, "counter", ["kind"], [Sample([kind], 1.0)], "Items of this kind."),
        Family(WAIT, "histogram", [], [Sample([], 0.0, waits)], "A wait.", _bounds()),
    ]
    tally.count(ITEMS, 1, ("kind", kind))
    tally.observe(WAIT, "chaos_wait", *waits)
    return Template(Samples(ENGINE, 0.0, families), 0, tally)


def stamped(template: Template, number: int) -> Item:
    """Return a new item with these stamps; items share their parts, since the publisher only reads them."""
    stamp = 1000.0 + number * UNIT
    item = template.item
    if isinstance(item, VllmStep):
        wall = EPOCH + number * UNIT
        return VllmStep(ENGINE, stamp, wall, item.scheduler, item.iteration, item.mm_cache)
    if isinstance(item, Samples):
        return Samples(ENGINE, stamp, item.families)
    raise TypeError(item)


def _scheduler(random: Random, tally: Tally, size: int) -> SchedulerStats:
    looked_up = random.randint(0, 4000)
    hits = random.randint(0, looked_up)
    drafted, accepted = random.randint(10, 20), random.randint(0, 10)
    tally.count("vllm:prefix_cache_queries_total", looked_up)
    tally.count("vllm:prefix_cache_hits_total", hits)
    if hits:
        tally.count("vllm:prompt_tokens_cached_by_source_total", hits, ("source", "device"))
    tally.count("vllm:spec_decode_num_drafts_total", 10)
    tally.count("vllm:spec_decode_num_draft_tokens_total", drafted)
    tally.count("vllm:spec_decode_num_accepted_tokens_total", accepted)
    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    tally.count(by_position, accepted, ("position", "0"))
    tally.count(by_position, accepted // 2, ("position", "1"))
    return SchedulerStats(
        num_running_reqs=size,
        num_waiting_reqs=random.randint(0, 30),
        kv_cache_usage=_some(random, 0, 1024),
        prefix_cache_stats=CacheStats(requests=1, queries=looked_up, hits=hits),
        spec_decoding_stats=SpecDecodingStats(
            2, 10, drafted, accepted, [accepted, accepted // 2], []
        ),
    )


def _prompts(random: Random, iteration: IterationStats, tally: Tally) -> None:
    computed, local, external = (random.randint(0, 900) for _ in range(3))
    cached, total = local + external, computed + local + external
    iteration.prompt_token_stats = PromptTokenStats(computed, local, external, cached, total)
    tally.count("vllm:prompt_tokens_total", total)
    tally.count("vllm:prompt_tokens_cached_total", cached)
    for source, tokens in (
        ("local_compute", computed),
        ("local_cache_hit", local),
        ("external_kv_transfer", external),
    ):
        tally.count("vllm:prompt_tokens_by_source_total", tokens, ("source", source))
    count_service_prompts(tally, computed, local, external)
    tally.observe(
        "vllm:iteration_tokens_total",
        "iteration_tokens",
        computed + iteration.num_generation_tokens,
    )


def count_service_prompts(tally: Tally, computed: int, local: int, external: int) -> None:
    """Count prompt tokens by the engine that computed them: ``external`` came from another one."""
    for source, tokens in (("computed", computed), ("cached", local)):
        tally.count("sidestep_service_prompt_tokens_total", tokens, ("source", source))
    tally.count(
        "sidestep_received_prompt_tokens_total", external, ("source", "external_kv_transfer")
    )


def _finished(random: Random, tally: Tally) -> FinishedRequestStats:
    reason = random.randrange(len(FINISH_REASONS))
    prompt, tokens = random.randint(10, 4000), random.randint(1, 2000)
    preemptions, most = random.choice((0, 0, 1, 7)), random.choice((None, 2048))
    cached = random.choice((None, 0, 8))
    e2e, queued, prefill, inference, decode = (_some(random, 1, 60_000) for _ in range(5))
    each = _some(random, 5, 200)
    tally.count("vllm:request_success_total", 1, ("finished_reason", FINISH_REASONS[reason]))
    tally.count("sidestep_service_requests_total", 1, ("reason", FINISH_REASONS[reason]))
    for name, family, value in (
        ("request_prompt_tokens", "request_tokens", prompt),
        ("request_generation_tokens", "request_tokens", tokens),
        ("request_params_max_tokens", "request_tokens", most),
        ("request_num_preemptions", "request_num_preemptions", preemptions),
        ("e2e_request_latency_seconds", "request_latency", e2e),
        ("request_queue_time_seconds", "request_latency", queued),
        ("request_prefill_time_seconds", "request_latency", prefill),
        ("request_inference_time_seconds", "request_latency", inference),
        ("request_decode_time_seconds", "request_latency", decode),
        ("request_time_per_output_token_seconds", "inter_token_latency", each),
        (
            "request_prefill_kv_computed_tokens",
            "request_tokens",
            None if cached is None else prompt - cached,
        ),
    ):
        if value is not None:
            tally.observe(f"vllm:{name}", family, value)
    return FinishedRequestStats(
        finish_reason=reason,
        e2e_latency=e2e,
        num_prompt_tokens=prompt,
        num_preemptions=preemptions,
        num_generation_tokens=tokens,
        max_tokens_param=most,
        queued_time=queued,
        prefill_time=prefill,
        inference_time=inference,
        decode_time=decode,
        mean_time_per_output_token=each,
        num_cached_tokens=cached,
    )


def _bounds() -> list[float]:
    return list(BOUNDS["chaos_wait"])


def _some(random: Random, least: int, most: int) -> float:
    return random.randint(least, most) * UNIT
