"""What a snapshot holds: streams with their seqs, engines with their series, requests in flight.

It is consistent: nothing is applied between its first piece and its last. Sampled lives of KV
blocks are not in it; they start anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from sidestep import __version__
from sidestep.errors import WireError
from sidestep.federation.computed_records import engines
from sidestep.federation.lives import LIFE_BITS, Word
from sidestep.federation.messages import Standing
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import ORIGIN, Engine
from sidestep.metrics.merge import restore_engine
from sidestep.metrics.record_codec import decode_record, encode_record, totals_of
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import DECODE_ERRORS, EngineInfo, Heartbeat
from sidestep.protocol.receiver import Stream
from sidestep.protocol.records import TOTAL_LIMIT
from sidestep.tracking.requests import inflight_state
from sidestep.tracking.requests.inflight_state import GroupState, RequestsState, TrackerState
from sidestep.tracking.requests.parallel_samples import EngineSamples


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


class KeptWord(msgspec.Struct, array_like=True, gc=False, tag="w"):
    """What another exporter said, and the engine here that shows it; see ``session.lives``.

    Attributes:
        summed: Lives that a sum has in it; of those in ``sources``, where they are of several.
        orders: Run and seq of the last word of each.
        key: That the source's name belongs to; None where none is asked for.
        heard: Unix time at which the source itself said so.
    """

    source: str
    engine: str
    life: int
    run: int
    seq: int
    record: bytes
    standing: Standing
    labels: dict[str, str]
    name: str
    shown: bool
    origin: bool
    summed: list[int] = []
    sources: list[str] = []
    until: int = 0
    key: str | None = None
    heard: float | None = None
    orders: list[tuple[int, int]] = []


class KeptProcess(msgspec.Struct, array_like=True, gc=False, tag="p"):
    """The exporter's own counters, which go on like the engines'."""

    release: str
    items: int
    limited: dict[str, int]
    counters: list[tuple[str, tuple[str, ...], float]]
    life: int = 0
    run: int = 0


State = tuple[int, int]
Piece = KeptStream | KeptEngine | KeptWord | KeptProcess | TrackerState | RequestsState | GroupState
Known = dict[str, tuple[int, list[bytes]]]
"""By engine: its version, and what was said of it then."""
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
        self._known: Known = {}
        self._safe: Known = {}

    @property
    def state(self) -> State:
        """Grows with all that a snapshot would hold."""
        return self._intake.registry.version, self._intake.receiver.changes

    @property
    def has_saved(self) -> bool:
        """Whether any snapshot of this process is safe."""
        return self.saved[0] >= 0

    def safe(self) -> None:
        """The snapshot taken last outlives this process: senders may let go of what it holds."""
        self.saved = self._taken
        self._safe = self._known
        self._intake.receiver.saved(self._marks)

    def version(self, engine: Engine) -> int | None:
        """Of ``engine`` in the last snapshot that is safe."""
        found = self._safe.get(engine.id)
        return None if found is None else found[0]

    def record(self, engine: Engine) -> bytes:
        """Of ``engine`` in the last snapshot that is safe, which has it."""
        piece = _decoder.decode(self._safe[engine.id][1][0])
        assert isinstance(piece, KeptEngine)
        return bytes(piece.record)

    def pieces(self) -> Iterator[bytes]:
        """A snapshot of now; nothing may be applied until its last piece is taken."""
        intake = self._intake
        registry = intake.registry
        self._taken, self._marks = self.state, intake.receiver.marks()
        for stream in intake.receiver.streams.values():
            yield _encoder.encode(_kept(stream))
        known, self._known = self._known, {}
        for engine in engines(registry):
            version, pieces = known.get(engine.id, (-1, []))
            if version != engine.version:
                pieces = []
                for piece in self._of(engine):
                    pieces.append(piece)
                    yield piece
            else:
                yield from pieces
            self._known[engine.id] = engine.version, pieces
        for word in intake.forwarded.lives:
            yield _encoder.encode(self._of_word(word))
        groups = inflight_state.capture_groups(registry.sample_groups, _siblings(registry))
        yield from map(_encoder.encode, groups)
        counters = list(intake.metrics.counters())
        limited = {limit: min(count, TOTAL_LIMIT) for limit, count in registry.limited.items()}
        process = KeptProcess(__version__, intake.items, limited, counters, intake.life, intake.run)
        yield _encoder.encode(process)

    def _of(self, engine: Engine) -> Iterator[bytes]:
        shown = engine.id in self._intake.registry.engines
        record = msgspec.Raw(encode_record(engine, totals_of(engine)))
        yield _encoder.encode(KeptEngine(shown, record, ORIGIN in engine.labels))
        if engine.requests is not None:
            yield from map(
                _encoder.encode, inflight_state.capture_tracker(engine.id, engine.requests)
            )

    def _of_word(self, word: Word) -> KeptWord:
        engine = self._intake.forwarded.engine_of(word)
        return KeptWord(
            *word.key,
            *word.order,
            word.record,
            word.standing,
            dict(word.labels),
            engine.id,
            engine.id in self._intake.registry.engines,
            ORIGIN in engine.labels,
            [life for _, life in word.summed],
            [source for source, _ in word.summed] if word.is_of_several else [],
            word.until,
            self._intake.guard.owner(word.source),
            self._intake.unix_of(word.heard),
            [*word.summed.values()],
        )


def restore(intake: Intake, pieces: Iterable[bytes], now: float) -> None:
    """Go on where the exporter was that made ``pieces``.

    Raises:
        WireError: They cannot be understood; nothing of them is there.
    """
    try:
        _restore(intake, [_decoder.decode(piece) for piece in pieces], now)
    except (*DECODE_ERRORS, WireError, LookupError, ValueError) as error:
        intake.registry.clear()
        intake.forwarded.clear()
        raise WireError("unreadable", str(error)) from None


def _restore(intake: Intake, pieces: Sequence[Piece], now: float) -> None:
    registry = intake.registry
    streams: list[Stream] = []
    groups: list[GroupState] = []
    life, run = intake.life, intake.run
    for piece in pieces:
        match piece:
            case KeptEngine():
                _restore_engine(registry, piece, now)
            case KeptWord():
                _restore_word(intake, piece, now)
            case TrackerState():
                inflight_state.restore_tracker(
                    registry.requests_of(registry.engines[piece.engine]), piece
                )
            case RequestsState():
                lifecycle = registry.requests_of(registry.engines[piece.engine])
                inflight_state.restore_requests(lifecycle, piece)
            case GroupState():
                groups.append(piece)
            case KeptStream():
                streams.append(_stream(piece))
            case KeptProcess():
                intake.items = piece.items
                registry.limited.update(piece.limited)
                intake.metrics.restore(piece.counters)
                if piece.life:
                    # Also after a process that went on with a later snapshot than this one.
                    life, run = piece.life, max(piece.run + 1, intake.life >> LIFE_BITS)
    with contextlib.suppress(WireError):
        intake.forwarded.restored(now)
    _settle(registry, groups)
    # The last: an engine's gauges are hidden until one of its streams greets.
    intake.restore(streams, now)
    intake.life, intake.run = life, run


def _restore_engine(registry: Registry, piece: KeptEngine, now: float) -> None:
    engine = restore_engine(registry, decode_record(piece.record))
    engine.seen_at = now
    if piece.origin:
        # Whom it looked like may have gone: its series stay the same all the same.
        engine.labels[ORIGIN] = engine.id
    if piece.shown:
        registry.expose(engine)
    else:
        registry.retired[engine.id] = engine


def _restore_word(intake: Intake, piece: KeptWord, now: float) -> None:
    order = piece.run, piece.seq
    sources = piece.sources or [piece.source] * len(piece.summed)
    orders = piece.orders or [(0, 0)] * len(piece.summed)
    word = Word(
        piece.source,
        piece.engine,
        piece.life,
        order,
        piece.record,
        piece.standing,
        piece.labels,
        # Which of a source's lives is over is told by when each was heard, also across a restart.
        now if piece.heard is None else intake.moment_of(piece.heard, now),
        silent=True,
        summed=dict(zip(zip(sources, piece.summed, strict=True), orders, strict=True)),
        until=piece.until,
        restored=now,
        arrived=now,
    )
    if piece.key is not None:
        intake.guard.own(piece.key, piece.source)
    # What cannot be shown any more must not cost all counters; whoever counts says it again.
    with contextlib.suppress(WireError):
        intake.forwarded.restore(word, piece.name, origin=piece.origin, shown=piece.shown)


def _settle(registry: Registry, groups: Sequence[GroupState]) -> None:
    following = {e.id: e.requests for e in registry.engines.values() if e.requests is not None}
    for lifecycle in following.values():
        inflight_state.sort_preempted(lifecycle)
    inflight_state.restore_groups(registry.sample_groups, groups, following)


def _siblings(registry: Registry) -> dict[str, EngineSamples]:
    """By engine, where its requests are followed."""
    return {
        engine.id: engine.requests.samples
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
