"""Matches of requests in SGLang's radix cache as lookups of blocks; needs no SGLang itself.

SGLang's cache is a tree of tokens, without blocks or hashes. The scheduler's loop appends references
to a request when it enters a batch and when it gives its memory back; the publisher thread hashes
the tokens.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections.abc import Sequence
from typing import Any

from sidestep.engines.items import Item
from sidestep.protocol.cache_lookups import AGAIN, COUNTED
from sidestep_adapters.publisher.cache_lookups import LookupEvents
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics, MetricSource

BLOCK_SIZE = 32
"""Tokens of a block, where SGLang's pages are smaller."""
HASH_BYTES = 16
PART = 128
"""Blocks that are hashed, in less than a millisecond, before the engine gets the interpreter again."""
BEGAN, RELEASED, CLEARED = range(3)
"""Weights of a recorded entry."""
_monotonic = time.monotonic


class LookupRecorder(MetricSource):
    """Recorder of the lookups of one scheduler.

    ``publisher`` returns the process's publisher, or None before it has started.
    """

    order = 0

    def __init__(self, deferred: DeferredMetrics, engine: int, publisher: Any) -> None:
        super().__init__(deferred, engine)
        self._publisher = publisher
        self._is_usable: bool | None = None
        self._running: dict[str, int] = {}
        self._last = self._dropped = 0
        self._events: LookupEvents | None = None
        self._hashes: dict[int, list[bytes]] = {}

    def began(self, batch: Any) -> None:
        """Record the requests that are new in a batch of prefills, on the scheduler's loop."""
        if self._is_usable is None:
            self._is_usable = _has_one_tree(batch.tree_cache)
        if not self._is_usable:
            return
        if self._events is None:
            self._events = self._make(batch)
        running = self._running
        for req in batch.reqs:
            # A session keeps the memory of its requests.
            if req.rid not in running and getattr(req, "session", None) is None:
                self._last = running[req.rid] = number = self._last + 1
                found = getattr(req, "cached_tokens_device", req.prefix_len)
                self.record(
                    number,
                    (req, _monotonic(), len(req.output_ids), found, req.retracted_stain),
                    BEGAN,
                )

    def released(self, req: Any) -> None:
        """Record that a request has given its memory back, on the scheduler's loop."""
        number = self._running.pop(getattr(req, "rid", ""), None)
        if number is not None:
            self.record(number, (req, _monotonic(), len(req.output_ids)), RELEASED)

    def cleared(self) -> None:
        """Record that the cache was emptied, on the scheduler's loop."""
        if self._events is not None:
            self._running.clear()
            self.record(0, _monotonic(), CLEARED)

    def add(self, key: Any, value: Any, weight: int) -> None:
        """Add a recorded entry, in the publisher thread."""
        events = self._events
        if events is None:
            return
        if weight == CLEARED:
            events.cleared(value)
            return
        req, stamp, output, *more = value
        if weight == BEGAN:
            found, is_retracted = more
            hashes: list[bytes] = []
            if events.is_on():
                self._hashes[key] = hashes
                self._hash(req, output, hashes)
            tokens = len(req.origin_input_ids) + output
            kind = AGAIN if is_retracted else COUNTED
            events.looked_up(key, stamp, hashes, tokens, found, kind=kind)
        elif key in self._hashes:
            hashes = self._hashes.pop(key)
            # The KV of the last token is never computed.
            self._hash(req, output - 1, hashes)
            events.released(key, stamp, hashes)

    def items(self, now: float) -> list[Item]:
        """Return the items of the lookups added since the previous call."""
        events = self._events
        if events is None:
            return []
        if self._deferred.dropped != self._dropped:
            self._dropped = self._deferred.dropped
            self._hashes.clear()
            events.restart()
        return [*events.items(now)]

    def _hash(self, req: Any, output: int, hashes: list[bytes]) -> None:
        """Append the hashes of the request's full blocks that are not in ``hashes`` yet."""
        assert self._events is not None
        size, prompt = self._events.block_size, req.origin_input_ids
        known, tokens = len(hashes) * size, array("q")
        for start in range(known, len(prompt), PART * size):
            if start > known:
                time.sleep(0)
            tokens.extend(array("q", prompt[start : start + PART * size]))
        tokens.extend(array("q", req.output_ids[max(known - len(prompt), 0) : max(output, 0)]))
        before = hashes[-1] if hashes else _namespace(req)
        for start in range(0, len(tokens) - size + 1, size):
            content = tokens[start : start + size].tobytes()
            before = hashlib.blake2b(before + content, digest_size=HASH_BYTES).digest()
            hashes.append(before)
            if not len(hashes) % PART:
                time.sleep(0)

    def _make(self, batch: Any) -> LookupEvents:
        page = int(batch.tree_cache.page_size)
        size = max(page, BLOCK_SIZE)
        pool = batch.token_to_kv_pool_allocator
        return LookupEvents(
            size,
            int(pool.size) // size,
            _bytes_of(pool) * size // max(int(pool.size), 1),
            self._sampling,
            engine=self._engine,
        )

    def _sampling(self) -> tuple[bytes, float]:
        publisher: Publisher | None = self._publisher()
        if publisher is None:
            return b"", 0.0
        return publisher.lookup_key, publisher.kv_sample_rate or 0.0


def _has_one_tree(tree: Any) -> bool:
    """Return whether requests are matched in one tree of tokens whose memory they share.

    Without a radix cache nothing is found; layers with a sliding window, or with a state instead of
    tokens, are evicted by rules of their own.
    """
    if getattr(tree, "disable", False) or not hasattr(tree, "page_size"):
        return False
    kinds = (getattr(tree, name, None) for name in ("supports_swa", "supports_mamba"))
    return "Chunk" not in type(tree).__name__ and not any(kind and kind() for kind in kinds)


def _bytes_of(pool: Any) -> int:
    """Return the bytes of the whole KV cache on this device; 0 where the release does not provide them."""
    try:
        sizes: Sequence[int] = pool.get_kvcache().get_kv_size_bytes()
        return int(sum(sizes))
    except (AttributeError, TypeError):
        return 0


def _namespace(req: Any) -> bytes:
    """Return what separates prefixes of equal tokens: adapter, cache salt and the client's own key."""
    names = ("lora_id", "extra_key", "cache_salt")
    return repr([getattr(req, name, None) for name in names]).encode()
