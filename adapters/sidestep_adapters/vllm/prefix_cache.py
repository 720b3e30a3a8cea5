"""vLLM's prefix cache: whether its lookups can be sent, and its size; needs no vLLM itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sidestep_adapters.publisher.cache_lookups import LookupEvents

FULL_ATTENTION = "FullAttentionSpec"
"""vLLM's class of blocks that are found by their hash alone, and its subclasses."""


def lookup_events(
    scheduler: Any, sampling: Callable[[], tuple[bytes, float]]
) -> LookupEvents | None:
    """Return a maker of lookups' items; None if the cache is off or not of full attention only.

    Blocks of layers with a sliding window, or with a state, do not follow the rules of one LRU cache.

    Args:
        scheduler: vLLM's scheduler.
        sampling: See ``LookupEvents``.
    """
    cache = scheduler.kv_cache_config
    groups = cache.kv_cache_groups
    if not scheduler.vllm_config.cache_config.enable_prefix_caching or len(groups) != 1:
        return None
    (group,) = groups
    spec = group.kv_cache_spec
    if FULL_ATTENTION not in (cls.__name__ for cls in type(spec).__mro__):
        return None
    # With context parallelism a block has its tokens on each of the ranks, and one hash.
    size = getattr(scheduler, "hash_block_size", spec.block_size)
    # One block is never used: vLLM's null block.
    capacity = cache.num_blocks - 1
    return LookupEvents(size, capacity, spec.page_size_bytes * len(group.layer_names), sampling)
