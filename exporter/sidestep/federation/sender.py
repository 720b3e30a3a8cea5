"""Forwarding of records to an upstream exporter."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from itertools import chain

import zmq

from sidestep.errors import ConfigError, WireError
from sidestep.federation.counted_engines import Records
from sidestep.federation.messages import Forward, encode_forward, split
from sidestep.federation.outbox import Outbox
from sidestep.federation.store import Store
from sidestep.protocol.messages import NACK_CODES, Nack, decode_from_exporter
from sidestep.telemetry.cooperative import collect_in_slices
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.telemetry.peer_log import PeerLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.transport.connection_monitor import Socket
from sidestep.transport.dealer import RESENDING, connect_monitored, receive
from sidestep.transport.peer_limits import TOO_MUCH, Allowance

log = logging.getLogger(__name__)

WAIT = 0.01
"""Seconds between attempts to send on a full socket."""
PATIENCE = 2.0
"""Seconds that one frame may wait: the next round sends a newer one."""
LINGER = 1000
"""Milliseconds to send the last frames during shutdown."""
PENALTY = 10.0
"""Seconds to stay disconnected after the upstream exporter has sent too much."""


class Forwarder:
    """Sender of records to an upstream exporter.

    Args:
        store: Records of other exporters, and the registry of all engines.
        metrics: Self-metrics.
        endpoint: Ingest endpoint of the upstream exporter.
        records: Encoded records of the engines that this exporter counts.
        labels: Labels to add to all series.
        clock: Monotonic seconds, the same clock as the intake's.

    Raises:
        ConfigError: The endpoint or the keys cannot be used.
    """

    def __init__(
        self,
        store: Store,
        metrics: SelfMetrics,
        endpoint: str,
        records: Records,
        labels: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._outbox = Outbox(store, records, labels, self._log_label_conflict)
        self._delay = records.delay
        self._clock = clock
        self._log = RateLimitedLog(log, clock=clock)
        self._peer_log = PeerLog(log, "--forward", f"the exporter at {endpoint}")
        self._context: zmq.Context[Socket] = zmq.Context()
        self._banned_until = float("-inf")
        try:
            self._open()
        except zmq.ZMQError as error:
            self._context.term()
            raise ConfigError(f"--forward {endpoint}: {error.strerror}") from None
        except ConfigError:
            self._context.term()
            raise
        metrics.read("sidestep_forward_connected", lambda: [((), float(self._monitor.connected))])
        metrics.read(
            "sidestep_forward_lag_seconds", lambda: [((), self._outbox.lag(self._clock()))]
        )

    async def run(self, interval: float) -> None:
        """Send what is due every ``interval`` seconds, until cancelled."""
        while True:
            await self.send()
            await asyncio.sleep(interval)

    async def send(self) -> None:
        """Send changed records, and those that are due for a refresh."""
        if self._clock() < self._banned_until:
            return
        self._poll()
        if self._monitor.connected:
            self._peer_log.connected(self._clock())
        else:
            self._peer_log.absent(self._clock(), self._monitor.problem)
        found = await collect_in_slices(self._outbox.counted(self._clock()))
        counted = [due for due in found if due is not None]
        if counted and self._delay:
            await asyncio.sleep(self._delay)
        for due in chain(counted, self._outbox.received(self._clock())):
            if not await self._send(due.message):
                return
            self._outbox.sent(due, self._clock())
            # Sending hundreds at once would block the event loop.
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Send due records a last time, wait up to ``LINGER`` for them, and close the connection."""
        # All senders have been acknowledged, so no record has to wait.
        self._delay = 0.0
        await self.send()
        self._close(LINGER)
        await asyncio.to_thread(self._context.term)

    def reconnect(self) -> None:
        """Close the connection, which frees its buffers, and open another."""
        self._close(0)
        self._open()

    def _open(self) -> None:
        self._socket, self._monitor = connect_monitored(self._context, self._endpoint, *RESENDING)
        self._allowance = Allowance(self._clock())

    def _close(self, linger: int) -> None:
        self._monitor.close()
        self._socket.close(linger=linger)

    def _log_label_conflict(self, engine: str) -> None:
        self._metrics.add("sidestep_forward_errors_total", 1, "label")
        text = "--forward.label: engine %s already has a label of that name, which is kept"
        self._log.warning("label", text, engine)

    async def _send(self, message: Forward) -> bool:
        """Send ``message``; return False if the upstream exporter is unreachable or too slow."""
        metrics = self._metrics
        try:
            pieces = split(message.data)
        except WireError as error:
            metrics.add("sidestep_forward_errors_total", 1, error.reason)
            self._log.warning(error.reason, "%s cannot be forwarded: %s", message.engine, error)
            return True
        message.pieces = len(pieces)
        for message.piece, message.data in enumerate(pieces):
            frame = encode_forward(message)
            if not await self._put(frame):
                return False
            metrics.add("sidestep_forward_bytes_total", len(frame))
        metrics.add("sidestep_forward_records_total")
        return True

    async def _put(self, frame: bytes) -> bool:
        until = self._clock() + PATIENCE
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._poll()
                if not self._monitor.connected or self._clock() > until:
                    return False
                await asyncio.sleep(WAIT)
            else:
                return True

    def _poll(self) -> None:
        """Read the connection state and pending rejections."""
        for event in self._monitor.events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                # The upstream exporter may have restarted and have no records.
                self._outbox.renew()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._report_rejection(
                    "unauthorised", "this exporter's key is not authorized there"
                )
        while (frame := receive(self._socket)) is not None:
            if not self._allowance.spend(1, len(frame), self._clock()):
                self._log.warning(
                    "flood", "%s: %s; disconnected for %d s", self._endpoint, TOO_MUCH, PENALTY
                )
                self._banned_until = self._clock() + PENALTY
                self.reconnect()
                return
            try:
                answer = decode_from_exporter(frame)
            except WireError:
                continue
            if isinstance(answer, Nack):
                self._report_rejection(answer.code, answer.detail)

    def _report_rejection(self, code: str, detail: str) -> None:
        # An unknown code may be anything, and each would be another series.
        code = code if code in NACK_CODES else "other"
        self._metrics.add("sidestep_forward_errors_total", 1, code)
        text = "the exporter at %s rejects forwarded records: %s"
        reason = f"{code}: {detail}" if detail else code
        self._log.warning(code, text, self._endpoint, reason)
