"""Exporters that forward to each other, without sockets: what one says is given to the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from intakes import Fed
from sidestep.catalog.slo import Objective
from sidestep.federation.computed_records import Present, Records
from sidestep.federation.messages import encode_forward, split
from sidestep.federation.outbox import Due, Outbox
from sidestep.federation.outgoing import REFRESH
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.snapshot.capture import Capture, restore


class Node(Fed):
    """One exporter process; of equal names the later one has the higher ``boot``.

    Args:
        state: Whether it keeps snapshots, and tells only what they have.
        disk: The one that it goes on with.
    """

    def __init__(
        self,
        name: str,
        boot: int = 1,
        *,
        state: bool = False,
        disk: Sequence[bytes] = (),
        labels: Mapping[str, str] | None = None,
        merge: bool = False,
        native: NativeSettings | None = None,
        legacy: bool = False,
        now: float = 0.0,
        wall: float = 1.0,
        slo: Iterable[Objective] = (),
    ) -> None:
        super().__init__(
            boot=boot, native=native, legacy=legacy, merge=merge, wall=wall, now=now, slo=slo
        )
        self.name = name
        self.capture = Capture(self.intake)
        self.disk: list[bytes] = list(disk)
        if disk:
            restore(self.intake, disk, now)
        self.intake.forwarded.own = name, self.intake.life
        records: Records = _Saved(self.capture) if state else Present()
        self.outbox = Outbox(self.intake, name, records, labels or {})

    def recall(self, disk: Sequence[bytes]) -> None:
        """Go on with a snapshot, with all that was set up since the process began."""
        restore(self.intake, disk, self.now)

    def save(self) -> None:
        """Make a snapshot that outlives this process."""
        self.disk = list(self.capture.pieces())
        self.capture.safe()

    def due(self) -> list[Due]:
        """All that is to be told now."""
        mine = [due for due in self.outbox.mine(self.now) if due is not None]
        return [*mine, *self.outbox.others(self.now)]

    def frames(self) -> list[bytes]:
        """Likewise, as frames that are taken for sent."""
        found: list[bytes] = []
        for due in self.due():
            found += frames_of(due)
            self.outbox.sent(due, self.now)
        return found

    def tell(self, other: Node) -> None:
        """All that is to be told arrives there."""
        for frame in self.frames():
            other.hear(frame)

    def hear(self, frame: bytes) -> None:
        """Take a frame of another exporter, and apply it."""
        self.intake.take(b"exporter", [frame], self.now)
        while self.intake.busy:
            self.intake.work()


class _Saved:
    """Records that the snapshot has."""

    settles = 0.0

    def __init__(self, capture: Capture) -> None:
        self.version, self.record = capture.version, capture.record


def frames_of(due: Due) -> list[bytes]:
    """A message as it travels."""
    message = due.message
    pieces = split(message.data)
    message.pieces = len(pieces)
    found: list[bytes] = []
    for message.piece, message.data in enumerate(pieces):
        found.append(encode_forward(message))
    return found


def wait(seconds: float, *nodes: Node) -> None:
    """So much time passes for all of them."""
    for node in nodes:
        node.pass_time(seconds)


def refresh(*nodes: Node) -> None:
    """So much time passes that all is said again, from the first node on to the last."""
    wait(REFRESH, *nodes)
    for lower, upper in pairwise(nodes):
        lower.tell(upper)


def samples(page: str, *without: str) -> dict[str, float]:
    """Values by what stands before them."""
    lines = (line for line in page.splitlines() if not line.startswith(("#", *without)))
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
