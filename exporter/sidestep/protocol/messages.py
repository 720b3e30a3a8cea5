"""Messages of the session protocol, one in each frame. ``sender`` and ``receiver`` have the rules."""

from __future__ import annotations

import re
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
    Schema,
    Seconds,
    Seq,
    Share,
    Text,
    is_printable,
    printable,
)
from sidestep.protocol.progress import Progress

Bounds = Annotated[list[Number], Meta(min_length=1, max_length=MAX_BOUNDS)]


ENGINE_CORE = "engine_core"
"""Feature of engines whose core sends raw events of requests, steps and blocks."""
REQUEST_EVENTS = "request_events"
"""Feature of engines whose front ends, or else their core, send raw events of requests."""
FRONT_END_STATS = "front_end_stats"
"""Feature in the Hello of an engine's core that sends its statistics to front ends as well."""
CORE, FRONT_END = "core", "front_end"
"""Roles of a stream's process in an engine that several processes run."""
CORE_INFO = "core:"
KV_SAMPLING = "kv_sampling"
"""Info key that is not a metric: the ``rate`` at which the engine itself samples KV blocks."""
VERSIONS = "versions"
"""Info key that is not a metric: the releases of the engine and of sidestep, by package."""
MAX_SHOWN = 80
"""Maximum characters of a refused text in a log line."""
LIMITS = "limits"
"""Info key that is not a metric: the ``max_running_requests`` that fit into the engine's batch, and the
``max_step_tokens`` that one of its steps computes."""
MISSING_FIELDS = "missing_fields"
"""Info key that is not a metric: paths of fields that the engine's release lacks, with ``__`` for a dot.
The value is ``MISSING`` for a field that the release should have, and ``ABSENT`` for one that it cannot have."""
MISSING, ABSENT = "missing", "absent"
KV_TRANSFER = "kv_transfer"
"""Info key that is not a metric: the engine's ``role`` where prefill and decode are separate, and its
``connectors``, which transfer KV between engines, joined by commas."""
PREFILL, DECODE, BOTH = "prefill", "decode", "both"
"""Roles of an engine: it computes prompts for others, generates from their KV, or does both by itself."""


class EngineInfo(msgspec.Struct, array_like=True, gc=False):
    """One engine that a stream feeds.

    Attributes:
        id: Identity, stable over restarts and streams: namespace, model, rank.
        dialect: Catalogue that its items belong to, such as ``vllm``.
        info: Labels of info metrics by short name, such as ``cache_config``. A name that
            begins with ``core:`` comes from the engine's core; the front end's info of the
            same name takes precedence.
        bounds: Bucket bounds by bucket family where they differ from the default; or by the name of a
            family that Samples items feed.
        features: Enabled options; families that need one are exposed at once.
        closed: Label values known in advance, by label name, such as the positions of a
            draft; their series start at 0.
        role: Role of the stream's process. ``CORE``: it schedules the requests, and without it the
            engine is down. ``FRONT_END``: it receives them, and the core has a stream of its own.
            Empty: unknown.
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
    role: Text = ""


class Hello(msgspec.Struct, array_like=True, gc=False, tag="H"):
    """First message of a connection; ``first`` is the lowest seq that the sender still holds.

    Attributes:
        server: Key that all processes of one run of a server have, and no other; empty: unknown.
        process: The sending process, for people.
    """

    version: int
    stream: Identifier
    incarnation: Random64
    nonce: Random64
    first: Seq
    engines: Annotated[list[EngineInfo], Meta(max_length=MAX_ENGINES_PER_STREAM)]
    server: Text = ""
    process: Text = ""


class _Sender(msgspec.Struct, array_like=True, gc=False, tag="H"):
    """The first fields of a Hello."""

    version: int
    stream: str


class Batch(msgspec.Struct, array_like=True, gc=False, tag="B"):
    """Items with the seqs ``first``, ``first + 1``, ... Items are decoded one by one, later."""

    incarnation: Random64
    first: Seq
    items: Annotated[list[msgspec.Raw], Meta(max_length=MAX_BATCH_ITEMS)]

    @property
    def last(self) -> int:
        """Highest seq of the items; ``first - 1`` if there are none."""
        return self.first + len(self.items) - 1


class Aggregate(msgspec.Struct, array_like=True, gc=False, tag="G"):
    """Sum of the items ``first`` to ``last``, which were folded because the ring was full.

    ``totals`` (``engine_totals.EngineTotals``), one per engine of the stream, hold what the items add;
    each is decoded separately, later.
    """

    incarnation: Random64
    first: Seq
    last: Seq
    totals: Annotated[list[msgspec.Raw], Meta(max_length=MAX_ENGINES_PER_STREAM)]


class Heartbeat(msgspec.Struct, array_like=True, gc=False, tag="b"):
    """State of the sender, sent every second; all but ``head`` and ``ring_bytes`` are running totals.

    Attributes:
        head: Highest seq assigned.
        dropped: Items without a seq, because the queue was full or they could not be read.
        errors: Steps that could not be translated or encoded.
        folded: Items that were folded because the ring was full.
        progress: Progress of those of the stream's engines for which the sender measures it.
    """

    incarnation: Random64
    head: Seq
    ring_bytes: Count
    dropped: Count = 0
    errors: Count = 0
    folded: Count = 0
    progress: Annotated[list[Progress], Meta(max_length=MAX_ENGINES_PER_STREAM)] = []


class Bye(msgspec.Struct, array_like=True, gc=False, tag="X"):
    """Last message of a sender that closes; ``last`` is its highest seq."""

    incarnation: Random64
    last: Seq
    reason: Text = ""


class Objective(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A service level objective: observations of ``families`` of at most ``threshold`` seconds are good."""

    name: Text
    families: Annotated[list[FamilyName], Meta(max_length=16)]
    threshold: Seconds


