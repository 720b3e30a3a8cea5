"""One incarnation of a stream, and its state at the receiver."""

from __future__ import annotations

import dataclasses
from enum import IntEnum

from sidestep.protocol.messages import EngineInfo, Heartbeat


class StreamState(IntEnum):
    """State of one incarnation of a stream; an index into the state table."""

    UNKNOWN = 0
    """No Hello of it was accepted."""
    DETACHED = 1
    """No connection: restored from a snapshot, or silent for 300 s."""
    OPEN = 2
    """Its items are accepted from the connection of its last Hello."""
    CLOSED = 3
    """Its sender has sent a Bye."""
    RETIRED = 4
    """A newer incarnation has the stream's id; the seq of this one is remembered."""
    LOCAL = 5
    """Fed by a source in this process, which needs neither a connection nor acknowledgements."""


@dataclasses.dataclass(slots=True)
class Stream:
    """One incarnation of a stream: a sending process.

    Attributes:
        peer: Connection of its last Hello; empty while it has none.
        engines: Engines by the index that items use.
        seq: Highest seq applied.
        durable: Highest seq that outlives this process.
        seen_at: Monotonic time of its last message.
        silent: True if it has been silent for so long that its engines' gauges have expired.
        unanswered: True if a polled server accepts connections, but has not answered for so long that
            its engines' gauges have expired.
        caught_up: True once it has sent all that it held when it connected.
        beat: Its last Heartbeat, without the progress that it carried.
        dropped: Items that all its incarnations reported as dropped.
        errors: Steps that they could not translate or encode.
        folded: Items that they folded.
        duplicates: Items received more than once and applied once, since this process started.
        acked: Applied, durable and sample rate of its last acknowledgement.
        acked_at: Monotonic time of that.
        received: Bytes received since then.
        retired: Earlier incarnations, and the seq of each.
        mark: State from which a source in this process resumes, beside ``seq``.
        replica: Number among the servers that claim its id at once; see ``claims``.
        server: See ``Hello``, as for ``process``.
    """

    id: str
    incarnation: int
    peer: bytes = b""
    engines: list[EngineInfo] = dataclasses.field(default_factory=list)
    seq: int = 0
    state: StreamState = StreamState.UNKNOWN
    durable: int = 0
    seen_at: float = 0.0
    silent: bool = False
    unanswered: bool = False
    caught_up: bool = False
    beat: Heartbeat | None = None
    dropped: int = 0
    errors: int = 0
    folded: int = 0
    duplicates: int = 0
    acked: tuple[int, int, float | None] | None = None
    acked_at: float = 0.0
    received: int = 0
    retired: dict[int, int] = dataclasses.field(default_factory=dict)
    mark: list[int] = dataclasses.field(default_factory=list)
    replica: int = 1
    server: str = ""
    process: str = ""
