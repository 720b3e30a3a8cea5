"""The KV cache dashboard: usage, hit rates, lifetimes of blocks, and transfers between tiers."""

from __future__ import annotations

from tools.boards import reasons
from tools.boards.dashboard import TARGET, Dashboard, Row, Variable
from tools.boards.engine_health import engine_events
from tools.boards.panels import Query, Text
from tools.boards.queries import (
    ENGINE,
    ENGINE_NAME,
    PLACE_NAME,
    RANK,
    RANK_NAME,
    Histogram,
    Scope,
    mean,
    most,
    once,
    once_rate,
    rate,
    ratio,
    total,
)
from tools.boards.shapes import TOKENS, heat, lines, quantiles, tile

of = Scope("model_name", "engine")
sglang = Scope("model_name")
radix = Scope()

LIFETIME = Histogram(of, "vllm:kv_block_lifetime_seconds")
IDLE = Histogram(of, "vllm:kv_block_idle_before_evict_seconds")
REUSE = Histogram(of, "vllm:kv_block_reuse_gap_seconds")
CACHED = {
    "lifetime": Histogram(of, "sidestep_kv_cached_block_lifetime_seconds"),
    "idle": Histogram(of, "sidestep_kv_cached_block_idle_seconds"),
    "reuse": Histogram(of, "sidestep_kv_cached_block_reuse_gap_seconds"),
}
SHORTAGE = Histogram(of, "sidestep_kv_cached_shortage_blocks")


def saved_stores(blocks: str) -> str:
    """Return the share of the stores that a cache larger by ``blocks`` would have saved."""
    saved = SHORTAGE.observed_within(blocks)
    return ratio(f"({saved})", rate(of("sidestep_kv_cached_stores_total")))


def hit_rate(hits: str, queries: str, by: tuple[str, ...] | str = "") -> str:
    """Return the share of lookups that were hits."""
    return ratio(rate(of(hits), by), rate(of(queries), by))


SGLANG_HITS = ratio(
    once_rate(sglang("sglang:prefill_effective_tokens_total", mode="~.*_hit")),
    once_rate(sglang("sglang:prefill_effective_tokens_total")),
)

