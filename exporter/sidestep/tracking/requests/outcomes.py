"""The outcomes of a batch of request events: counts and observations, as a front end makes them."""

from __future__ import annotations

import msgspec

from sidestep.protocol.iteration_stats import IterationStats


class AbortedRequest(msgspec.Struct, gc=False):
    """A request when it was aborted: its tokens, and the seconds since it was queued."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    seconds: float | None = None


class IterationShape(msgspec.Struct, gc=False):
    """One engine step.

    A request is in prefill from when it enters the batch until its next output, also after a
    preemption.

    Attributes:
        duration: Seconds from the start of its scheduling to its output.
        interval: Seconds since the output of the previous step; None for the first step.
        kv_tokens: Tokens whose KV was computed before, for the requests of the batch.
        waiting_tokens: Tokens of all waiting requests, including generated ones of preempted requests.
    """

    duration: float | None
    interval: float | None
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_tokens: int
    kv_tokens: int
    waiting_tokens: int


class Outcomes(msgspec.Struct):
    """Counts and observations; the catalogue's rows name the fields.

    Attributes:
        iteration: Statistics in the form of a front end's.
        iteration_tokens: Tokens computed, one number per step that had output.
        preempted_seconds: Seconds from a preemption until the request was scheduled again.
        refused: Rejected requests, by reason.
        untracked: Requests whose intervals cannot all be known, by reason.
        omitted: Intervals omitted because they would be negative.
        limited: Requests whose adapter became ``__other__``.
        first_outputs: Arrival and first output, in Unix time, of requests without parallel samples.
    """

    iteration: IterationStats
    aborted: list[AbortedRequest] = []
    steps: list[IterationShape] = []
    iteration_tokens: list[int] = []
    preempted_seconds: list[float] = []
    refused: dict[str, int] = {}
    untracked: dict[str, int] = {}
    omitted: int = 0
    limited: int = 0
    first_outputs: list[tuple[float, float]] = []

    def between(self, start: float | None, end: float | None) -> float | None:
        """Return the interval if both ends are known; count a negative one as omitted and return None."""
        if start is None or end is None:
            return None
        if end < start:
            self.omitted += 1
            return None
        return end - start
