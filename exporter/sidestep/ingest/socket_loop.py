"""The ROUTER socket: whose turn it is, how long it may take, and who gets an answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable

from sidestep.ingest.intake import Intake
from sidestep.ingest.source import PATIENCE, Source, Sources
from sidestep.protocol.messages import FromExporter, encode
from sidestep.telemetry.self_metrics import LagMeter
from sidestep.transport.access import Access
from sidestep.transport.listener import SKIPPING, Listener
from sidestep.transport.process import resident
from sidestep.transport.upkeep import Upkeep
from sidestep.transport.watchdog import Watchdog

BUDGET = 0.002
"""Seconds of the event loop that one turn of draining may take."""
TICK = 0.05
"""libzmq's descriptor is edge-triggered: look at the socket this often all the same."""
LOOK_AROUND = 1.0
"""Seconds between two looks for what fell silent."""
CLOSING = 1.0


class Ingest:
    """Owns the socket, and gives the intake its turns.

    Args:
        access: Who may connect.
        watchdog: Says when the socket holds too much; by default never.
    """

    def __init__(
        self,
        intake: Intake,
        access: Access = Access(),  # noqa: B008 - frozen
        watchdog: Watchdog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.intake = intake
        self._sources = Sources(())
        self.lag = LagMeter(clock)
        self._clock = clock
        self._access = access
        self._watchdog = watchdog or Watchdog(0, 0, resident)
        self._listener: Listener | None = None
        self._upkeep: Upkeep | None = None
        self._scheduled = self._ack_due = self._is_sources_turn = False
        self._holds = 0
        self._tick: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        intake.metrics.read("sidestep_loop_lag_seconds", self.lag.reading)

    @property
    def endpoints(self) -> list[str]:
        """Where engines connect; a port 0 shows as the one that was found."""
        return [] if self._listener is None else self._listener.endpoints

    def open(
        self,
        endpoints: Iterable[str],
        sources: Iterable[Source] = (),
        cut: Callable[[], None] = lambda: None,
    ) -> None:
        """Bind and start to drain in the running event loop, the socket and ``sources``.

        Args:
            endpoints: Where engines connect.
            sources: What runs in this process and feeds engines.
            cut: Frees what other connections hold, where memory has reached its limit.

        Raises:
            ConfigError: An endpoint is malformed, taken, or may not be bound.
        """
        metrics = self.intake.metrics
        self._sources = Sources(sources)
        self._listener = Listener(
            list(endpoints),
            self._access,
            lambda: metrics.add("sidestep_auth_denied_total", 1, "curve"),
        )

        def cut_all() -> None:
            self._sources.cut()
            cut()

        self._upkeep = Upkeep(self._listener, self._watchdog, metrics, cut_all)
        self._watch(self._listener)
        self._sources.open(self._drain)
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(TICK, self._on_tick, loop.time() + TICK)

    def drain(self) -> None:
        """Apply what has arrived; nothing more is taken in."""
        if self._listener is None:
            return
        self._unwatch(self._listener)
        if self._tick is not None:
            self._tick.cancel()
        # What has arrived, but not for as long as a flood lasts.
        self._turn(CLOSING)
        while self.intake.busy:
            self.intake.work()
        self._sources.close()

    async def wait_closed(self) -> None:
        """Once no source has a connection left."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._sources.wait_closed(), PATIENCE)
        # A transport says goodbye in a turn of its own.
        await asyncio.sleep(0)

    def leave(self) -> None:
        """Say a last time what is safe, and unbind."""
        if self._listener is None:
            return
        self._reply(self.intake.answers())
        self._reply(self.intake.receiver.acks(float("inf")))
        # The final acknowledgements still sit in libzmq: give them a moment to leave.
        self._listener.close(linger=200)
        self._listener = None

    def _watch(self, listener: Listener) -> None:
        for descriptor in listener.descriptors:
            asyncio.get_running_loop().add_reader(descriptor, self._drain)

    def _unwatch(self, listener: Listener) -> None:
        for descriptor in listener.descriptors:
            asyncio.get_running_loop().remove_reader(descriptor)

    # Two sources that re-arm each other would take the loop hostage: one flag
    # says that a turn is coming, and whoever finds it set leaves.
    def _drain(self) -> None:
        if self._upkeep is not None and self._upkeep.has_too_many():
            self._act(self._clock())
        if not self._scheduled and self._turn(BUDGET):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._again)

    def _again(self) -> None:
        self._scheduled = False
        self._drain()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Between two frames: until the block ends nothing is applied, and all is consistent."""
        self._holds += 1
        try:
            while self.intake.busy:  # noqa: ASYNC110 - the turns that end this come every pass
                await asyncio.sleep(0)
            yield
        finally:
            self._holds -= 1
            self._drain()

    def acknowledge(self) -> None:
        """Tell senders what is safe now, without waiting for the next tick; others what is refused."""
        self._reply(self.intake.answers())
        self._reply(self.intake.receiver.acks(self._clock()))

    def _on_tick(self, expected: float) -> None:
        loop = asyncio.get_running_loop()
        self.lag.note(loop.time() - expected)
        self._ack_due = True
        now = self._clock()
        if not self._holds:
            self.intake.applier.flush_block_lifetimes()
            self.intake.loads.update(now)
            if now >= self._look_at:
                self._look_at = now + LOOK_AROUND
                self.intake.pass_time(now)
            self._sources.pass_time(now)
        self._keep_up(now)
        self._drain()
        due = loop.time() + TICK
        self._tick = loop.call_at(due, self._on_tick, due)

    def _keep_up(self, now: float) -> None:
        """What the socket needs now and then; nothing of it touches what is applied."""
        if self._access.keys is not None:
            self.intake.guard.release(self._access.keys.refresh(now))
        if self._upkeep is not None and self._upkeep.due(now):
            self._act(now)

    def _act(self, now: float) -> None:
        if self._listener is not None and self._upkeep is not None:
            self._unwatch(self._listener)
            self._upkeep.act(now)
            self._watch(self._listener)

    def _turn(self, budget: float) -> bool:
        """Work for ``budget`` seconds at most; whether there is more to do."""
        listener, intake = self._listener, self.intake
        if listener is None:
            return False
        deadline = time.perf_counter() + budget
        more = listener.authenticate()
        while True:
            while intake.busy:
                intake.work()
                if time.perf_counter() > deadline:
                    intake.settle()
                    return True
            if self._ack_due:
                # Between two frames all that was consumed is applied. Waiting for a turn that
                # finds nothing to do would starve the senders of a busy exporter.
                self._ack_due = False
                self.acknowledge()
            if self._holds:
                return False
            if not self._take(listener):
                return more
            # Most frames bring items, whose time is counted above; a flood of others would not.
            if not intake.busy and time.perf_counter() > deadline:
                return True

    def _take(self, listener: Listener) -> bool:
        """Take in one message, from the socket and the sources by turns; whether there was any."""
        self._is_sources_turn = not self._is_sources_turn
        if self._is_sources_turn and self._sources.take(self._clock()):
            return True
        arrival = listener.receive()
        if arrival is None:
            return not self._is_sources_turn and self._sources.take(self._clock())
        if arrival is not SKIPPING:
            peer, key, frames = arrival
            self._reply(self.intake.take(peer, frames, self._clock(), key))
        return True

    def _reply(self, replies: Iterable[tuple[bytes, FromExporter]]) -> None:
        if self._listener is not None:
            for peer, message in replies:
                self._listener.send(peer, encode(message))
