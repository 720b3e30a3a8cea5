"""Exporters without sockets that forward their records to each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from intakes import Fed
from sidestep.catalog.slo import Objective
from sidestep.federation.counted_engines import CurrentRecords, Records
from sidestep.federation.messages import encode_forward, split
from sidestep.federation.outbox import REFRESH, Due, Outbox
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.snapshot.capture import Capture, restore


class Node(Fed):
    """One exporter process; of two with one name, the later has the higher ``boot``.

    Args:
        state: Take snapshots, and forward only what they contain.
        disk: Snapshot to restore.
    """

    def __init__(
        self,
        name: str,
        boot: int = 1,
        *,
        state: bool = False,
        disk: Sequence[bytes] = (),
        labels: Mapping[str, str] | None = None,
        native: NativeSettings | None = None,
        legacy: bool = False,
        now: float = 0.0,
        wall: float = 1.0,
        slo: Iterable[Objective] = (),
    ) -> None:
        super().__init__(
            boot=boot, native=native, legacy=legacy, wall=wall, now=now, slo=slo, source=name
        )
        self.name = name
        self.capture = Capture(self.intake)
        self.disk: list[bytes] = list(disk)
        if disk:
            restore(self.intake, disk, now)
        records: Records = _Saved(self.capture) if state else CurrentRecords()
        self.outbox = Outbox(self.intake.federation, records, labels or {})

    def restore(self, disk: Sequence[bytes]) -> None:
        """Restore a snapshot after the parts of the process are set up."""
        restore(self.intake, disk, self.now)

    def save(self) -> None:
        """Take a snapshot that outlives this process."""
        self.disk = list(self.capture.pieces())
        self.capture.mark_saved()

    def due(self) -> list[Due]:
        """Return the messages that are due."""
        mine = [due for due in self.outbox.counted(self.now) if due is not None]
        return [*mine, *self.outbox.received(self.now)]

    def frames(self) -> list[bytes]:
        """Return the frames of all due messages, and mark these as sent."""
        found: list[bytes] = []
        for due in self.due():
            found += frames_of(due)
            self.outbox.sent(due, self.now)
        return found

    def forward_to(self, other: Node) -> None:
        """Send all due messages to another node."""
        for frame in self.frames():
            other.receive(frame)

    def receive(self, frame: bytes) -> None:
        """Take a frame of another exporter, and apply it."""
        self.intake.accept(b"exporter", [frame], self.now)
        while self.intake.busy:
            self.intake.work()


class _Saved:
    """Records of the last snapshot."""

    delay = 0.0

    def __init__(self, capture: Capture) -> None:
        self.version, self.record = capture.version, capture.record


def frames_of(due: Due) -> list[bytes]:
    """Return the frames of a message."""
    message = due.message
    pieces = split(message.data)
    message.pieces = len(pieces)
    found: list[bytes] = []
    for message.piece, message.data in enumerate(pieces):
        found.append(encode_forward(message))
    return found


def wait(seconds: float, *nodes: Node) -> None:
    """Let ``seconds`` pass for all nodes."""
    for node in nodes:
        node.advance(seconds)


def refresh(*nodes: Node) -> None:
    """Let a refresh interval pass, then forward from each node to the next."""
    wait(REFRESH, *nodes)
    for lower, upper in pairwise(nodes):
        lower.forward_to(upper)


def samples(page: str, *without: str) -> dict[str, float]:
    """Return values by series, as the page writes it, without lines that begin with ``without``."""
    lines = (line for line in page.splitlines() if not line.startswith(("#", *without)))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
