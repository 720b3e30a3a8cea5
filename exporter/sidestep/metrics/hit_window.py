"""Cache hit rates over a recent window."""

from __future__ import annotations

from collections import deque

PREFIX, EXTERNAL, MULTIMODAL = range(3)
"""Positions of an engine's windows in ``Engine.hit_windows``."""


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
