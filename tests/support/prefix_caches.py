"""A prefix cache of blocks like vLLM's, and conversations that look up their blocks in it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

BLOCK_SIZE = 16


class Request(NamedTuple):
    """A request: hashes of its prompt's full blocks and of its output's, and its prompt's tokens."""

    prompt: list[bytes]
    output: list[bytes]
    tokens: int


class PrefixCache:
    """A cache that evicts the blocks of no running request, those that were released first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[bytes, int] = {}
        self._free: OrderedDict[bytes, None] = OrderedDict()
        self.tokens = self.found = 0

    def admit(self, request: Request) -> int:
        """Look up and hold the request's prompt; return the tokens that were found."""
        findable = request.prompt[: (request.tokens - 1) // BLOCK_SIZE]
        found = 0
        while found < len(findable) and self._has(findable[found]):
            found += 1
        for block in request.prompt:
            self._free.pop(block, None)
            self._held[block] = self._held.get(block, 0) + 1
        self._evict()
        self.tokens += request.tokens
        self.found += found * BLOCK_SIZE
        return found * BLOCK_SIZE

    def release(self, request: Request) -> None:
        """Release the request's blocks; those of its output are in the cache now."""
        for block in reversed([*request.prompt, *request.output]):
            left = self._held.pop(block, 0) - 1
            if left > 0:
                self._held[block] = left
            else:
                self._free.pop(block, None)
                self._free[block] = None
        self._evict()

    def clear(self) -> None:
        """Forget all blocks that no request holds."""
        self._free.clear()

    def _has(self, block: bytes) -> bool:
        return block in self._held or block in self._free

    def _evict(self) -> None:
        while self._free and len(self._held) + len(self._free) > self._capacity:
            self._free.popitem(last=False)


def conversations(count: int, seed: int, *, active: int = 150) -> Iterator[Request]:
    """Yield requests of conversations that share instructions; each turn repeats all before it."""
    random = Random(seed)
    instructions = [chain(random, [], random.randint(4, 40)) for _ in range(12)]
    weights = [1.0 / (rank + 1) for rank in range(active)]
    popular = [1.0 / (rank + 1) for rank in range(len(instructions))]
    talks: list[list[bytes]] = [[] for _ in range(active)]
    for _ in range(count):
        (index,) = random.choices(range(active), weights)
        if not talks[index] or len(talks[index]) > 150:
            talks[index] = random.choices(instructions, popular)[0]
        prompt = chain(random, talks[index], random.randint(0, 12))
        output = chain(random, prompt, random.randint(0, 4))[len(prompt) :]
        yield Request(prompt, output, len(prompt) * BLOCK_SIZE + random.randrange(BLOCK_SIZE))
        talks[index] = [*prompt, *output]


def chain(random: Random, before: Sequence[bytes], blocks: int) -> list[bytes]:
    """Return ``before`` and more blocks of new content; a hash includes those before it."""
    found = [*before]
    for _ in range(blocks):
        content = random.getrandbits(64).to_bytes(8, "big")
        found.append(hashlib.sha256((found[-1] if found else b"") + content).digest())
    return found
