"""State of an engine's recent steps: cache lookups, and tokens of a step that is not complete."""

from __future__ import annotations

from collections import deque

from sidestep.metrics.engine_state import Part
from sidestep.protocol.engine_totals import TOTAL_LIMIT, Hits, Totals

PREFIX, EXTERNAL, MULTIMODAL = range(3)
"""Positions in ``RecentSteps.hit_windows``."""


class HitWindow:
    """Cache lookups of about the last 1,000 requests, the window of vLLM's own log.

    The newest entry always stays, even if it has more requests than that.
    """

    __slots__ = ("entries", "hits", "queries", "requests")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Remove all lookups."""
        self.entries: deque[tuple[int, int, int]] = deque()
        self.requests = self.queries = self.hits = 0

    def add(self, requests: int, queries: int, hits: int, *, limit: int = 1000) -> None:
        """Add the lookups of one step, and remove those beyond ``limit`` requests."""
        self.entries.append((requests, queries, hits))
        self.requests += requests
        self.queries += queries
        self.hits += hits
        while len(self.entries) > 1 and self.requests > limit:
            requests, queries, hits = self.entries.popleft()
            self.requests -= requests
            self.queries -= queries
            self.hits -= hits

    @property
    def rate(self) -> float | None:
        """The share of lookups that hit; None before the first request."""
        if not self.requests:
            return None
        return self.hits / self.queries if self.queries else 0.0


class RecentSteps(Part):
    """Recent steps of an engine.

    Attributes:
        held_tokens: Tokens of a step whose scheduler statistics have not arrived.
    """

    def __init__(self) -> None:
        self.hit_windows = HitWindow(), HitWindow(), HitWindow()
        self.held_tokens = 0

    def save(self, totals: Totals) -> None:
        """Write the lookups as one entry per window, each number limited to 62 bits."""
        totals.held_tokens = self.held_tokens
        totals.hits = [
            Hits(*(min(number, TOTAL_LIMIT) for number in (one.requests, one.queries, one.hits)))
            for one in self.hit_windows
        ]

    def add(self, totals: Totals) -> None:
        """Add what ``save`` has written."""
        self.held_tokens = min(self.held_tokens + totals.held_tokens, TOTAL_LIMIT)
        for window, hits in zip(self.hit_windows, totals.hits, strict=False):
            if hits.requests:
                window.add(hits.requests, hits.queries, hits.hits)
