"""What a snapshot holds: streams with their seqs, engines with their series, requests in flight.

It is consistent: nothing is applied between its first piece and its last. Sampled lives of KV
blocks are not in it; they start anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from sidestep import __version__
from sidestep.engine import ORIGIN, Engine
from sidestep.errors import WireError
from sidestep.intake import Intake
from sidestep.lifecycle import kept
from sidestep.lifecycle.kept import KeptGroup, KeptLifecycle, KeptRequests
from sidestep.lifecycle.siblings import Siblings
from sidestep.merge import restored
from sidestep.records import decode_record, encode_record, totals_of
from sidestep.registry import Registry
from sidestep.session.receiver import Stream
from sidestep.wire.messages import DECODE_ERRORS, EngineInfo, Heartbeat
from sidestep.wire.totals import TOTAL_LIMIT


class KeptStream(msgspec.Struct, array_like=True, gc=False, tag="s"):
    """A stream's delivery state."""

    id: str
    incarnation: int
    seq: int
    engines: list[EngineInfo]
    open: bool
    dropped: int
    errors: int
    folded: int
    beat: Heartbeat | None
    retired: list[int]
    mark: list[int] = []


class KeptEngine(msgspec.Struct, array_like=True, gc=False, tag="e"):
    """An engine; ``shown``: it was on the page; ``origin``: with that label."""

    shown: bool
    record: msgspec.Raw
    origin: bool = False


class KeptProcess(msgspec.Struct, array_like=True, gc=False, tag="p"):
    """The exporter's own counters, which go on like the engines'."""

    release: str
    items: int
    limited: dict[str, int]
    counters: list[tuple[str, tuple[str, ...], float]]


State = tuple[int, int]
Piece = KeptStream | KeptEngine | KeptProcess | KeptLifecycle | KeptRequests | KeptGroup
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)


class Capture:
    """Makes snapshots of an intake; what did not change since the last one is not made again.

    Attributes:
        saved: The state that the last snapshot held which is safe.
    """

    def __init__(self, intake: Intake) -> None:
        self.saved: State = (-1, -1)
        self._intake = intake
        self._taken: State = (-1, -1)
        self._marks: list[tuple[Stream, int]] = []
        self._known: dict[str, tuple[int, list[bytes]]] = {}
        """By engine: its version, and what was said of it then."""

    @property
    def state(self) -> State:
        """Grows with all that a snapshot would hold."""
        return self._intake.registry.version, self._intake.receiver.changes

    def safe(self) -> None:
        """The snapshot taken last outlives this process: senders may let go of what it holds."""
        self.saved = self._taken
        self._intake.receiver.saved(self._marks)

    def pieces(self) -> Iterator[bytes]:
        """A snapshot of now; nothing may be applied until its last piece is taken."""
        intake = self._intake
        registry = intake.registry
        self._taken, self._marks = self.state, intake.receiver.marks()
        for stream in intake.receiver.streams.values():
            yield _encoder.encode(_kept(stream))
        known, self._known = self._known, {}
        for engine in (*registry.engines.values(), *registry.kept.values()):
            version, pieces = known.get(engine.id, (-1, []))
            if version != engine.version:
                pieces = []
                for piece in self._of(engine):
                    pieces.append(piece)
                    yield piece
            else:
                yield from pieces
            self._known[engine.id] = engine.version, pieces
        groups = kept.keep_questions(registry.questions, _siblings(registry))
        yield from map(_encoder.encode, groups)
        counters = list(intake.metrics.counters())
        limited = {limit: min(count, TOTAL_LIMIT) for limit, count in registry.limited.items()}
        process = KeptProcess(__version__, intake.items, limited, counters)
        yield _encoder.encode(process)

    def _of(self, engine: Engine) -> Iterator[bytes]:
        shown = engine.id in self._intake.registry.engines
        record = msgspec.Raw(encode_record(engine, totals_of(engine)))
        yield _encoder.encode(KeptEngine(shown, record, ORIGIN in engine.labels))
        if engine.requests is not None:
            yield from map(_encoder.encode, kept.keep(engine.id, engine.requests))


def restore(intake: Intake, pieces: Iterable[bytes], now: float) -> None:
    """Go on where the exporter was that made ``pieces``.

    Raises:
        WireError: They cannot be understood; nothing of them is there.
    """
    try:
        _restore(intake, [_decoder.decode(piece) for piece in pieces], now)
    except (*DECODE_ERRORS, WireError, LookupError, ValueError) as error:
        intake.registry.clear()
        raise WireError("unreadable", str(error)) from None


def _restore(intake: Intake, pieces: Sequence[Piece], now: float) -> None:
    registry = intake.registry
    streams: list[Stream] = []
    groups: list[KeptGroup] = []
    for piece in pieces:
        match piece:
            case KeptEngine():
                engine = restored(registry, decode_record(piece.record))
                engine.heard = now
                if piece.origin:
                    # Whom it looked like may have gone: its series stay the same all the same.
                    engine.labels[ORIGIN] = engine.id
                if piece.shown:
                    registry.enter(engine)
                else:
                    registry.kept[engine.id] = engine
            case KeptLifecycle():
                kept.restore(registry.requests_of(registry.engines[piece.engine]), piece)
            case KeptRequests():
                lifecycle = registry.requests_of(registry.engines[piece.engine])
                kept.restore_requests(lifecycle, piece)
            case KeptGroup():
                groups.append(piece)
            case KeptStream():
                streams.append(_stream(piece))
            case KeptProcess():
                intake.items = piece.items
                registry.limited.update(piece.limited)
                intake.metrics.restore(piece.counters)
    _settle(registry, groups)
    # The last: an engine's gauges are hidden until one of its streams greets.
    intake.restore(streams, now)


def _settle(registry: Registry, groups: Sequence[KeptGroup]) -> None:
    following = {e.id: e.requests for e in registry.engines.values() if e.requests is not None}
    for lifecycle in following.values():
        kept.settle(lifecycle)
    kept.restore_questions(registry.questions, groups, following)


def _siblings(registry: Registry) -> dict[str, Siblings]:
    """By engine, where its requests are followed."""
    return {
        engine.id: engine.requests.siblings
        for engine in registry.engines.values()
        if engine.requests is not None
    }


def _kept(stream: Stream) -> KeptStream:
    return KeptStream(
        stream.id,
        stream.incarnation,
        stream.seq,
        stream.engines,
        stream.open,
        stream.dropped,
        stream.errors,
        stream.folded,
        stream.beat,
        stream.retired,
        stream.mark,
    )


def _stream(piece: KeptStream) -> Stream:
    stream = Stream(piece.id, piece.incarnation, b"", piece.engines, piece.seq)
    stream.open, stream.beat, stream.retired = piece.open, piece.beat, piece.retired
    stream.dropped, stream.errors, stream.folded = piece.dropped, piece.errors, piece.folded
    stream.mark = piece.mark
    return stream
