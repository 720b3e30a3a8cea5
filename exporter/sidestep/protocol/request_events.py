"""Raw request events of a scheduler with their times; all intervals are computed in the exporter.

The sending process assigns the numbers of requests; only an ``Identity`` has users' ids. ``stamp`` is in
seconds of that process's monotonic clock, ``arrival`` and ``wall`` are Unix times of its host.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import COUNT_LIMIT, Count, Seconds, Text, Tokens

MAX_EVENTS = 512
"""Maximum events of one item; an iteration is one event, regardless of its batch size."""
MAX_BATCH = MAX_REQUESTS = 1 << 15
"""Maximum requests of one iteration, and mentions of requests in one item. Tracking this many new
requests blocks the event loop for 50 ms."""
MAX_REQUEST_LABELS = 16
MAX_CLIENTS = 256
"""Maximum API servers with output in one iteration."""

_API_PREFIX = re.compile(r"\A(?:chatcmpl|cmpl|embd|score|rerank|pool|resp)[-_]")

WAITING, PREEMPTED, RUNNING = range(3)
"""States of a request that is not finished."""

LIMITS = (
    "none",
    "slots",
    "tokens",
    "kv_blocks",
    "lora",
    "grammar",
    "kv_transfer",
    "encoder",
    "deferred",
    "paused",
)
"""Reasons why a step has not admitted the next waiting request; ``none``: no request waits."""


WHOLE, HANDED_OVER, RECEIVED = range(3)
"""Parts of a request that its engine does: all of it; its prompt only, whose KV goes to another engine;
or what follows a prompt that another engine computes."""


class Identity(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Identity of a request; sent only where the engine's administrator has allowed that.

    Attributes:
        id: The request's id as its client knows it, or its hash.
        prefix: Hash of the id's ``id_prefix``; empty where the id is sent itself.
        salt: The cache salt, or its hash; empty: none.
        trace: The W3C ``traceparent``; empty: none.
        labels: Labels that the client gave it, of those that the engine's administrator allows.
        join: Key that the engines share which compute a prompt and continue it, or its hash; empty: none.
    """

    id: Text = ""
    prefix: Text = ""
    salt: Text = ""
    trace: Text = ""
    priority: Annotated[int, Meta(ge=-COUNT_LIMIT, le=COUNT_LIMIT)] = 0
    labels: Annotated[dict[Text, Text], Meta(max_length=MAX_REQUEST_LABELS)] = {}
    join: Text = ""


def id_prefix(text: str) -> str:
    """Return the part of a request's id before its first hyphen, without the prefix of OpenAI's API."""
    return _API_PREFIX.sub("", text).partition("-")[0]


class Queued(msgspec.Struct, array_like=True, gc=False, tag=1):
    """The request entered the scheduler's queue.

    Attributes:
        group: Number that the parallel samples of one prompt share; 0 for a single request.
        sample: Index of this sample, from 0.
        identity: None where the sender does not say whose request it is.
        samples: Number of its prompt's parallel samples; 0: unknown.
        transfer: ``WHOLE``, ``HANDED_OVER`` or ``RECEIVED``.
    """

    request: Count
    stamp: Seconds
    arrival: Seconds = 0.0
    prompt_tokens: Count = 0
    adapter: Text = ""
    group: Count = 0
    sample: Count = 0
    identity: Identity | None = None
    max_tokens: Count | None = None
    samples: Count = 0
    transfer: Count = WHOLE


class Scheduled(msgspec.Struct, array_like=True, gc=False, tag=2):
    """The request joined the batch, for the first time or again.

    Attributes:
        asked: When it began to wait for KV from another engine, and ``loaded``, when it had it;
            0: it has not waited, or the sender does not know.
    """

    request: Count
    stamp: Seconds
    asked: Seconds = 0.0
    loaded: Seconds = 0.0


class Preempted(msgspec.Struct, array_like=True, gc=False, tag=3):
    """The request was preempted: it left the batch and lost its KV."""

    request: Count
    stamp: Seconds


class Prompt(msgspec.Struct, array_like=True, gc=False):
    """Origin of the KV of a request's prompt, in tokens; sent with its first output."""

    request: Count
    computed: Count = 0
    local: Count = 0
    external: Count = 0


