"""Engine steps: their durations, intervals and contents."""

from __future__ import annotations

from sidestep.protocol.request_events import Iteration
from sidestep.tracking.requests.inflight import InFlight
from sidestep.tracking.requests.outcomes import IterationShape, Outcomes


class Steps:
    """The sequence of an engine's steps; steps without a batch are ignored.

    Attributes:
        last: The stamp of the latest step.
    """

    def __init__(self, last: float | None = None) -> None:
        self.last = last

    def add(self, event: Iteration, requests: InFlight, out: Outcomes) -> None:
        """Add a step to ``out``, with the state of its requests before the step's output."""
        batch, tokens = event.batch
        if not batch:
            return
        interval = out.between(self.last, event.stamp)
        self.last = event.stamp
        prefilling = requests.prefilling
        prefill = prefilling.intersection(batch) if prefilling else ()
        total = sum(tokens) if tokens else len(batch)
        prefilled = len(prefill)
        if tokens and prefill:
            pairs = zip(batch, tokens, strict=True)
            prefilled = sum(count for number, count in pairs if number in prefill)
        shape = IterationShape(
            duration=out.between(event.started, event.stamp),
            interval=interval,
            prefill_requests=len(prefill),
            prefill_tokens=prefilled,
            decode_requests=len(batch) - len(prefill),
            decode_tokens=total - prefilled,
            kv_tokens=event.kv_tokens,
            waiting_tokens=requests.waiting_tokens,
        )
        out.steps.append(shape)
