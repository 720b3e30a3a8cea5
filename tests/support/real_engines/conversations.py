"""Prompts of conversations that begin with shared instructions: a load for prefix caches."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Iterable, Iterator
from random import Random

from real_engines.load import Answer, Ask, Client

CLIENTS = 4
LONGEST = 1800
"""Characters of a prompt at most; each is a token of the tiny model."""


def conversations(count: int, seed: int, *, active: int = 120) -> Iterator[str]:
    """Yield ``count`` prompts of conversations of which ``active`` go on at the same time.

    Some conversations go on often and others rarely, so that reuse distances are spread widely. Each
    turn repeats the conversation so far. A tenth of the prompts are never seen again.
    """
    random = Random(seed)
    instructions = [_text(random, random.randint(150, 500)) for _ in range(10)]
    weights = [1.0 / (rank + 1) for rank in range(active)]
    popular = [1.0 / (rank + 1) for rank in range(len(instructions))]

    def begin() -> str:
        return random.choices(instructions, popular)[0] + _text(random, random.randint(20, 200))

    talks = [begin() for _ in range(active)]
    for _ in range(count):
        if random.random() < 0.1:
            yield _text(random, random.randint(100, 600))
            continue
        (index,) = random.choices(range(active), weights)
        yield talks[index]
        talks[index] += _text(random, random.randint(30, 160))
        if len(talks[index]) > LONGEST:
            talks[index] = begin()


async def ask_in_turns(client: Client, prompts: Iterable[str]) -> list[Answer]:
    """Request a short completion of each prompt, in order, four at a time."""
    left = iter(prompts)

    async def take() -> list[Answer]:
        return [await client.ask(Ask(prompt, 4, stream=False)) for prompt in left]

    several = await asyncio.gather(*(take() for _ in range(CLIENTS)))
    return [answer for answers in several for answer in answers]


def _text(random: Random, length: int) -> str:
    return "".join(random.choices(string.ascii_letters, k=length))
