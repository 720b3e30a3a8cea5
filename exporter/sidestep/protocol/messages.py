"""Envelopes: what one frame holds. The rules they serve live in ``session``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sidestep.errors import WireError
from sidestep.protocol.limits import (
    MAX_BATCH_ITEMS,
    MAX_BOUNDS,
    MAX_ENGINES_PER_STREAM,
    MAX_FRAME_BYTES,
    MAX_LABELS,
    VERSION,
    Count,
    FamilyName,
    Identifier,
    Labels,
    Number,
    Random64,
    Seconds,
    Seq,
    Share,
    Text,
    is_printable,
)
from sidestep.protocol.native_buckets import Schema

Bounds = Annotated[list[Number], Meta(min_length=1, max_length=MAX_BOUNDS)]


ENGINE_CORE = "engine_core"
"""Feature of engines whose core sends raw events of requests and blocks."""
CORE_INFO = "core:"
KV_SAMPLING = "kv_sampling"
"""Info that is no metric: at which ``rate`` the engine itself samples KV blocks."""


class EngineInfo(msgspec.Struct, array_like=True, gc=False):
    """One engine that a stream feeds.

    Attributes:
        id: Identity over restarts and over streams: namespace, model, rank.
        dialect: Which catalogue its items belong to, such as ``vllm``.
        labels: The labels every one of its series carries.
        info: Info metrics by short name, such as ``cache_config``: their labels. Where
            a name begins with ``core:`` it is the engine's core that says all of
            them, which yields to what a front end says.
        bounds: Bucket bounds by bucket family where they differ from the default.
        features: Options that are on; families that need one appear at once.
        closed: Label values known beforehand by label name, so that their
            series start at 0, such as the positions of a draft.
    """

    id: Identifier
    dialect: Identifier
    labels: Labels = {}
    info: Annotated[dict[Text, Labels], Meta(max_length=16)] = {}
    bounds: Annotated[dict[Text, Bounds], Meta(max_length=64)] = {}
    features: Annotated[list[Text], Meta(max_length=64)] = []
    closed: Annotated[
        dict[Text, Annotated[list[Text], Meta(max_length=MAX_LABELS)]], Meta(max_length=16)
    ] = {}


class Hello(msgspec.Struct, array_like=True, gc=False, tag="H"):
    """Opens a connection. ``first`` is the lowest seq the sender still holds."""

    version: int
    stream: Identifier
    incarnation: Random64
    nonce: Random64
    first: Seq
    engines: Annotated[list[EngineInfo], Meta(max_length=MAX_ENGINES_PER_STREAM)]


class Batch(msgspec.Struct, array_like=True, gc=False, tag="B"):
    """Items with the seqs ``first``, ``first + 1``, ... Items are decoded one by one, later."""

    incarnation: Random64
    first: Seq
    items: Annotated[list[msgspec.Raw], Meta(max_length=MAX_BATCH_ITEMS)]


class Aggregate(msgspec.Struct, array_like=True, gc=False, tag="G"):
    """What items that found the ring full came to; they are the seqs ``first`` to ``last``.

    ``records`` are of engines of the stream (``totals.Record``) and hold what the items
    add; each is decoded by itself, later.
    """

    incarnation: Random64
    first: Seq
    last: Seq
    records: Annotated[list[msgspec.Raw], Meta(max_length=MAX_ENGINES_PER_STREAM)]


class Heartbeat(msgspec.Struct, array_like=True, gc=False, tag="b"):
    """Every second: how the sender is. All but ``head`` and ``ring_bytes`` are running totals.

    Attributes:
        head: Highest seq assigned.
        dropped: Items that never got a seq because the queue was full, or could not be read.
        errors: Records that could not be translated or encoded.
        folded: Items that were folded because the ring was full.
    """

    incarnation: Random64
    head: Seq
    ring_bytes: Count
    dropped: Count = 0
    errors: Count = 0
    folded: Count = 0


class Bye(msgspec.Struct, array_like=True, gc=False, tag="X"):
    """The sender closes; ``last`` is its highest seq."""

    incarnation: Random64
    last: Seq
    reason: Text = ""


class Objective(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What an operator calls good: at most ``threshold`` seconds, of these families' observations."""

    name: Text
    families: Annotated[list[FamilyName], Meta(max_length=16)]
    threshold: Seconds


