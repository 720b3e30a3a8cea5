"""Delivery of the records of requests by OTLP: batches from a queue, sent until they are accepted.

Ingest only puts records into the queue. A batch stays in it until the receiver has answered, so that a
snapshot has it; a batch whose answer was lost is sent again, with the same ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from sidestep.otlp.envelope import Envelope, Piece
from sidestep.otlp.receiver import Receiver
from sidestep.requests.record import RequestRecord
from sidestep.requests.record_queue import RecordQueue
from sidestep.telemetry.cooperative import collect_in_slices

log = logging.getLogger(__name__)

PERIOD = 1.0
"""Seconds between two checks of the queue."""
FIRST_PAUSE, MAX_PAUSE = 1.0, 30.0
"""Seconds before a batch is sent again; they double up to the second."""
FINISH_SECONDS = 3.0
"""Seconds that the last records have during shutdown."""
Encode = Callable[[RequestRecord, bytes], Piece]
"""Encodes a record, which is also given as its line."""


class RecordSender:
    """Sender of the records in a queue.

    Args:
        queue: The records.
        encode: Encodes one.
        envelope: Resource and scope of the requests.
        receiver: The receiver.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        queue: RecordQueue,
        encode: Encode,
        envelope: Envelope,
        receiver: Receiver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._encode = encode
        self._envelope = envelope
        self._receiver = receiver
        self._clock = clock
        self._decoder = msgspec.json.Decoder(RequestRecord)
        self._pause = FIRST_PAUSE
        self._resume_at = clock()

    async def run(self) -> None:
        """Send records until cancelled; one request is in flight at a time."""
        while True:
            if self._clock() >= self._resume_at:
                await self.flush()
            await asyncio.sleep(PERIOD)

    async def flush(self) -> None:
        """Send all records in the queue, unless a batch has to wait."""
        while self._queue and await self._send():
            pass

    async def finish(self) -> None:
        """Send the last records, unless that takes longer than ``FINISH_SECONDS``; close the connection."""
        try:
            await asyncio.wait_for(self.flush(), FINISH_SECONDS)
        except asyncio.TimeoutError:
            self._receiver.failed(
                "timeout", f"no answer within {FINISH_SECONDS:g} s of the shutdown"
            )
        finally:
            await self._receiver.close()
        if self._queue:
            log.warning(
                "%d records of requests are not sent as %s", len(self._queue), self._queue.output
            )

    async def _send(self) -> bool:
        """Send the next batch; return whether it is done with, accepted or not."""
        lines = self._queue.first()
        pieces = await collect_in_slices(self._pieces(lines))
        accepted = True
        for request in self._envelope.requests(piece for piece in pieces if piece.points):
            answer = await self._receiver.post(request)
            if not answer.is_success and answer.is_retryable:
                self._receiver.accepted(wholly=False)
                self._resume_at = self._clock() + max(self._pause, answer.pause)
                self._pause = min(2 * self._pause, MAX_PAUSE)
                return False
            accepted = accepted and answer.is_success
            self._receiver.accepted(wholly=accepted)
        self._pause = FIRST_PAUSE
        self._queue.drop(len(lines))
        return True

    def _pieces(self, lines: Sequence[bytes]) -> Iterator[Piece]:
        for line in lines:
            try:
                yield self._encode(self._decoder.decode(line), line)
            except (msgspec.MsgspecError, ValueError):
                # A snapshot of another release may have it.
                self._queue.lose("unreadable")
