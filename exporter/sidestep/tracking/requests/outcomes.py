"""What a batch of request events comes to: the observations that an engine's front end makes."""

from __future__ import annotations

import msgspec

from sidestep.protocol.iteration_stats import IterationStats


class AbortedRequest(msgspec.Struct, gc=False):
    """What a request had consumed when it was aborted; ``seconds`` since it was queued."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    seconds: float | None = None


class IterationShape(msgspec.Struct, gc=False):
    """One engine step.

    A request is in prefill from when it joins the batch until its next output,
    after a preemption as for the first time.

    Attributes:
        duration: From the begin of its scheduling to its output, in seconds.
        interval: Since the output of the step before; None for the first.
        kv_tokens: Tokens whose KV the batch had computed before.
        waiting_tokens: Tokens of all waiting requests, generated ones of preempted included.
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
    """Counts and observations that follow from the events; the catalogue's rows name its fields.

    Attributes:
        iteration: In the form in which a front end records them.
        iteration_tokens: Tokens computed, one number a step that had output.
        preempted_seconds: From a preemption until the request was scheduled again.
        refused: Requests turned away, by reason.
        untracked: Requests whose intervals cannot all be known, by reason.
        omitted: Intervals left out because they would have been negative.
        limited: Requests whose adapter went to ``__other__``.
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

    def between(self, start: float | None, end: float | None) -> float | None:
        """The interval, if both ends are known; one that would be negative is omitted."""
        if start is None or end is None:
            return None
        if end < start:
            self.omitted += 1
            return None
        return end - start
