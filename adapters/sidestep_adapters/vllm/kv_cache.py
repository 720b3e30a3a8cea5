"""vLLM's KV cache: sampled events of its blocks, and whether its lookups can be sent; needs no vLLM itself."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from inspect import signature
from typing import Any

from sidestep.protocol.block_events import ALLOCATED, EVICTED, RESET, TOUCHED, BlockEvents
from sidestep.protocol.limits import MAX_OBSERVATIONS
from sidestep_adapters.publisher.cache_lookups import LookupEvents

FULL_ATTENTION = "FullAttentionSpec"
"""vLLM's class of blocks that are found by their hash alone, and its subclasses."""
_SPACE = 1 << 32
_monotonic = time.monotonic


class BlockTap:
    """Replaces vLLM's own metrics collector of one block pool, whose methods it has.

    Called inside the scheduler's step. It samples nothing until ``flush`` sets a rate; a block that is not
    sampled costs one integer comparison when it is allocated and a set lookup later.

    Args:
        push: ``Publisher.push``.
        replaced: A collector of the release's own class, which has what else the release reads of one.

    Attributes:
        resample: Set by another thread after events were dropped: sample other blocks.
    """

    # A copy that is being made has no attribute yet: __getattr__ would look for it without end.
    _replaced: Any = None

    def __init__(self, push: Callable[[BlockEvents], None], replaced: Any = None) -> None:
        self._replaced = replaced
        self._push = push
        self._source = secrets.randbits(40)
        self._sampled: set[int] = set()
        self.resample = False
        self._allocations = 0
        self._clear_events()
        self._set_rate(0.0)

    def __getattr__(self, name: str) -> Any:
        # A missing attribute would end the engine's core.
        return getattr(self._replaced, name)

    def on_block_allocated(self, block: Any) -> None:
        """Decide by block number and allocation count whether to sample an allocated block."""
        self._allocations = allocations = self._allocations + 1
        if hash((block.block_id, allocations)) % _SPACE < self._threshold:
            self._sampled.add(block.block_id)
            self._record(ALLOCATED, block.block_id)

    def on_block_accessed(self, block: Any) -> None:
        """Record that another request used the content of a sampled block."""
        if block.block_id in self._sampled:
            self._record(TOUCHED, block.block_id)

    def on_block_evicted(self, block: Any) -> None:
        """Record that a sampled block was allocated again or lost its content."""
        if block.block_id in self._sampled:
            self._sampled.discard(block.block_id)
            self._record(EVICTED, block.block_id)

    def reset(self) -> None:
        """Record that the whole cache was emptied."""
        self._sampled.clear()
        self._record(RESET, 0)

    def flush(self, rate: float) -> None:
        """Push the events since the previous flush, and sample at ``rate`` from now on."""
        kinds, blocks, stamps = self._kinds, self._blocks, self._stamps
        source, old = self._source, self._rate
        if self.resample:
            # Any sampled block may have ended among the dropped events: sample other blocks.
            self.resample = False
            self._source = secrets.randbits(40)
            self._sampled.clear()
        if rate != old:
            self._set_rate(rate)
        if not kinds:
            return
        self._clear_events()
        for start in range(0, len(kinds), MAX_OBSERVATIONS):
            part = slice(start, start + MAX_OBSERVATIONS)
            columns = (bytes(kinds[part]), blocks[part], stamps[part])
            self._push(BlockEvents(0, _monotonic(), source, old, *columns))

    def _clear_events(self) -> None:
        self._kinds = bytearray()
        self._blocks: list[int] = []
        self._stamps: list[float] = []

    def _set_rate(self, rate: float) -> None:
        self._rate = rate
        self._threshold = int(rate * _SPACE)

    def _record(self, kind: int, block: int) -> None:
        self._kinds.append(kind)
        self._blocks.append(block)
        self._stamps.append(_monotonic())


def unused_collector(module: Any) -> Any:
    """Return a collector of block pools as ``module`` has them, which receives no events.

    Raises:
        AttributeError: There is no such class.
        TypeError: ``BlockTap`` cannot replace one: its methods differ.
    """
    kind = module.KVCacheMetricsCollector
    for name in dir(kind):
        if name.startswith("on_") or name == "reset":
            theirs, ours = (getattr(each, name, lambda: None) for each in (kind, BlockTap))
            if [*signature(theirs).parameters] != [*signature(ours).parameters]:
                raise TypeError(f"this release's {name} differs")
    return kind()


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
