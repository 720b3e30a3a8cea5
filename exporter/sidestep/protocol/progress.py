"""Progress of an engine, as one of its processes measures it; part of the heartbeat."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import Count, Seconds, Text

OVERDUE = 2.0
"""Seconds without progress from which a process sends it more often, with the stack of its thread."""
MAX_FRAMES = 48
"""Most frames of a stack."""
STARTING, ASLEEP, PAUSED = "starting", "asleep", "paused"
"""Conditions in which an engine makes no progress on purpose; empty: none of them."""


class Progress(msgspec.Struct, array_like=True, gc=False):
    """Progress of one engine. A step is a batch with tokens; ages are seconds.

    The age of a step counts from the end of the step before, if that is later than its own start. A
    front end sees no steps: it counts the engine's answers.

    Attributes:
        engine: Index of the engine in the stream's Hello.
        steps: Steps that have ended, of those that the process has seen.
        unfinished: Requests that the process has accepted and not finished.
        blocked: Of these, requests that wait for something else than the engine: more input, a
            grammar, or a transfer of KV blocks.
        step_age: Age of the oldest step that has not ended; None: no step is open. Of a front
            end, the time since the engine's last answer, while it owes one.
        step_tokens: Tokens scheduled in that step, 0 while it is being scheduled; of a front end,
            prompt tokens that it waits for.
        waiting_age: How long requests have waited without a step that began or ended; None:
            none are unfinished, or a step is open.
        output_age: How long requests have waited without any output, although more tokens than
            their prompts have were computed; None: they are not that late.
        longest: Seconds of the longest step that ended since the previous heartbeat; of a front
            end, between two answers.
        longest_tokens: Tokens scheduled in it; of a front end, of the prompts answered.
        condition: One of the conditions above.
        loop_age: How long the event loop of a front end has not run what it was asked to run; None:
            it does, or the process does not know.
        stack: Frames of the thread that runs the steps, the innermost last, as ``file:line
            function``; empty while there is progress.
    """

    engine: int
    steps: Count = 0
    unfinished: Count = 0
    blocked: Count = 0
    step_age: Seconds | None = None
    step_tokens: Count = 0
    waiting_age: Seconds | None = None
    output_age: Seconds | None = None
    longest: Seconds = 0.0
    longest_tokens: Count = 0
    condition: Text = ""
    stack: Annotated[list[Text], Meta(max_length=MAX_FRAMES)] = []
    loop_age: Seconds | None = None


def is_overdue(progress: Progress) -> bool:
    """Return whether the engine, or a front end's loop, owes progress for ``OVERDUE`` seconds."""
    ages = progress.step_age, progress.waiting_age, progress.output_age, progress.loop_age
    return any(age is not None and age >= OVERDUE for age in ages)
