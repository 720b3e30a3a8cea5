"""Raw request events: what a scheduler did and when, nothing computed.

Requests go by numbers that the sending process gives them, never by their ids:
those are the users'. ``stamp`` is that process's monotonic clock in seconds,
``arrival`` and ``wall`` are Unix times of its host.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import Count, Seconds, Text, Tokens

MAX_EVENTS = 512
"""Of one item; an iteration is one event whatever the size of its batch."""
MAX_BATCH = MAX_REQUESTS = 1 << 15
"""Requests of one iteration, and of all of one item, each as often as it is named: to
follow as many that are new takes 50 ms, in which nothing else is done."""
MAX_CLIENTS = 256
"""API servers whose requests one iteration had output for."""

WAITING, PREEMPTED, RUNNING = range(3)
"""States of a request that is not finished."""


class Queued(msgspec.Struct, array_like=True, gc=False, tag=1):
    """The request entered the scheduler's queue.

    Attributes:
        adapter: Its LoRA adapter, or empty.
        group: What the parallel samples of one question share; 0 for a lone request.
        sample: Its number among them, from 0.
    """

    request: Count
    stamp: Seconds
    arrival: Seconds = 0.0
    prompt_tokens: Count = 0
    adapter: Text = ""
    group: Count = 0
    sample: Count = 0


class Scheduled(msgspec.Struct, array_like=True, gc=False, tag=2):
    """The request joined the batch, for the first time or again."""

    request: Count
    stamp: Seconds


class Preempted(msgspec.Struct, array_like=True, gc=False, tag=3):
    """The request lost its place in the batch, and its KV."""

    request: Count
    stamp: Seconds


class Prompt(msgspec.Struct, array_like=True, gc=False):
    """Where the KV of a request's prompt came from, said with its first output, in tokens."""

    request: Count
    computed: Count = 0
    local: Count = 0
    external: Count = 0


class Output(msgspec.Struct, array_like=True, gc=False):
    """What one API server's requests got out of an iteration.

    ``tokens`` is empty where every request got one.
    """

    stamp: Seconds
    requests: Annotated[list[Count], Meta(max_length=MAX_BATCH)] = []
    tokens: Annotated[list[Tokens], Meta(max_length=MAX_BATCH)] = []


class Iteration(msgspec.Struct, array_like=True, gc=False, tag=4):
    """One step of the engine.

    Attributes:
        started: When its scheduling began.
        stamp: When its output was there.
        scheduled: Its batch; None where that is who got output, with as many tokens.
        tokens: Tokens scheduled for each of them; empty where it is one each.
        kv_tokens: Tokens whose KV the batch had computed before.
        prompts: Of the requests that had their first output.
    """

    started: Seconds
    stamp: Seconds
    wall: Seconds
    outputs: Annotated[list[Output], Meta(max_length=MAX_CLIENTS)] = []
    scheduled: Annotated[list[Count], Meta(max_length=MAX_BATCH)] | None = None
    tokens: Annotated[list[Count], Meta(max_length=MAX_BATCH)] = []
    kv_tokens: Count = 0
    prompts: Annotated[list[Prompt], Meta(max_length=MAX_BATCH)] = []

    @property
    def batch(self) -> tuple[list[int], list[int]]:
        """Who was in the batch, and with how many tokens; none where it is one each."""
        if self.scheduled is not None:
            return self.scheduled, self.tokens
        outputs = self.outputs
        tokens: list[int] = []
        if any(output.tokens for output in outputs):
            tokens = [n for o in outputs for n in o.tokens or [1] * len(o.requests)]
        return [number for output in outputs for number in output.requests], tokens

    @property
    def size(self) -> int:
        """How many requests it names, each as often as it does."""
        outputs = sum(len(output.requests) for output in self.outputs)
        return outputs + len(self.scheduled or ()) + len(self.prompts)

    @property
    def even(self) -> bool:
        """Whether columns that belong together are of one length."""
        columns = [(output.requests, output.tokens) for output in self.outputs]
        columns.append((self.scheduled or [], self.tokens))
        return all(not tokens or len(tokens) == len(requests) for requests, tokens in columns)


class Finished(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The request left the scheduler.

    Attributes:
        reason: Index into ``FINISH_REASONS``.
        stop_strings: It asked for stop strings, which the front end looks for.
        corrupted: Its logits held a NaN.
        refused: Why it was turned away without being worked on, or empty.
        cached_tokens: Prompt tokens cached, where not what its ``Prompt`` says is
            reported but what another engine, which computed the prompt, had cached.
    """

    request: Count
    stamp: Seconds
    wall: Seconds
    reason: Count
    prompt_tokens: Count = 0
    generation_tokens: Count = 0
    preemptions: Count = 0
    max_tokens: Count | None = None
    stop_strings: bool = False
    corrupted: bool = False
    refused: Text = ""
    cached_tokens: Count | None = None


class Alive(msgspec.Struct, array_like=True, gc=False, tag=6):
    """A request in the scheduler, said to an exporter that did not hear how it came there."""

    request: Count
    stamp: Seconds
    state: Count
    arrival: Seconds = 0.0
    prompt_tokens: Count = 0
    adapter: Text = ""


Event = Queued | Scheduled | Preempted | Iteration | Finished | Alive


class RequestEvents(msgspec.Struct, array_like=True, gc=False, tag="re"):
    """What one engine's scheduler did until ``stamp``, in order; none is a sign of time passing.

    ``source`` changes with the sending process.
    """

    engine: Count
    stamp: Seconds
    source: Count
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)] = []
