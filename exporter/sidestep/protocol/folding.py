"""Interface of the code that merges a sender's items into totals while its ring is full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sidestep.protocol.messages import EngineInfo, Settings


class Folded(NamedTuple):
    """Merged items, as the encoded totals in each frame to send."""

    items: int
    frames: list[list[bytes]]

    @property
    def size(self) -> int:
        """Bytes of the totals."""
        return sum(len(totals) for frame in self.frames for totals in frame)


class Folder(Protocol):
    """Merges the items of one stream, from one ``seal`` to the next.

    Attributes:
        settings: Settings of the exporter that answered last: items are merged by its rules.
        kv_sample_rate: Share of KV blocks that it asked to be sampled.
    """

    settings: Settings
    kv_sample_rate: float | None

    @property
    def count(self) -> int:
        """Items merged since the last seal."""

    def fold(self, data: bytes, engines: Sequence[EngineInfo]) -> bool:
        """Add an encoded item; return whether it could be counted."""

    def seal(self) -> Folded:
        """Return the merged items, and start again with the next item."""
