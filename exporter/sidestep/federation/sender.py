"""Telling another exporter what this one counts, and what others have told it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from itertools import chain

import zmq
from zmq.utils.monitor import recv_monitor_message

from sidestep.errors import ConfigError, WireError
from sidestep.federation.computed_records import Records
from sidestep.federation.messages import Forward, encode_forward, split
from sidestep.federation.outbox import Outbox
from sidestep.ingest.intake import Intake
from sidestep.protocol.messages import Nack, decode_from_exporter
from sidestep.telemetry.cooperative import collect_in_slices
from sidestep.telemetry.logs import RateLimitedLog
from sidestep.transport.connection import RESENDING, Socket, connect, receive
from sidestep.transport.peer_limits import TOO_MUCH, Allowance

log = logging.getLogger(__name__)

WAIT = 0.01
"""Seconds until a socket that takes nothing more is tried again."""
PATIENCE = 2.0
"""Seconds for which one frame may wait: what is told next round is newer."""
LINGER = 1000
"""Milliseconds in which the last words may leave."""
ALONE = 5.0
"""Seconds without a connection after which the log says so."""
PENALTY = 10.0
"""Seconds without a connection after the other exporter sent more than it owes."""
EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Forwarder:
    """Owns the connection to another exporter.

    Args:
        intake: Of this exporter.
        endpoint: Where the other takes what engines push, and this.
        source: What this exporter calls itself, the same each time.
        records: Of the engines that are counted here.
        labels: That all series get on the way.
        clock: Monotonic seconds, as the intake's.

    Raises:
        ConfigError: The endpoint or the keys cannot be used.
    """

    def __init__(
        self,
        intake: Intake,
        endpoint: str,
        source: str,
        records: Records,
        labels: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._intake = intake
        self._endpoint = endpoint
        self._outbox = Outbox(intake, source, records, labels, self._clash)
        self._settles = records.settles
        self._clock = clock
        self._connected = False
        self._alone_since = clock()
        self._said = RateLimitedLog(log, clock=clock)
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
        metrics = intake.metrics
        metrics.read("sidestep_forward_connected", lambda: [((), float(self._connected))])
        metrics.read(
            "sidestep_forward_lag_seconds", lambda: [((), self._outbox.lag(self._clock()))]
        )

    async def run(self, interval: float) -> None:
        """Tell what is new every ``interval`` seconds, until cancelled."""
        while True:
            await self.tell()
            await asyncio.sleep(interval)

    async def tell(self) -> None:
        """Tell what is new, and what has not been told for long."""
        if self._clock() < self._banned_until:
            return
        self._listen()
        if not self._connected and self._clock() - self._alone_since >= ALONE:
            text = "nothing is forwarded: no exporter at %s that takes it; give one's --ingest.endpoint,"
            self._said.warning("alone", f"{text} and keys to both or neither", self._endpoint)
        looked = await collect_in_slices(self._outbox.mine(self._clock()))
        mine = [due for due in looked if due is not None]
        if mine and self._settles:
            await asyncio.sleep(self._settles)
        for due in chain(mine, self._outbox.others(self._clock())):
            if not await self._send(due.message):
                return
            self._outbox.sent(due, self._clock())
            # A record each turn: hundreds would hold the loop.
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Say the last word, give it a moment to leave, and close the connection."""
        # By now senders know all there is to know.
        self._settles = 0.0
        await self.tell()
        self._close(LINGER)
        await asyncio.to_thread(self._context.term)

    def cut(self) -> None:
        """Close the connection, which frees what it holds, and make it anew."""
        self._close(0)
        self._open()

    def _open(self) -> None:
        self._socket = connect(self._context, self._endpoint, *RESENDING)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._connected = False
        self._allowance = Allowance(self._clock())

    def _close(self, linger: int) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger)

    def _clash(self, engine: str) -> None:
        self._intake.metrics.add("sidestep_forward_errors_total", 1, "label")
        text = "--forward.label: %s has a label of that name already, which stands"
        self._said.warning("label", text, engine)

    async def _send(self, message: Forward) -> bool:
        """Whether it left; if not there is nobody to take it, or not fast enough."""
        metrics = self._intake.metrics
        try:
            pieces = split(message.data)
        except WireError as error:
            metrics.add("sidestep_forward_errors_total", 1, error.reason)
            self._said.warning(error.reason, "%s cannot be forwarded: %s", message.engine, error)
            return True
        message.pieces = len(pieces)
        for message.piece, message.data in enumerate(pieces):
            frame = encode_forward(message)
            if not await self._give(frame):
                return False
            metrics.add("sidestep_forward_bytes_total", len(frame))
        metrics.add("sidestep_forward_records_total")
        return True

    async def _give(self, frame: bytes) -> bool:
        until = self._clock() + PATIENCE
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                self._listen()
                if not self._connected or self._clock() > until:
                    return False
                await asyncio.sleep(WAIT)
            else:
                return True

    def _listen(self) -> None:
        """Take in what became of the connection, and why the other exporter refuses something."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if self._connected:
                self._alone_since = self._clock()
            self._connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            if self._connected:
                # It may be another process, which has heard nothing yet.
                self._outbox.renew()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refused("unauthorised", "it does not know this exporter's key")
        while (frame := receive(self._socket)) is not None:
            if not self._allowance.spend(1, len(frame), self._clock()):
                self._said.warning(
                    "flood", "%s: %s; cut off for %d s", self._endpoint, TOO_MUCH, PENALTY
                )
                self._banned_until = self._clock() + PENALTY
                self.cut()
                return
            try:
                answer = decode_from_exporter(frame)
            except WireError:
                continue
            if isinstance(answer, Nack):
                self._refused(answer.code, answer.detail)

    def _refused(self, code: str, detail: str) -> None:
        self._intake.metrics.add("sidestep_forward_errors_total", 1, code)
        text = "the exporter at %s refuses what is forwarded: %s"
        self._said.warning(code, text, self._endpoint, detail or code)
