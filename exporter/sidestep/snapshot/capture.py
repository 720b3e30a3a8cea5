"""Content of a snapshot: streams with their seqs, engines with their series, requests in flight.

A snapshot is consistent: nothing is applied while it is encoded. It does not include
sampled KV block lifetimes, whose tracking starts again after a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from sidestep import __version__
from sidestep.errors import WireError
from sidestep.ingest.intake import Intake
from sidestep.metrics.derived_counters import update_derived
from sidestep.metrics.engine import ORIGIN, Engine
from sidestep.metrics.merge import restore_engine
from sidestep.metrics.registry import Registry
from sidestep.metrics.totals_codec import decode_totals, encode_totals, totals_of
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.engine_totals import MAX_CHILDREN, TOTAL_LIMIT, Child
from sidestep.protocol.messages import DECODE_ERRORS, EngineInfo, Heartbeat
from sidestep.protocol.stream import Stream, StreamState
from sidestep.requests.request_log import RequestLog, lose_output
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests import inflight_state
from sidestep.tracking.requests.inflight_state import GroupState, RequestsState, TrackerState
from sidestep.tracking.requests.machine import RequestTracker


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
        more: Children of each family in ``totals.keyed`` beyond those that a record may have; only the
            exporter's own counters by tenant have so many.
    """

    is_exposed: bool
    totals: msgspec.Raw
    has_origin: bool = False
    more: list[list[Child]] = []


class SavedFederatedEngine(msgspec.Struct, array_like=True, gc=False, tag="f"):
    """An engine that another exporter counted, in earlier snapshots; it is ignored."""


class SavedProcess(msgspec.Struct, array_like=True, gc=False, tag="p"):
    """The exporter's own counters, and when they began; ``epoch`` and ``run`` only keep their places."""

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
Saved = SavedStream | SavedEngine | SavedFederatedEngine | SavedRecords | SavedProcess
Piece = Saved | TrackerState | RequestsState | GroupState
EnginePieces = dict[str, tuple[int, list[bytes]]]
"""Version and encoded pieces of each engine, by identity."""
_STREAM_FIELDS = [
    name
    for name in SavedStream.__struct_fields__
    if name not in ("open", "retired", "retired_seqs")
]
"""Fields that have the same names in ``Stream``."""
log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Piece] = msgspec.msgpack.Decoder(Piece)


class Begun(NamedTuple):
    """A snapshot that has begun."""

    streams: list[bytes]
    engines: list[Engine]
    rest: list[bytes]


class Capture:
    """Encoder of snapshots of an intake; unchanged engines are not encoded again."""

    def __init__(self, intake: Intake, request_log: RequestLog | None = None) -> None:
        self.saved: State = (-1, -1, -1)
        self._intake = intake
        self._request_log = request_log
        self._taken: State = (-1, -1, -1)
        self.saved_counts = self._taken_counts = 0.0
        self._marks: list[tuple[Stream, int]] = []
        self._pieces: EnginePieces = {}

    @property
    def state(self) -> State:
        """Version of the state; it grows with every change that a snapshot would include."""
        taken = 0 if self._request_log is None else self._request_log.taken
        return self._intake.registry.version, self._intake.receiver.changes, taken

    @property
    def counts(self) -> float:
        """Sum of the exporter's own counters, which no version has; it grows with each of them."""
        return sum(value for *_, value in self._intake.metrics.counters())

    def mark_saved(self) -> None:
        """Mark the last snapshot as written: senders may free the frames that it includes."""
        self.saved, self.saved_counts = self._taken, self._taken_counts
        self._intake.receiver.mark_durable(self._marks)

    def pieces(self) -> list[bytes]:
        """Encode a snapshot of this moment."""
        return self.encode(self.begin())

    def begin(self) -> Begun:
        """Begin a snapshot: encode what tasks besides the intake change."""
        intake = self._intake
        registry = intake.registry
        self._taken, self._taken_counts = self.state, self.counts
        self._marks = intake.receiver.cursors()
        for engine in registry:
            # Pages do this, too: it adds counters, which must not happen while they are encoded.
            update_derived(engine)
        streams = [
            _encoder.encode(_saved_stream(each)) for each in intake.receiver.streams.values()
        ]
        records = [] if self._request_log is None else self._request_log.outputs
        rest = [
            _encoder.encode(SavedRecords(lines, output.name))
            for output in records
            for lines in output.chunks()
        ]
        limited = {limit: min(count, TOTAL_LIMIT) for limit, count in registry.limited.items()}
        process = SavedProcess(
            __version__,
            intake.items,
            limited,
            list(intake.metrics.counters()),
            created=intake.metrics.created,
        )
        return Begun(streams, [*registry], [*rest, _encoder.encode(process)])

    def encode(self, begun: Begun) -> list[bytes]:
        """Encode the whole snapshot; the caller applies nothing until this returns.

        It may run in another thread.
        """
        known, self._pieces = self._pieces, {}
        found = begun.streams
        for engine in begun.engines:
            version, pieces = known.get(engine.id, (-1, []))
            if version != engine.version:
                version, pieces = engine.version, [*self._engine_pieces(engine)]
            self._pieces[engine.id] = version, pieces
            found += pieces
        samples = self._intake.registry.sample_groups
        trackers = _request_trackers(begun.engines)
        siblings = {name: tracker.samples for name, tracker in trackers.items()}
        groups = inflight_state.capture_groups(samples, siblings)
        return [*found, *map(_encoder.encode, groups), *begun.rest]

    def _engine_pieces(self, engine: Engine) -> Iterator[bytes]:
        is_exposed = engine.id in self._intake.registry.engines
        totals = totals_of(engine)
        more = [children[MAX_CHILDREN:] for children in totals.keyed]
        for children in totals.keyed:
            del children[MAX_CHILDREN:]
        raw = msgspec.Raw(encode_totals(engine, totals))
        yield _encoder.encode(SavedEngine(is_exposed, raw, ORIGIN in engine.labels, more))
        requests = engine.part(Trackers).requests
        if requests is not None:
            yield from map(_encoder.encode, inflight_state.capture_tracker(engine.id, requests))


