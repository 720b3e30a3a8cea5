"""The senders of one exporter as a whole; this module does not load the messages."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sidestep.otlp.record_sender import RecordSender
    from sidestep.otlp.sender import OtlpSender


@dataclasses.dataclass(frozen=True)
class Senders:
    """The senders of one exporter.

    Attributes:
        metrics: Sender of the page's families; None: they are not pushed.
        records: Senders of the records of requests.
    """

    metrics: OtlpSender | None = None
    records: Sequence[RecordSender] = ()

    def work(self, interval: float) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what runs until it is cancelled; ``interval`` is that of pushes, in seconds."""
        if self.metrics is not None:
            yield self.metrics.run(interval)
        for sender in self.records:
            yield sender.run()

    async def finish_records(self) -> None:
        """Send the last records of requests."""
        await asyncio.gather(*(sender.finish() for sender in self.records))

    async def finish_metrics(self) -> None:
        """Push the page's families a last time."""
        if self.metrics is not None:
            await self.metrics.finish()
