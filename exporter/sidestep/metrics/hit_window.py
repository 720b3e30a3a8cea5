"""Cache hit rates over the recent past."""

from __future__ import annotations

from collections import deque


class HitWindow:
    """Cache lookups of about the last 1,000 requests, as the engine's log reports them.

    The newest entry stays even when it alone is larger.
    """

    __slots__ = ("entries", "hits", "queries", "requests")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all lookups."""
        self.entries: deque[tuple[int, int, int]] = deque()
        self.requests = self.queries = self.hits = 0

    def add(self, requests: int, queries: int, hits: int, *, limit: int = 1000) -> None:
        """Count the lookups of one step's ``requests``."""
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
        """Share of lookups that hit; None before the first request."""
        if not self.requests:
            return None
        return self.hits / self.queries if self.queries else 0.0
