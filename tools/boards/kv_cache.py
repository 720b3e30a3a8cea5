"""KV caches: how full, what they find, how long blocks live, and what moves between tiers."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.panels import Query
from tools.boards.queries import Histogram, Scope, most, once, once_rate, rate, ratio, total
from tools.boards.shapes import heat, lines, quantiles, tile

of = Scope("model_name", "engine", "job", "instance")
sglang = Scope("model_name", "job", "instance")
radix = Scope("job", "instance")
EACH = ("instance", "engine")
NAME = "{{instance}} {{engine}}"
RANK = ("instance", "dp_rank")

LIFETIME = Histogram(of, "vllm:kv_block_lifetime_seconds")
IDLE = Histogram(of, "vllm:kv_block_idle_before_evict_seconds")
REUSE = Histogram(of, "vllm:kv_block_reuse_gap_seconds")
CACHED = {
    "lifetime": Histogram(of, "sidestep_kv_cached_block_lifetime_seconds"),
    "idle": Histogram(of, "sidestep_kv_cached_block_idle_seconds"),
    "reuse": Histogram(of, "sidestep_kv_cached_block_reuse_gap_seconds"),
}


def hit_rate(hits: str, queries: str, by: tuple[str, ...] | str = "") -> str:
    """Share of what was looked up."""
    return ratio(rate(of(hits), by), rate(of(queries), by))


SGLANG_HITS = ratio(
    once_rate(sglang("sglang:prefill_effective_tokens_total", mode="~.*_hit")),
    once_rate(sglang("sglang:prefill_effective_tokens_total")),
)

TILES = (
    tile(
        "Fullest cache",
        "Share of the KV cache in use, of the fullest engine.",
        reasons.ENGINES,
        Query(most(of("vllm:kv_cache_usage_perc")), "vLLM"),
        Query(most(sglang("sglang:token_usage")), "SGLang"),
        unit="percentunit",
        width=6,
        most=1,
        limits=(0.8, 0.95),
    ),
    tile(
        "Found in the prefix cache",
        "Share of prompt tokens that were found.",
        reasons.NO_TRAFFIC,
        Query(hit_rate("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "vLLM"),
        Query(SGLANG_HITS, "SGLang"),
        unit="percentunit",
        width=6,
        most=1,
    ),
    tile(
        "Preemptions",
        "Requests in a second that had to give up their place for want of memory.",
        reasons.ENGINES,
        Query(rate(of("vllm:num_preemptions_total")), "vLLM"),
        Query(once_rate(sglang("sglang:num_retracted_requests_total")), "SGLang"),
        unit="cps",
        width=6,
    ),
    tile(
        "Lifetime, median",
        "From a block's allocation until it was handed out again; it falls to the time between two requests when the cache thrashes.",
        reasons.KV_METRICS,
        LIFETIME.quantile(0.5),
        unit="s",
        width=3,
    ),
    tile(
        "Idle, median",
        "From a block's last hit until it was handed out again: what a hit may come late.",
        reasons.KV_METRICS,
        IDLE.quantile(0.5),
        unit="s",
        width=3,
    ),
)

USE = (
    lines(
        "Use",
        "Share of the KV cache in use; what is cached and not used counts as free.",
        reasons.ENGINES,
        Query(most(of("vllm:kv_cache_usage_perc"), EACH), NAME),
        Query(most(sglang("sglang:token_usage"), RANK), "{{instance}} {{dp_rank}}"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Prefix cache hits",
        "Share of prompt tokens found: in the engine's own cache, in one shared between engines, and of multimodal items.",
        reasons.NO_TRAFFIC,
        Query(
            hit_rate("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", EACH), NAME
        ),
        Query(
            hit_rate(
                "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"
            ),
            "shared",
        ),
        Query(hit_rate("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"), "multimodal"),
        Query(SGLANG_HITS, "SGLang"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Preemptions",
        "Requests in a second that gave up their place; SGLang says retracted.",
        reasons.ENGINES,
        Query(rate(of("vllm:num_preemptions_total"), EACH), NAME),
        Query(
            once_rate(sglang("sglang:num_retracted_requests_total"), RANK),
            "{{instance}} {{dp_rank}}",
        ),
        unit="cps",
    ),
    lines(
        "Cached tokens by tier",
        "Prompt tokens in a second found in a cache, by the tier that held them.",
        reasons.ENGINES,
        Query(rate(of("vllm:prompt_tokens_cached_by_source_total"), "source"), "vLLM {{source}}"),
        Query(
            once_rate(sglang("sglang:prefill_effective_tokens_total", mode="~.*_hit"), "mode"),
            "SGLang {{mode}}",
        ),
        unit="cps",
        stacked=True,
    ),
    lines(
        "Looked up again after a preemption",
        "Tokens in a second that preempted requests looked up when they came back, and those found.",
        reasons.VLLM,
        Query(rate(of("sidestep_prefix_cache_preempted_queries_total")), "looked up"),
        Query(rate(of("sidestep_prefix_cache_preempted_hits_total")), "found"),
        unit="cps",
    ),
    lines(
        "SGLang's evictions",
        "Token slots freed by eviction in a second.",
        reasons.SGLANG,
        Query(
            rate(radix("sglang:evicted_tokens_total", tp_rank="0", pp_rank="0"), RANK),
            "{{instance}} {{dp_rank}}",
        ),
        unit="cps",
    ),
)

LIFETIMES = (
    heat(
        "Lifetime",
        "How many sampled blocks lived how long, from allocation until handed out again.",
        reasons.KV_METRICS,
        LIFETIME,
    ),
    heat(
        "Idle before eviction",
        "How many sampled blocks were handed out how long after their last hit.",
        reasons.KV_METRICS,
        IDLE,
    ),
    heat(
        "Reuse gap",
        "How many prefix hits on a sampled block came how long after the one before, its last few only.",
        reasons.KV_METRICS,
        REUSE,
    ),
    lines(
        "Block lifetimes, median",
        "Lifetime, idle time before eviction, and time between two hits.",
        reasons.KV_METRICS,
        Query(LIFETIME.quantile(0.5), "lifetime"),
        Query(IDLE.quantile(0.5), "idle"),
        Query(REUSE.quantile(0.5), "reuse gap"),
        unit="s",
    ),
    heat(
        "Hits of a block",
        "How many prefix hits sampled blocks had in their life.",
        reasons.TAP,
        Histogram(of, "sidestep_kv_block_reuses"),
        "short",
    ),
    heat(
        "Every reuse gap",
        "How many prefix hits on a sampled block came how long after the one before, every one of them.",
        reasons.TAP,
        Histogram(of, "sidestep_kv_block_reuse_gap_seconds"),
    ),
)

CACHE_EVENTS = (
    heat(
        "Lifetime in the prefix cache",
        "How many sampled blocks were in the cache how long, by the engine's KV events.",
        reasons.KV_EVENTS,
        CACHED["lifetime"],
    ),
    heat(
        "Idle in the prefix cache",
        "How many sampled blocks left the cache how long after they were last stored or hit.",
        reasons.KV_EVENTS,
        CACHED["idle"],
    ),
    lines(
        "Cached block lifetimes, median",
        "By the engine's KV events.",
        reasons.KV_EVENTS,
        Query(CACHED["lifetime"].quantile(0.5), "lifetime"),
        Query(CACHED["idle"].quantile(0.5), "idle"),
        Query(CACHED["reuse"].quantile(0.5), "reuse gap"),
        unit="s",
    ),
    lines(
        "Blocks stored and removed",
        "In a second, by the engine's KV events.",
        reasons.KV_EVENTS,
        Query(rate(of("sidestep_kv_cache_stored_blocks_total"), "medium"), "stored {{medium}}"),
        Query(rate(of("sidestep_kv_cache_removed_blocks_total"), "medium"), "removed {{medium}}"),
        unit="cps",
    ),
    lines(
        "Resident blocks",
        "Blocks in the prefix cache; no line while events are missing that would tell.",
        reasons.KV_EVENTS,
        Query(
            total(of("sidestep_kv_cache_resident_blocks"), ("instance", "engine", "medium")),
            f"{NAME} {{{{medium}}}}",
        ),
    ),
    lines(
        "Sampling",
        "Share of blocks whose lifetimes are tracked (--kv.sample-rate).",
        reasons.KV_METRICS,
        Query(most(of("sidestep_kv_sample_ratio"), EACH), f"allocated {NAME}"),
        Query(most(of("sidestep_kv_cached_sample_ratio"), EACH), f"cached {NAME}"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Refused blocks",
        "Sampled blocks in a second that were not tracked because --kv.max-tracked was reached."
        " Histograms of blocks are biased while there are any: lower --kv.sample-rate.",
        reasons.KV_METRICS,
        Query(rate(of("sidestep_kv_refused_blocks_total"), EACH), f"allocated {NAME}"),
        Query(rate(of("sidestep_kv_cached_refused_blocks_total"), EACH), f"cached {NAME}"),
        unit="cps",
    ),
)

TIERS = (
    lines(
        "Offloaded and brought back",
        "Bytes in a second between the GPU and the tier below.",
        reasons.OFFLOAD,
        Query(rate(of("vllm:kv_offload_store_bytes_total")), "offloaded"),
        Query(rate(of("vllm:kv_offload_load_bytes_total")), "brought back"),
        unit="Bps",
        width=6,
    ),
    lines(
        "Offload cache in use",
        "Share of the cache in the host's memory.",
        reasons.OFFLOAD,
        Query(most(of("vllm:kv_offload_cpu_cache_usage_perc"), EACH), NAME),
        unit="percentunit",
        most=1,
        width=6,
    ),
    quantiles(
        "Transfers between engines",
        "How long NIXL took to move the blocks of one transfer.",
        reasons.NIXL,
        Histogram(of, "vllm:nixl_xfer_time_seconds"),
        width=6,
    ),
    lines(
        "SGLang's cache on the host",
        "Tokens in the host's KV cache, and its room.",
        reasons.HICACHE,
        Query(once(sglang("sglang:hicache_host_used_tokens")), "used"),
        Query(once(sglang("sglang:hicache_host_total_tokens")), "room"),
        width=6,
    ),
)

BOARD = Dashboard(
    file="kv-cache",
    title="KV cache and residency",
    says="How full KV caches are, what they find, how long blocks live, what moves between tiers.",
    tags=["llm", "kv-cache"],
    variables=[
        *TARGET,
        Variable(
            "model_name",
            "Model",
            '{__name__=~"vllm:num_requests_running|sglang:num_running_reqs|sidestep_kv_cached_sample_ratio",job=~"$job",instance=~"$instance"}',
        ),
        Variable(
            "engine",
            "Engine",
            '{__name__=~"vllm:num_requests_running|sidestep_kv_cached_sample_ratio",model_name=~"$model_name",job=~"$job",instance=~"$instance"}',
        ),
    ],
    rows=[
        Row("Now", TILES),
        Row("Use and hits", USE),
        Row("Block lifetimes", LIFETIMES),
        Row("The prefix cache, by the engine's KV events", CACHE_EVENTS),
        Row("Other tiers and engines", TIERS),
    ],
)
