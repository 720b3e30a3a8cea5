"""Interference in a real vLLM: what ``interference`` predicts is what long prompts take from others."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from real_engines.comparison import Page, count, parse, settled_alone, total, value
from real_engines.load import Ask, Client
from real_engines.processes import ExporterProcess
from real_engines.sites import TAP, VllmSite

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TURNS = 3
"""Runs of each kind, by turns: other work on the machine slows both."""
DECODES, TOKENS = 6, 250
"""Requests whose inter-token latency is measured, and their output."""
LONG, AT_ONCE = 1900, 4
"""Tokens of a long prompt, and how many wait at one time: almost every step has a part of one."""
WITHIN = 0.1
E2E = "vllm:e2e_request_latency_seconds"
ITL, PARTS = "vllm:inter_token_latency_seconds", "sidestep_request_part_seconds"


class Times(NamedTuple):
    """Sums over the requests of some runs."""

    gaps: float = 0.0
    outputs: float = 0.0
    decode: float = 0.0
    interference: float = 0.0

    def plus(self, before: Page, after: Page) -> Times:
        """Return these times and those between two pages."""
        sums: Sequence[Callable[[Page], float]] = (
            lambda page: total(page, ITL),
            lambda page: count(page, ITL),
            lambda page: value(page, PARTS, part="decode"),
            lambda page: value(page, PARTS, part="interference"),
        )
        pairs = zip(self, sums, strict=True)
        return Times(*(known + read(after) - read(before) for known, read in pairs))

    @property
    def itl(self) -> float:
        """Mean inter-token latency."""
        return self.gaps / self.outputs

    @property
    def predicted(self) -> float:
        """Share of the time between outputs that is interference."""
        return self.interference / (self.interference + self.decode)


async def run(client: Client, exporter: ExporterProcess, *, long: bool) -> Page:
    """Run the measured requests, with ``long`` prompts beside them; return the page after it."""
    ended = value(parse(await exporter.page()), "vllm:request_success") + DECODES
    seeded = Client(client.base, seed=11)

    async def ask_long() -> int:
        asked = 0
        while long and not measured.done():
            await client.ask(Ask(client.text(LONG), 1))
            asked += 1
        return asked

    async with seeded:
        measured = asyncio.gather(
            *(seeded.ask(Ask(seeded.text(30), TOKENS)) for _ in range(DECODES))
        )
        ended += sum(await asyncio.gather(*(ask_long() for _ in range(AT_ONCE))))
        await measured
    # A request's parts are those of the core and of the front end, of which either may come first.
    return await settled_alone(
        exporter,
        lambda page: min(value(page, "vllm:request_success"), count(page, E2E)) >= ended,
    )


async def test_the_predicted_share_is_what_inter_token_latency_loses(vllm: VllmSite) -> None:
    """With the same requests, once with long prompts between them and once without."""
    server = vllm.server([*shlex.split("--max-num-batched-tokens 2048 --max-num-seqs 16"), *TAP])
    with_long, without = Times(), Times()
    async with vllm.with_exporter(server) as exporter, Client(server.base) as client:
        # The first steps of each kind take longer.
        page = await run(client, exporter, long=True)
        for turn in range(TURNS):
            after = await run(client, exporter, long=False)
            one, without = Times().plus(page, after), without.plus(page, after)
            page = await run(client, exporter, long=True)
            other, with_long = Times().plus(after, page), with_long.plus(after, page)
            print(  # noqa: T201
                f"\n{turn}: ITL {other.itl:.4f} s and {one.itl:.4f} s without,"
                f" lost {1 - one.itl / other.itl:.1%}, predicted {other.predicted:.1%}"
            )
    lost = 1 - without.itl / with_long.itl
    print(f"\nlost {lost:.1%}, predicted {with_long.predicted:.1%}")  # noqa: T201

    assert lost > 0.2
    assert with_long.predicted == pytest.approx(lost, rel=WITHIN)
