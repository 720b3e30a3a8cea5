"""Content of a snapshot: streams with their seqs, engines with their series, requests in flight.

A snapshot is consistent: nothing is applied between its first piece and its last. It does not
include sampled KV block lifetimes, whose tracking starts again after a restart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep import __version__
from sidestep.errors import WireError
from sidestep.federation.counted_engines import counted_engines
from sidestep.federation.federated_engine import FederatedEngine, SourceRecord
from sidestep.federation.messages import EPOCH_BITS
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import ORIGIN, Engine
from sidestep.metrics.merge import restore_engine
from sidestep.metrics.record_codec import decode_record, encode_record, totals_of
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import DECODE_ERRORS, EngineInfo, Heartbeat
from sidestep.protocol.records import TOTAL_LIMIT
from sidestep.protocol.stream import Stream, StreamState
from sidestep.requests.request_log import lose_output
from sidestep.tracking.requests import inflight_state
from sidestep.tracking.requests.inflight_state import GroupState, RequestsState, TrackerState
from sidestep.tracking.requests.parallel_samples import EngineSamples


class SavedStream(msgspec.Struct, array_like=True, gc=False, tag="s"):
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
    replica: int = 1
    server: str = ""
    process: str = ""
    retired_seqs: list[int] = []


class SavedEngine(msgspec.Struct, array_like=True, gc=False, tag="e"):
    """An engine.

    Attributes:
        is_exposed: Whether it was exposed; else it was retired.
        has_origin: Whether it had the label ``origin``.
    """

    is_exposed: bool
    record: msgspec.Raw
    has_origin: bool = False


class SavedFederatedEngine(msgspec.Struct, array_like=True, gc=False, tag="f"):
    """An engine that another exporter counts; see ``federation.federated_engine``.

    Attributes:
        name: Id of the engine in this exporter.
        is_exposed: Whether the engine was exposed; else it was retired.
        has_origin: Whether the engine had the label ``origin``.
        key: Key that owns the source's name; None where no key is required.
    """

    base: bytes
    records: Annotated[list[SourceRecord], Meta(min_length=1, max_length=2)]
    name: str
    is_exposed: bool
    has_origin: bool
    key: str | None = None


class ObsoleteEngines(msgspec.Struct, array_like=True, gc=False, tag="w"):
    """Engines of other exporters in the format of earlier releases; ignored."""


class SavedProcess(msgspec.Struct, array_like=True, gc=False, tag="p"):
    """The exporter's own counters, when they began, and its epoch as a source of records."""

    release: str
    items: int
    limited: dict[str, int]
    counters: list[tuple[str, tuple[str, ...], float]]
    epoch: int = 0
    run: int = 0
    created: float = 0.0


class SavedRecords(msgspec.Struct, array_like=True, gc=False, tag="q"):
    """Records of requests that an output is not done with yet, as lines."""

    lines: list[bytes]
    output: str = "file"


State = tuple[int, int, int]
SavedPart = (
    SavedStream | SavedEngine | SavedFederatedEngine | SavedRecords | ObsoleteEngines | SavedProcess
)
Piece = SavedPart | TrackerState | RequestsState | GroupState
EnginePieces = dict[str, tuple[int, list[bytes]]]
"""Version and encoded pieces of each engine, by identity."""
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)