class Settings(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Exporter settings that a sender needs, so that folded items fit the exporter's series.

    Attributes:
        buckets: Bounds by bucket family where the operator has set them.
        scheduled: See ``RequestSettings``, as for ``latency``, ``max_tracked``, ``max_age``.
        kv_scale: Whether an observation of a sampled block is scaled up by the sample rate.
        kv_max_tracked: Maximum sampled blocks tracked at once, per engine.
        schemas: Schemas of native histograms by bucket family where the operator has set them;
            None: no native histograms.
        lookup_key: Secret from which senders make the keys of blocks, so that engines that share a
            prefix send the same ones; empty: no lookups are wanted.
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
    lookup_key: Annotated[bytes, Meta(max_length=64)] = b""


class Ack(msgspec.Struct, array_like=True, gc=False, tag="A"):
    """Acknowledgement: ``applied`` moves the sender's window, ``durable`` frees its ring.

    Attributes:
        kv_sample_rate: Share of KV blocks whose lifetime the sender should track; ``None``:
            not specified.
        settings: Exporter settings; only in the reply to a Hello.
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
    """Rejection of a message; ``incarnation`` is 0 where it is unknown.

    ``code`` is need_hello, unauthorised, id_conflict, over_limit, bad_schema or version.
    """

    boot: Random64
    incarnation: Random64
    code: Identifier
    detail: Text = ""


FromSender = Hello | Batch | Aggregate | Heartbeat | Bye
FromExporter = Ack | Nack

_encoder = msgspec.msgpack.Encoder()
_from_sender: msgspec.msgpack.Decoder[FromSender] = msgspec.msgpack.Decoder(FromSender)
_sender = msgspec.msgpack.Decoder(_Sender)
_from_exporter: msgspec.msgpack.Decoder[FromExporter] = msgspec.msgpack.Decoder(FromExporter)

_ENGINE_FIELD = re.compile(
    rf"`\$\[6\]\[(\d+)\]\[([0-{len(EngineInfo.__struct_fields__) - 1}])\][^`]*`"
)
"""Path in msgspec's errors; the tag of a message is at 0. The errors also quote tags, which may be anything."""

# Undecodable UTF-8 and deep nesting escape msgspec's own error type
# (measured: invalid text in a str field, 100,000 nested arrays in a skipped one).
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError)


def encode(message: FromSender | FromExporter) -> bytes:
    """Encode ``message`` as a frame."""
    return _encoder.encode(message)


def decode_from_sender(frame: bytes | memoryview) -> FromSender:
    """Decode and check a frame from a sender.

    Raises:
        WireError: The frame is too large, malformed, or of another version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise WireError("too_big", f"frame of {len(frame)} bytes")
    try:
        message = _from_sender.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("bad_schema", _ENGINE_FIELD.sub(_named, str(error))) from None
    if isinstance(message, Hello):
        _check(message)
    return message


def _named(path: re.Match[str]) -> str:
    return f"{EngineInfo.__struct_fields__[int(path[2])]} of engine {path[1]}"


def sender_of(frame: bytes) -> str:
    """Return the name of the stream in a Hello that may be refused; empty for any other frame."""
    try:
        return _sender.decode(frame).stream
    except DECODE_ERRORS:
        return ""


def decode_from_exporter(frame: bytes | memoryview) -> FromExporter:
    """Decode a frame from an exporter; the texts of a Nack become printable."""
    try:
        message = _from_exporter.decode(frame)
    except DECODE_ERRORS as error:
        raise WireError("bad_schema", str(error)) from None
    if isinstance(message, Nack):
        # Both appear in the log, and may repeat what another peer sent.
        message.code, message.detail = printable(message.code), printable(message.detail)
    return message


def _check(hello: Hello) -> None:
    """Check what the field types cannot express.

    Raises:
        WireError: The version differs, a name is not printable, or bounds are not increasing.
    """
    if hello.version != VERSION:
        raise WireError("version", f"sender uses version {hello.version}, this exporter {VERSION}")
    check_printable(
        [
            ("the stream's name", hello.stream),
            ("the server's key", hello.server),
            ("the process' name", hello.process),
        ]
    )
    for engine in hello.engines:
        check_engine(engine)


def check_engine(engine: EngineInfo) -> None:
    """Check what the field types of one engine cannot express."""
    for family, bounds in engine.bounds.items():
        if bounds[0] < 0 or any(a >= b for a, b in pairwise(bounds)):
            found = f"{family}, {bounds[:8]}: must increase strictly, from 0 or more"
            raise WireError("bad_bounds", f"bounds of {found}")
    labels = [("label", engine.labels), *engine.info.items()]
    texts = [(f"{name} {key}", text) for name, found in labels for key, text in found.items()]
    texts += [
        (f"a value of {name}", text) for name, texts in engine.closed.items() for text in texts
    ]
    check_printable([("the engine's id", engine.id), *texts])


def check_printable(texts: Iterable[tuple[str, str]]) -> None:
    """Check that all ``texts``, each after the name of its field, are valid label values."""
    for field, text in texts:
        if not is_printable(text):
            shown = text[:MAX_SHOWN] + "..." * (len(text) > MAX_SHOWN)
            raise WireError("not_printable", f"{field} is {shown!r}")
