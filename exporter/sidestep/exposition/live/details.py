"""Details of one engine: what it is, and its streams with their delivery."""

from __future__ import annotations

from sidestep.exposition.live.rows import EngineDetail, StreamRow
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import Engine
from sidestep.protocol.stream import Stream, StreamState

INFO = "_info"
"""End of the names of families whose labels are the information."""


def detail(engine: Engine, intake: Intake, now: float) -> EngineDetail:
    """Return the details of ``engine`` at ``now``, in monotonic seconds."""
    health = intake.health.of(engine)
    return EngineDetail(
        id=engine.id,
        labels=engine.labels,
        features=sorted(engine.description.features),
        restarts=engine.restarts,
        info={**{name: {**labels} for name, labels in engine.info.items()}, **_current(engine)},
        streams=[
            _stream(stream, now)
            for stream in intake.receiver.streams.values()
            if any(info.id == engine.id for info in stream.engines)
        ],
        stack=[] if health is None else [*health.stack],
    )


def _current(engine: Engine) -> dict[str, dict[str, str]]:
    """Return the labels of info metrics that change while the engine runs, such as its adapters."""
    found: dict[str, dict[str, str]] = {}
    for children, row in zip(engine.keyed, engine.layout.keyed, strict=True):
        if row.kind == "gauge" and row.name.endswith(INFO) and children and engine.live:
            # The value is the time of the last step with these labels.
            latest = max(children, key=lambda key: children[key])
            name = row.name.rpartition(":")[2].removesuffix(INFO)
            found[name] = dict(zip(row.own_labels, latest, strict=True))
    return found


def _stream(stream: Stream, now: float) -> StreamRow:
    beat = stream.beat
    return StreamRow(
        id=stream.id,
        state=_state(stream),
        applied=stream.seq,
        lag=0 if beat is None else max(beat.head - stream.seq, 0),
        lost=stream.dropped,
        retransmitted=stream.duplicates,
        folded=stream.folded,
        errors=stream.errors,
        last_seen=max(now - stream.seen_at, 0.0),
    )


def _state(stream: Stream) -> str:
    if stream.state is StreamState.CLOSED:
        return "closed"
    is_silent = stream.silent or stream.unanswered or stream.state is StreamState.DETACHED
    return "silent" if is_silent else "open"