class Capture:
    """Encoder of snapshots of an intake; unchanged engines are not encoded again.

    Attributes:
        saved: State in the last snapshot that was written.
    """

    def __init__(self, intake: Intake) -> None:
        self.saved: State = (-1, -1, -1)
        self._intake = intake
        self._taken: State = (-1, -1, -1)
        self._marks: list[tuple[Stream, int]] = []
        self._pieces: EnginePieces = {}
        self._saved_pieces: EnginePieces = {}

    @property
    def state(self) -> State:
        """Version of the state; it grows with every change that a snapshot would include."""
        records = self._intake.request_log
        taken = 0 if records is None else records.taken
        return self._intake.registry.version, self._intake.receiver.changes, taken

    @property
    def has_saved(self) -> bool:
        """True if this process has written a snapshot."""
        return self.saved[0] >= 0

    def mark_saved(self) -> None:
        """Mark the last snapshot as written: senders may free the frames that it includes."""
        self.saved = self._taken
        self._saved_pieces = self._pieces
        self._intake.receiver.mark_durable(self._marks)

    def version(self, engine: Engine) -> int | None:
        """Return the version of ``engine`` in the last written snapshot, or None."""
        found = self._saved_pieces.get(engine.id)
        return None if found is None else found[0]

    def record(self, engine: Engine) -> bytes:
        """Return the record of ``engine`` in the last written snapshot, which must include it."""
        piece = _decoder.decode(self._saved_pieces[engine.id][1][0])
        assert isinstance(piece, SavedEngine)
        return bytes(piece.record)

    def pieces(self) -> Iterator[bytes]:
        """Encode a snapshot; the caller must apply nothing until the last piece is read."""
        intake = self._intake
        registry = intake.registry
        self._taken, self._marks = self.state, intake.receiver.cursors()
        for stream in intake.receiver.streams.values():
            yield _encoder.encode(_saved_stream(stream))
        known, self._pieces = self._pieces, {}
        for engine in counted_engines(registry):
            version, pieces = known.get(engine.id, (-1, []))
            if version != engine.version:
                pieces = []
                for piece in self._engine_pieces(engine):
                    pieces.append(piece)
                    yield piece
            else:
                yield from pieces
            self._pieces[engine.id] = engine.version, pieces
        for federated in intake.federation:
            yield _encoder.encode(self._federated_piece(federated))
        groups = inflight_state.capture_groups(registry.sample_groups, _siblings(registry))
        yield from map(_encoder.encode, groups)
        if intake.request_log is not None:
            for queue in intake.request_log.queues:
                for lines in queue.chunks():
                    yield _encoder.encode(SavedRecords(lines, queue.output))
        counters = list(intake.metrics.counters())
        limited = {limit: min(count, TOTAL_LIMIT) for limit, count in registry.limited.items()}
        own = intake.federation.own
        process = SavedProcess(
            __version__,
            intake.items,
            limited,
            counters,
            own.epoch,
            own.run,
            intake.metrics.created,
        )
        yield _encoder.encode(process)

    def _engine_pieces(self, engine: Engine) -> Iterator[bytes]:
        is_exposed = engine.id in self._intake.registry.engines
        record = msgspec.Raw(encode_record(engine, totals_of(engine)))
        yield _encoder.encode(SavedEngine(is_exposed, record, ORIGIN in engine.labels))
        if engine.requests is not None:
            yield from map(
                _encoder.encode, inflight_state.capture_tracker(engine.id, engine.requests)
            )

    def _federated_piece(self, federated: FederatedEngine) -> SavedFederatedEngine:
        engine = federated.engine
        return SavedFederatedEngine(
            federated.base,
            federated.records,
            engine.id,
            engine.id in self._intake.registry.engines,
            ORIGIN in engine.labels,
            self._intake.guard.owner(federated.current.source),
        )


def restore(intake: Intake, pieces: Iterable[bytes], now: float) -> None:
    """Restore the state that a previous process captured in ``pieces``.

    Raises:
        WireError: A piece is invalid; nothing is restored.
    """
    try:
        _restore(intake, [_decoder.decode(piece) for piece in pieces], now)
    except (*DECODE_ERRORS, WireError, LookupError, ValueError) as error:
        intake.registry.clear()
        intake.federation.clear()
        raise WireError("unreadable", str(error)) from None