def restore(
    intake: Intake,
    pieces: Iterable[bytes],
    now: float,
    request_log: RequestLog | None = None,
) -> None:
    """Restore the state that a previous process captured in ``pieces``.

    Raises:
        WireError: A piece is invalid; nothing is restored.
    """
    try:
        found = [_decoder.decode(piece) for piece in pieces]
        _restore(intake, found, now)
        _restore_records(intake.metrics, request_log, found)
    except (*DECODE_ERRORS, WireError, LookupError, ValueError) as error:
        intake.registry.clear()
        raise WireError("unreadable", str(error)) from None


def _restore(intake: Intake, pieces: Sequence[Piece], now: float) -> None:
    registry = intake.registry
    streams: list[Stream] = []
    groups: list[GroupState] = []
    unknown: set[str] = set()
    for piece in pieces:
        match piece:
            case SavedEngine():
                _restore_engine(registry, piece, now, unknown)
            case TrackerState() | RequestsState():
                if piece.engine not in unknown:
                    engine = registry.engines[piece.engine]
                    inflight_state.restore(registry.requests_of(engine), piece)
            case GroupState():
                groups.append(piece)
            case SavedStream():
                streams.append(_stream(piece))
            case SavedProcess():
                intake.items = piece.items
                registry.limited.update(piece.limited)
                intake.metrics.restore(piece.counters, piece.created)
    trackers = _request_trackers(registry.engines.values())
    for tracker in trackers.values():
        inflight_state.sort_preempted(tracker)
    inflight_state.restore_groups(registry.sample_groups, groups, trackers)
    # Last, because gauges are hidden until a stream of the engine sends a Hello.
    intake.restore(streams, now)


def _restore_records(
    metrics: SelfMetrics, request_log: RequestLog | None, pieces: Sequence[Piece]
) -> None:
    # After the exporter's own counters, which may count them as lost.
    for piece in pieces:
        if not isinstance(piece, SavedRecords):
            continue
        if request_log is None:
            lose_output(metrics, piece.output, piece.lines)
        else:
            request_log.restore(piece.output, piece.lines)


def _restore_engine(registry: Registry, piece: SavedEngine, now: float, unknown: set[str]) -> None:
    added = decode_totals(piece.totals)
    info = added.head.engine
    if info.dialect not in registry.layouts:
        # Dialects come with packages of their own, and with releases: the other engines go on.
        log.error("no dialect %s: the counters of engine %s start at 0", info.dialect, info.id)
        unknown.add(info.id)
        return
    for children, more in zip(added.totals.keyed, piece.more, strict=False):
        children.extend(more)
    engine = restore_engine(registry, added)
    engine.feeds.seen_at = now
    if piece.has_origin:
        # Keep the label even if the duplicate engine is gone, so that the series stay the same.
        engine.labels[ORIGIN] = engine.id
    if piece.is_exposed:
        registry.expose(engine)
    else:
        registry.retired[engine.id] = engine


def _request_trackers(engines: Iterable[Engine]) -> dict[str, RequestTracker]:
    """Return the request trackers of the engines that have one, by identity."""
    found = {engine.id: engine.part(Trackers).requests for engine in engines}
    return {name: tracker for name, tracker in found.items() if tracker is not None}


def _saved_stream(stream: Stream) -> SavedStream:
    return SavedStream(
        **{name: getattr(stream, name) for name in _STREAM_FIELDS},
        open=stream.state is not StreamState.CLOSED,
        retired=list(stream.retired),
        retired_seqs=list(stream.retired.values()),
    )


def _stream(piece: SavedStream) -> Stream:
    return Stream(
        **{name: getattr(piece, name) for name in _STREAM_FIELDS},
        state=StreamState.DETACHED if piece.open else StreamState.CLOSED,
        # A process without a sequence number is not answered any more.
        retired=dict(zip(piece.retired, piece.retired_seqs, strict=False)),
    )