class Output(msgspec.Struct, array_like=True, gc=False):
    """Output of one iteration for the requests of one API server.

    ``tokens`` is empty if every request got one token.
    """

    stamp: Seconds
    requests: Annotated[list[Count], Meta(max_length=MAX_BATCH)] = []
    tokens: Annotated[list[Tokens], Meta(max_length=MAX_BATCH)] = []


class Iteration(msgspec.Struct, array_like=True, gc=False, tag=4):
    """One step of the engine.

    Attributes:
        started: Start of scheduling.
        stamp: Time at which its output was ready.
        wall: Unix time of ``stamp``.
        scheduled: Requests of the batch; None if they are those with output, with as many tokens.
        tokens: Tokens scheduled for each request; empty if it is one each.
        kv_tokens: Tokens whose KV was computed before this step.
        prompts: Prompts of the requests with their first output.
        is_slice: Whether another API server has more output of the step.
        limit: Index into ``LIMITS``, which holds until the next step; None: the sender does not know.
    """

    started: Seconds
    stamp: Seconds
    wall: Seconds
    outputs: Annotated[list[Output], Meta(max_length=MAX_CLIENTS)] = []
    scheduled: Annotated[list[Count], Meta(max_length=MAX_BATCH)] | None = None
    tokens: Annotated[list[Count], Meta(max_length=MAX_BATCH)] = []
    kv_tokens: Count = 0
    prompts: Annotated[list[Prompt], Meta(max_length=MAX_BATCH)] = []
    is_slice: bool = False
    limit: Count | None = None

    @property
    def batch(self) -> tuple[list[int], list[int]]:
        """Requests of the batch and their scheduled tokens; no tokens if it is one each."""
        if self.scheduled is not None:
            return self.scheduled, self.tokens
        outputs = self.outputs
        tokens: list[int] = []
        if any(output.tokens for output in outputs):
            tokens = [n for o in outputs for n in o.tokens or [1] * len(o.requests)]
        return [number for output in outputs for number in output.requests], tokens

    @property
    def size(self) -> int:
        """Number of mentions of requests."""
        outputs = sum(len(output.requests) for output in self.outputs)
        return outputs + len(self.scheduled or ()) + len(self.prompts)

    @property
    def even(self) -> bool:
        """True if columns that belong together have equal lengths."""
        columns = [(output.requests, output.tokens) for output in self.outputs]
        columns.append((self.scheduled or [], self.tokens))
        return all(not tokens or len(tokens) == len(requests) for requests, tokens in columns)


class Finished(msgspec.Struct, array_like=True, gc=False, tag=5):
    """The request left the scheduler.

    Attributes:
        reason: Index into ``FINISH_REASONS``.
        stop_strings: Whether it has stop strings, which the front end detects.
        corrupted: Whether its logits contained a NaN.
        refused: Reason for which it was rejected before any work, or empty.
        cached_tokens: Cached prompt tokens as reported by another engine that computed the
            prompt; None: those of its ``Prompt``.
        transfer: As in ``Queued``.
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
    transfer: Count = WHOLE


class Alive(msgspec.Struct, array_like=True, gc=False, tag=6):
    """A request in the scheduler, sent to an exporter that missed its earlier events."""

    request: Count
    stamp: Seconds
    state: Count
    arrival: Seconds = 0.0
    prompt_tokens: Count = 0
    adapter: Text = ""
    identity: Identity | None = None
    max_tokens: Count | None = None
    transfer: Count = WHOLE


Event = Queued | Scheduled | Preempted | Iteration | Finished | Alive


class RequestEvents(msgspec.Struct, array_like=True, gc=False, tag="re"):
    """Events of one engine's requests until ``stamp``, in order; without events, only the time advances.

    Its core sends them, or each of its front ends those of its own requests.

    Attributes:
        source: Changes with the sending process, and after it has dropped events.
        known_until: Unix time before which all requests that reached the scheduler are in this item
            or an earlier one; 0: unknown.
        unseen: Requests that ended in the events which the process has dropped; the others go on.
            None: this is another process.
        process: Number of the sending process among ``processes``. The numbers of its requests,
            divided by ``processes``, have it as their remainder.
        processes: How many processes send events of the engine's requests.
    """

    engine: Count
    stamp: Seconds
    source: Count
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)] = []
    known_until: Seconds = 0.0
    unseen: Count | None = None
    process: Count = 0
    processes: Annotated[int, Meta(ge=1, le=MAX_CLIENTS)] = 1


ALL_KNOWN = 1e11
"""A ``known_until`` of a scheduler that has closed."""