def _restore(intake: Intake, pieces: Sequence[Piece], now: float) -> None:
    registry = intake.registry
    streams: list[Stream] = []
    groups: list[GroupState] = []
    own = intake.federation.own
    epoch, run = own.epoch, own.run
    for piece in pieces:
        match piece:
            case SavedEngine():
                _restore_engine(registry, piece, now)
            case SavedFederatedEngine():
                _restore_federated(intake, piece, now)
            case TrackerState() | RequestsState():
                inflight_state.restore(registry.requests_of(registry.engines[piece.engine]), piece)
            case GroupState():
                groups.append(piece)
            case SavedStream():
                streams.append(_stream(piece))
            case SavedProcess():
                intake.items = piece.items
                registry.limited.update(piece.limited)
                intake.metrics.restore(piece.counters, piece.created)
                if piece.epoch:
                    # The maximum also covers an earlier process that restored a later snapshot.
                    epoch, run = piece.epoch, max(piece.run + 1, own.epoch >> EPOCH_BITS)
    _restore_requests(registry, groups)
    # Last, because gauges are hidden until a stream of the engine sends a Hello.
    intake.restore(streams, now)
    own.epoch, own.run = epoch, run
    _restore_records(intake, pieces)


def _restore_records(intake: Intake, pieces: Sequence[Piece]) -> None:
    # After the exporter's own counters, which may count them as lost.
    for piece in pieces:
        if not isinstance(piece, SavedRecords):
            continue
        if intake.request_log is None:
            lose_output(intake.metrics, piece.output, piece.lines)
        else:
            intake.request_log.restore(piece.output, piece.lines)


def _restore_engine(registry: Registry, piece: SavedEngine, now: float) -> None:
    engine = restore_engine(registry, decode_record(piece.record))
    engine.seen_at = now
    if piece.has_origin:
        # Keep the label even if the duplicate engine is gone, so that the series stay the same.
        engine.labels[ORIGIN] = engine.id
    if piece.is_exposed:
        registry.expose(engine)
    else:
        registry.retired[engine.id] = engine


def _restore_federated(intake: Intake, piece: SavedFederatedEngine, now: float) -> None:
    if piece.key is not None:
        intake.guard.restore_owner(piece.key, piece.records[-1].source)
    # An engine that can no longer be registered must not fail the restore; its source resends it.
    with contextlib.suppress(WireError):
        intake.federation.restore(
            piece.base,
            piece.records,
            piece.name,
            has_origin=piece.has_origin,
            is_exposed=piece.is_exposed,
            now=now,
        )


def _restore_requests(registry: Registry, groups: Sequence[GroupState]) -> None:
    trackers = {e.id: e.requests for e in registry.engines.values() if e.requests is not None}
    for tracker in trackers.values():
        inflight_state.sort_preempted(tracker)
    inflight_state.restore_groups(registry.sample_groups, groups, trackers)


def _siblings(registry: Registry) -> dict[str, EngineSamples]:
    """Return the parallel samples by engine, for engines with tracked requests."""
    return {
        engine.id: engine.requests.samples
        for engine in registry.engines.values()
        if engine.requests is not None
    }


def _saved_stream(stream: Stream) -> SavedStream:
    return SavedStream(
        stream.id,
        stream.incarnation,
        stream.seq,
        stream.engines,
        stream.state is not StreamState.CLOSED,
        stream.dropped,
        stream.errors,
        stream.folded,
        stream.beat,
        list(stream.retired),
        stream.mark,
        stream.replica,
        stream.server,
        stream.process,
        list(stream.retired.values()),
    )


def _stream(piece: SavedStream) -> Stream:
    stream = Stream(piece.id, piece.incarnation, b"", piece.engines, piece.seq)
    stream.state = StreamState.DETACHED if piece.open else StreamState.CLOSED
    # Snapshots of earlier releases have no seqs: the exporter answered such processes no more.
    stream.retired = dict(zip(piece.retired, piece.retired_seqs, strict=False))
    stream.beat = piece.beat
    stream.dropped, stream.errors, stream.folded = piece.dropped, piece.errors, piece.folded
    stream.mark, stream.replica = piece.mark, piece.replica
    stream.server, stream.process = piece.server, piece.process
    return stream