class Settings(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What a sender has to know so that what it folds fits the exporter's series.

    Attributes:
        buckets: Bounds by bucket family where the operator has set them.
        scheduled: See ``lifecycle.rules``, like ``latency``, ``max_tracked``, ``max_age``.
        kv_scale: Whether a sampled block counts for all that it stands for.
        kv_max_tracked: Sampled blocks followed at once, per engine.
        schemas: Of native histograms by bucket family, where the operator has set them; None:
            no native histograms are kept.
        objectives: What observations are held against.
    """

    buckets: Annotated[dict[Text, Bounds], Meta(max_length=64)] = {}
    scheduled: Literal["first", "last"] = "first"
    latency: Literal["output", "token"] = "output"
    max_tracked: Count = 100_000
    max_age: Seconds = 86_400.0
    kv_scale: bool = False
    kv_max_tracked: Count = 100_000
    schemas: Annotated[dict[Text, Schema], Meta(max_length=64)] | None = None
    objectives: Annotated[list[Objective], Meta(max_length=64)] = []


class Ack(msgspec.Struct, array_like=True, gc=False, tag="A"):
    """``applied`` moves the sender's window, ``durable`` frees its ring.

    Attributes:
        kv_sample_rate: Share of KV blocks whose life the sender is to follow; ``None``:
            the exporter says nothing about it.
        settings: With the answer to a Hello.
    """

    version: int
    boot: Random64
    incarnation: Random64
    nonce: Random64 | None
    applied: Seq
    durable: Seq
    kv_sample_rate: Share | None = None
    settings: Settings | None = None


class Nack(msgspec.Struct, array_like=True, gc=False, tag="N"):
    """A refusal; ``incarnation`` is 0 where unknown.

    Codes: need_hello, unauthorised, id_conflict, over_limit, bad_schema, version; to exporters
    that forward also ended_epoch: another process under the same name began later.
    """

    boot: Random64
    incarnation: Random64
    code: Identifier
    detail: Text = ""


FromSender = Hello | Batch | Aggregate | Heartbeat | Bye
FromExporter = Ack | Nack

_encoder = msgspec.msgpack.Encoder()
_from_sender: msgspec.msgpack.Decoder[FromSender] = msgspec.msgpack.Decoder(FromSender)
_from_exporter: msgspec.msgpack.Decoder[FromExporter] = msgspec.msgpack.Decoder(FromExporter)

# Undecodable UTF-8 and deep nesting escape msgspec's own error type
# (measured: invalid text in a str field, 100,000 nested arrays in a skipped one).
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)


def encode(message: FromSender | FromExporter) -> bytes:
    """The frame of ``message``."""
    return _encoder.encode(message)


def decode_from_sender(frame: bytes | memoryview) -> FromSender:
    """What a sender said.

    Raises:
        WireError: The frame is too large, malformed, or of another version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("too_big", f"frame of {len(frame)} bytes")
    try:
        message = _from_sender.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("bad_schema", str(error)) from None
    if isinstance(message, Hello):
        _check(message)
    return message


def decode_from_exporter(frame: bytes | memoryview) -> FromExporter:
    """What the exporter answered.

    Raises:
        WireError: The frame is no answer.
    """
    try:
        return _from_exporter.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("bad_schema", str(error)) from None


def _check(hello: Hello) -> None:
    """What field types cannot say.

    Raises:
        WireError: Another version, an unprintable name, bounds out of order.
    """
    if hello.version != VERSION:
        raise WireError("version", f"sender speaks {hello.version}, this exporter {VERSION}")
    check_printable([hello.stream])
    for engine in hello.engines:
        check_engine(engine)


def check_engine(engine: EngineInfo) -> None:
    """Likewise, of one engine.

    Raises:
        WireError: An unprintable name, bounds out of order.
    """
    texts = [engine.id, *engine.labels.values()]
    texts += [value for labels in engine.info.values() for value in labels.values()]
    texts += [value for values in engine.closed.values() for value in values]
    for family, bounds in engine.bounds.items():
        if bounds[0] < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise WireError("bad_bounds", f"{family} must increase strictly, from 0 or more")
    check_printable(texts)


def check_printable(texts: Iterable[str]) -> None:
    """Whether all may be label values.

    Raises:
        WireError: One may not.
    """
    if not all(map(is_printable, texts)):
        raise WireError("bad_label", "a name or label value is not printable")
