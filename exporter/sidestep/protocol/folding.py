"""What a sender needs of whatever adds up the items that find its ring full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sidestep.protocol.messages import EngineInfo, Settings


class Folded(NamedTuple):
    """What so many items came to, as the records of each frame."""

    items: int
    frames: list[list[bytes]]

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return sum(len(record) for frame in self.frames for record in frame)


class Folder(Protocol):
    """Adds up the items of one stream, from one ``seal`` to the next.

    Attributes:
        settings: What the exporter said last: fold as it would have counted.
        kv_sample_rate: Share of KV blocks to follow, as it said last.
    """

    settings: Settings
    kv_sample_rate: float | None

    @property
    def count(self) -> int:
        """Items folded since the last seal."""

    def fold(self, data: bytes, engines: Sequence[EngineInfo]) -> bool:
        """Add an encoded item; return whether it could be counted."""

    def seal(self) -> Folded:
        """Return what was folded, and start again with the next item."""