TILES = (
    tile(
        "KV cache usage, max",
        "Share of the KV cache in use, of the fullest engine.",
        reasons.ENGINES,
        Query(most(of("vllm:kv_cache_usage_perc")), "vLLM"),
        Query(most(sglang("sglang:token_usage")), "SGLang"),
        unit="percentunit",
        width=5,
        most=1,
        limits=(0.8, 0.95),
    ),
    tile(
        "Prefix-cache hit rate, now",
        "Share of prompt tokens that were found.",
        reasons.NO_TRAFFIC,
        Query(hit_rate("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "vLLM"),
        Query(SGLANG_HITS, "SGLang"),
        unit="percentunit",
        width=5,
        most=1,
    ),
    tile(
        "Preemptions",
        "Requests per second that were preempted because the KV cache was full.",
        reasons.ENGINES,
        Query(rate(of("vllm:num_preemptions_total")), "vLLM"),
        Query(once_rate(sglang("sglang:num_retracted_requests_total")), "SGLang"),
        unit="reqps",
        width=6,
    ),
    tile(
        "Block lifetime, p50",
        (
            "From a block's allocation until it was allocated again. When the cache thrashes, it "
            "falls to the time between two requests."
        ),
        reasons.KV_METRICS,
        LIFETIME.quantile(0.5),
        unit="s",
        width=4,
    ),
    tile(
        "Idle before eviction, p50",
        "From a block's last hit until it was allocated again: a later hit would have missed.",
        reasons.KV_METRICS,
        IDLE.quantile(0.5),
        unit="s",
        width=4,
    ),
)

USAGE = (
    lines(
        "KV cache usage",
        "Share of the KV cache in use. Cached blocks that no request uses count as free.",
        reasons.ENGINES,
        Query(most(of("vllm:kv_cache_usage_perc"), ENGINE), f"vLLM {ENGINE_NAME}"),
        Query(most(sglang("sglang:token_usage"), RANK), f"SGLang {RANK_NAME}"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Prefix-cache hit rate",
        (
            "Share of prompt tokens that were found in the engine's own cache and in a cache "
            "shared between engines, and of multimodal items."
        ),
        reasons.NO_TRAFFIC,
        Query(
            hit_rate("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", ENGINE),
            f"vLLM {ENGINE_NAME}",
        ),
        Query(
            hit_rate(
                "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"
            ),
            "vLLM, shared cache",
        ),
        Query(
            hit_rate("vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"),
            "vLLM, multimodal items",
        ),
        Query(SGLANG_HITS, "SGLang"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Preemptions",
        "Preempted requests per second; SGLang calls them retracted.",
        reasons.ENGINES,
        Query(rate(of("vllm:num_preemptions_total"), ENGINE), f"vLLM {ENGINE_NAME}"),
        Query(
            once_rate(sglang("sglang:num_retracted_requests_total"), RANK),
            f"SGLang {RANK_NAME}",
        ),
        unit="reqps",
    ),
    lines(
        "Cached tokens by tier",
        "Prompt tokens per second that were found in a cache, by tier.",
        reasons.ENGINES,
        Query(rate(of("vllm:prompt_tokens_cached_by_source_total"), "source"), "vLLM {{source}}"),
        Query(
            once_rate(sglang("sglang:prefill_effective_tokens_total", mode="~.*_hit"), "mode"),
            "SGLang {{mode}}",
        ),
        unit=TOKENS,
        stacked=True,
    ),
    lines(
        "Prefix-cache lookups after preemption",
        (
            "Tokens per second that preempted requests looked up in the prefix cache when they "
            "were scheduled again, and those found."
        ),
        reasons.VLLM,
        Query(rate(of("sidestep_prefix_cache_preempted_queries_total")), "looked up"),
        Query(rate(of("sidestep_prefix_cache_preempted_hits_total")), "found"),
        unit=TOKENS,
    ),
    lines(
        "Evicted tokens, SGLang",
        "Token slots freed by eviction, per second.",
        reasons.SGLANG,
        Query(
            rate(
                radix("sglang:evicted_tokens_total", tp_rank="0", pp_rank="0"),
                RANK,
            ),
            f"{PLACE_NAME} {{{{dp_rank}}}} {{{{origin}}}}",
        ),
        unit=TOKENS,
    ),
)

WHAT_TO_DO = Text(
    title="What to do",
    says="How to read block lifetimes, and what to decide.",
    text="""\
Compare *idle* (from a block's last hit to its eviction: for how long the cache remembers a prefix) with the *reuse gap* (between two
hits: after how long requests come back). *Lifetime* is from allocation to eviction. Blocks are observed when they are evicted;
a request that comes back later is a miss, and in no gap. More in docs/kv-residency.md.

| If | it means | do |
|---|---|---|
| requests are preempted | the cache is too small for the requests that run at once | first run fewer at once (`--max-num-seqs`, `--max-running-requests`), or add memory or engines |
| *idle* is minutes to hours, *reuse gaps* are far below it, the *hit rate* is high | the cache is larger than the traffic needs | nothing, or give its memory to longer contexts |
| the *hit ratio by cache size* rises from 1x to 2x or 4x | a larger cache finds what this one has evicted | buy, free or offload as much memory as the curve is worth |
| *idle* is about the pause between two turns of a conversation, *reuse gaps* come close to it | prefixes are evicted that would be used again | enlarge the cache (more KV memory, KV in 8 bits), or offload to host memory (`--kv-transfer-config`, `--enable-hierarchical-cache`) |
| *idle* is seconds, the *hit rate* is low on all replicas | each replica holds the same prefixes, and a conversation finds its own on one of them | route by prefix, then offload |
| there are no *reuse gaps*, the *hit rate* is low | prompts have no prefixes in common | look at the prompts: a date or an id at the beginning makes each unique |
""",
    height=10,
)

VLLM_HIT_RATE = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")

OTHER_SIZES = (
    lines(
        "Hit ratio by cache size",
        (
            "Share of the looked-up tokens that prefix caches of other sizes would find, in sizes of "
            "the present one, estimated from sampled blocks; and the measured share."
        ),
        reasons.LOOKUPS,
        Query(mean(of("sidestep_kv_whatif_hit_ratio"), "capacity"), "{{capacity}} the size"),
        Query(hit_rate(*VLLM_HIT_RATE), "found, vLLM"),
        Query(SGLANG_HITS, "found, SGLang"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Missed tokens by reason",
        (
            "Looked-up tokens per second that were not found. A larger cache finds some of those that "
            "were evicted, and none of the others."
        ),
        reasons.LOOKUPS,
        Query(rate(of("sidestep_kv_missed_tokens_total"), "reason"), "{{reason}}"),
        unit=TOKENS,
        stacked=True,
    ),
    lines(
        "Tokens that one more GiB saves",
        (
            "Prompt tokens per second that would not be computed with one more GiB of KV cache on each "
            "device of an engine."
        ),
        reasons.LOOKUPS,
        Query(
            f"{mean(of('sidestep_kv_whatif_hit_ratio_per_gib'), ENGINE)}"
            f" * {rate(of('vllm:prefix_cache_queries_total'), ENGINE)}",
            ENGINE_NAME,
        ),
        unit=TOKENS,
    ),
    lines(
        "Worth of routing by prefix",
        (
            "Share of the looked-up tokens that would be found if all engines of a model had one cache "
            "of the same total size, which is the most that routing by prefix can reach; and the "
            "measured share."
        ),
        reasons.SHARED_CACHE,
        Query(
            mean(of("sidestep_kv_whatif_shared_hit_ratio"), "model_name"), "shared {{model_name}}"
        ),
        Query(hit_rate(*VLLM_HIT_RATE, "model_name"), "found {{model_name}}"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Size that is enough",
        (
            "Blocks of the smallest prefix cache whose hit ratio is within one point of the best, and "
            "blocks that were used within the last half-life (--kv.curve-half-life)."
        ),
        reasons.LOOKUPS,
        Query(total(of("sidestep_kv_whatif_sufficient_blocks"), ENGINE), f"enough {ENGINE_NAME}"),
        Query(total(of("sidestep_kv_working_set_blocks"), ENGINE), f"used {ENGINE_NAME}"),
    ),
    heat(
        "Time since missed blocks were used",
        "Time from the last use of a block until it was looked up and had been evicted.",
        reasons.LOOKUPS,
        Histogram(of, "sidestep_kv_missed_block_idle_seconds"),
    ),
)

LIFETIMES = (
    WHAT_TO_DO,
    heat(
        "Block lifetime",
        "Lifetimes of sampled blocks: from allocation until the next allocation.",
        reasons.KV_METRICS,
        LIFETIME,
    ),
    heat(
        "Idle before eviction",
        "Time from the last hit of a sampled block until it was allocated again.",
        reasons.KV_METRICS,
        IDLE,
    ),
    heat(
        "Reuse gap",
        "Time between prefix hits on a sampled block; only its last few hits.",
        reasons.KV_METRICS,
        REUSE,
    ),
    lines(
        "Block lifetimes, p50",
        "Lifetime, idle time before eviction, and time between two hits.",
        reasons.KV_METRICS,
        Query(LIFETIME.quantile(0.5), "lifetime"),
        Query(IDLE.quantile(0.5), "idle"),
        Query(REUSE.quantile(0.5), "reuse gap"),
        unit="s",
    ),
    heat(
        "Hits of a block",
        "Prefix hits of sampled blocks during their lifetime.",
        reasons.TAP,
        Histogram(of, "sidestep_kv_block_reuses"),
        "short",
    ),
    heat(
        "Reuse gap, all hits",
        "Time between prefix hits on a sampled block.",
        reasons.TAP,
        Histogram(of, "sidestep_kv_block_reuse_gap_seconds"),
    ),
)

CACHE_EVENTS = (
    heat(
        "Lifetime in the prefix cache",
        "Time that sampled blocks were in the prefix cache, from the engine's KV events.",
        reasons.KV_EVENTS,
        CACHED["lifetime"],
    ),
    heat(
        "Idle in the prefix cache",
        "Time from the last store or hit of a sampled block until it left the prefix cache.",
        reasons.KV_EVENTS,
        CACHED["idle"],
    ),
    lines(
        "Cached block lifetimes, p50",
        "From the engine's KV events.",
        reasons.KV_EVENTS,
        Query(CACHED["lifetime"].quantile(0.5), "lifetime"),
        Query(CACHED["idle"].quantile(0.5), "idle"),
        Query(CACHED["reuse"].quantile(0.5), "reuse gap"),
        unit="s",
    ),
    lines(
        "Blocks stored and removed",
        "Per second, from the engine's KV events.",
        reasons.KV_EVENTS,
        Query(rate(of("sidestep_kv_cache_stored_blocks_total"), "medium"), "stored {{medium}}"),
        Query(rate(of("sidestep_kv_cache_removed_blocks_total"), "medium"), "removed {{medium}}"),
        unit="cps",
    ),
    lines(
        "Stores that a larger cache saves",
        (
            "Share of the blocks stored on the GPU that a prefix cache larger by so many blocks would "
            "still have had, from the engine's KV events."
        ),
        reasons.KV_EVENTS,
        Query(saved_stores("1000.0"), "1,000 blocks more"),
        Query(saved_stores("10000.0"), "10,000 blocks more"),
        Query(saved_stores("100000.0"), "100,000 blocks more"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Resident blocks",
        (
            "Blocks in the prefix cache. No line while the number is unknown because events are "
            "missing."
        ),
        reasons.KV_EVENTS,
        Query(
            total(of("sidestep_kv_cache_resident_blocks"), (*ENGINE, "medium")),
            f"{ENGINE_NAME} {{{{medium}}}}",
        ),
    ),
    lines(
        "Sampling",
        "Share of blocks whose lifetimes are tracked (--kv.sample-rate).",
        reasons.KV_METRICS,
        Query(most(of("sidestep_kv_sample_ratio"), ENGINE), f"allocated {ENGINE_NAME}"),
        Query(most(of("sidestep_kv_cached_sample_ratio"), ENGINE), f"cached {ENGINE_NAME}"),
        unit="percentunit",
        most=1,
    ),
    lines(
        "Rejected blocks",
        (
            "Sampled blocks per second that were not tracked because --kv.max-tracked was "
            "reached. Above 0, histograms of blocks are biased: lower --kv.sample-rate."
        ),
        reasons.KV_METRICS,
        Query(rate(of("sidestep_kv_refused_blocks_total"), ENGINE), f"allocated {ENGINE_NAME}"),
        Query(rate(of("sidestep_kv_cached_refused_blocks_total"), ENGINE), f"cached {ENGINE_NAME}"),
        unit="cps",
    ),
)

TIERS = (
    lines(
        "KV offload traffic",
        "Bytes per second between the GPU and the next tier.",
        reasons.OFFLOAD,
        Query(rate(of("vllm:kv_offload_store_bytes_total")), "stored"),
        Query(rate(of("vllm:kv_offload_load_bytes_total")), "loaded"),
        unit="Bps",
        width=6,
    ),
    lines(
        "Offload cache usage",
        "Share of the offload cache in host memory that is in use.",
        reasons.OFFLOAD,
        Query(most(of("vllm:kv_offload_cpu_cache_usage_perc"), ENGINE), ENGINE_NAME),
        unit="percentunit",
        most=1,
        width=6,
    ),
    quantiles(
        "KV transfers between engines",
        "Duration of NIXL transfers.",
        reasons.NIXL,
        Histogram(of, "vllm:nixl_xfer_time_seconds"),
        width=6,
    ),
    lines(
        "KV cache in host memory, SGLang",
        "Tokens in the KV cache in host memory, and its capacity.",
        reasons.HICACHE,
        Query(once(sglang("sglang:hicache_host_used_tokens")), "used"),
        Query(once(sglang("sglang:hicache_host_total_tokens")), "capacity"),
        width=6,
    ),
)

BOARD = Dashboard(
    file="kv-cache",
    title="KV cache and residency",
    annotations=engine_events(sglang),
    says="Usage of KV caches, hit rates, block lifetimes, and traffic between tiers.",
    tags=["llm", "kv-cache"],
    variables=[
        *TARGET,
        Variable(
            "model_name",
            "Model",
            Scope()(
                "vllm:num_requests_running",
                "sglang:num_running_reqs",
                "sidestep_kv_cached_sample_ratio",
            ),
        ),
        Variable(
            "engine",
            "Engine",
            sglang("vllm:num_requests_running", "sidestep_kv_cached_sample_ratio"),
        ),
    ],
    rows=[
        Row("Now", TILES),
        Row("Usage and hit rate", USAGE),
        Row("Other sizes of the prefix cache", OTHER_SIZES),
        Row("Block lifetimes", LIFETIMES),
        Row("Prefix cache, from the engine's KV events", CACHE_EVENTS, collapsed=True),
        Row("Other tiers and engines", TIERS, collapsed=True),
    ],
)
