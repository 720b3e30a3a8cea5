"""KV blocks that a request holds, times the time for which it holds them.

A request holds the blocks that its tokens fill as long as it is in the batch: those of its prompt until
its first output, and then evenly more. Blocks that it shares with other requests count for each of them.
"""

from __future__ import annotations

from sidestep.tracking.requests.inflight import Request

MICROS = 1_000_000
"""Whole numbers of microseconds are added, since sums of floats depend on their order."""


def join_batch(request: Request, now: float) -> None:
    """Note that the request holds its tokens' blocks from now on."""
    request.held_since = now
    request.held_tokens = request.prompt_tokens + request.tokens


def leave_batch(request: Request, now: float, block_size: int) -> int:
    """Return the blocks that the request has held times the microseconds, now that it holds none.

    Args:
        request: A request that may be in the batch.
        now: When it leaves the batch.
        block_size: Tokens of a block; 0: unknown, so that nothing counts.
    """
    since, request.held_since = request.held_since, None
    if since is None or not block_size or now <= since:
        return 0
    first = request.first
    grows = since if first is None or first < since else min(first, now)
    before = -(-request.held_tokens // block_size)
    after = -(-(request.prompt_tokens + request.tokens) // block_size)
    return round(((grows - since) * before + (now - grows) * (before + after) / 2) * MICROS)
