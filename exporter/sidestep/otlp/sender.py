"""Push of the page's families to a receiver of OTLP, at an interval.

Totals are cumulative, so nothing is queued: what a failed push did not deliver is in the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from sidestep.exposition.pages import Hold, PageValues
from sidestep.otlp.encoder import Encoder
from sidestep.otlp.envelope import Envelope, Piece, Request
from sidestep.otlp.page_families import PageFamilies
from sidestep.otlp.receiver import Receiver
from sidestep.telemetry.self_metrics import SelfMetrics

FINISH_SECONDS = 3.0
"""Seconds for the last push during shutdown."""


class Durable(Protocol):
    """Snapshots of what is sent."""

    async def settled(self) -> None:
        """Return once a snapshot holds all items applied before this call."""


class OtlpSender:
    """Pushes the families of the page to a receiver.

    Args:
        families: The families.
        envelope: Resource and scope of the requests.
        receiver: The receiver.
        metrics: Self-metrics.
        hold: Pauses all changes for a block, if given, so that a push is of one moment.
        snapshots: If given, a push is sent only once a snapshot holds what it contains, so that no
            counter that a receiver has seen decreases after a crash.
        clock: Monotonic seconds.
        wall: Nanoseconds since 1970.
    """

    def __init__(
        self,
        families: PageFamilies,
        envelope: Envelope,
        receiver: Receiver,
        metrics: SelfMetrics,
        *,
        hold: Hold = contextlib.nullcontext,
        snapshots: Durable | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        self._families = families
        self._encoder = Encoder()
        self._envelope = envelope
        self._receiver = receiver
        self._metrics = metrics
        self._hold = hold
        self._snapshots = snapshots
        self._clock = clock
        self._wall = wall
        self._stamp = 0
        self._resume_at = clock()
        self._is_accepted: bool | None = None
        """True if the last push was accepted; None before the first."""
        metrics.set("sidestep_otlp_last_success_timestamp_seconds", 0.0)

    async def run(self, interval: float) -> None:
        """Push every ``interval`` seconds until cancelled; one push runs at a time."""
        while True:
            started = self._clock()
            if started >= self._resume_at:
                await self.push()
            await asyncio.sleep(max(started + interval - self._clock(), 0.0))

    async def push(self) -> None:
        """Send the present state of all families; failures are counted and logged."""
        # Receivers refuse a whole request if the time of a series decreases.
        self._stamp = max(self._wall(), self._stamp + 1)
        async with self._hold():
            values = self._families.copy()
        pieces = await asyncio.to_thread(self._encode, values)
        requests = self._envelope.requests(pieces)
        if self._snapshots is not None:
            await self._snapshots.settled()
        await self._send(requests)

    def _encode(self, values: PageValues) -> list[Piece]:
        return [*self._encoder.pieces(self._families.read(values), self._stamp)]

    async def finish(self) -> None:
        """Push a last time, unless the push before failed, and close the connection."""
        # Everything has been saved, and the snapshots' schedule has ended.
        self._snapshots = None
        try:
            if self._is_accepted is not False:
                await asyncio.wait_for(self.push(), FINISH_SECONDS)
        except asyncio.TimeoutError:
            self._receiver.failed(
                "timeout", f"no answer within {FINISH_SECONDS:g} s of the shutdown"
            )
        finally:
            await self._receiver.close()

    async def _send(self, requests: Iterable[Request]) -> None:
        """Send ``requests`` until one fails in a way that the next one would, too."""
        accepted = refused = False
        for request in requests:
            answer = await self._receiver.post(request)
            if answer.is_success:
                accepted = True
                continue
            refused = True
            if answer.is_retryable:
                self._resume_at = self._clock() + answer.pause
                break
        self._is_accepted = accepted and not refused
        if self._is_accepted:
            self._metrics.set("sidestep_otlp_last_success_timestamp_seconds", self._wall() / 1e9)
        self._receiver.accepted(wholly=self._is_accepted)
