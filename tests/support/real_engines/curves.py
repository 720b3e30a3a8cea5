"""Curves of prefix caches: the hit ratio that one run has predicted for other sizes, and those of their runs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from real_engines.comparison import (
    Page,
    assert_nothing_refused,
    parse,
    report,
    settled_alone,
    value,
)
from real_engines.conversations import ask_in_turns, conversations
from real_engines.load import Client
from real_engines.processes import ExporterProcess, Server
from sidestep.metrics.hit_ratio_curves import INTERVAL
from sidestep.tracking.kv_blocks.lookups import REASONS

SIZES = (0.5, 1.0, 2.0, 4.0)
HIT_RATIO = "sidestep_kv_whatif_hit_ratio"
MISSED = "sidestep_kv_missed_tokens"


@dataclasses.dataclass(frozen=True)
class Cache:
    """An engine's own counters of tokens that were looked up and found."""

    looked_up: str
    found: str

    def missing(self, page: Page) -> float:
        """Return the tokens that were not found."""
        return value(page, self.looked_up) - value(page, self.found)

    def hit_ratio(self, page: Page) -> float:
        """Return the share of tokens that were found."""
        return value(page, self.found) / value(page, self.looked_up)

    async def settled(self, server: Server, exporter: ExporterProcess) -> Page:
        """Return the exporter's page once it has all lookups of the engine's own."""
        queries = value(parse(await server.page()), self.looked_up)
        return await settled_alone(exporter, lambda page: value(page, self.looked_up) == queries)

    async def serve(self, server: Server, exporter: ExporterProcess, requests: int) -> Page:
        """Ask for conversations; return the exporter's page, with gauges of after their end."""
        async with Client(server.base) as client:
            answers = await ask_in_turns(client, conversations(requests, 7))
        await self.settled(server, exporter)
        # The gauges are those of the last update.
        await asyncio.sleep(INTERVAL + 1.0)
        page = await self.settled(server, exporter)
        report("served", page, answers)
        return page

    def check(self, pages: Mapping[float, Page], within: float) -> None:
        """Assert that each size has the hit ratio that the run of size 1 has predicted for it."""
        page = pages[1.0]
        measured = {size: self.hit_ratio(found) for size, found in pages.items()}
        predicted = {size: value(page, HIT_RATIO, capacity=f"{size:g}x") for size in pages}
        missed = missed_tokens(page)
        for name, ratios in (("predicted", predicted), ("measured", measured)):
            report(name, page, [], **{f"{size:g}x": ratio for size, ratio in ratios.items()})

        assert_nothing_refused(page)
        assert all(abs(predicted[size] - measured[size]) <= within for size in pages)
        assert measured[max(pages)] - measured[min(pages)] > 5 * within
        assert abs(sum(missed.values()) - self.missing(page)) < 0.1 * self.missing(page)
        assert missed["unknown"] == missed["cleared"] == missed["not_cacheable"] == 0.0


def missed_tokens(page: Page) -> dict[str, float]:
    """Return the missed tokens by reason."""
    return {reason: value(page, MISSED, reason=reason) for reason in REASONS}
