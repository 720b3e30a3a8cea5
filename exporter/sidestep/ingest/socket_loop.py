"""The event loop of the ingest socket: time budgets, ticks and replies."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

from sidestep.ingest.intake import Intake
from sidestep.ingest.plugins import Source
from sidestep.protocol.messages import FromExporter, encode
from sidestep.telemetry.self_metrics import LagMeter
from sidestep.transport.access import Access
from sidestep.transport.listener import SKIPPING, IngestListener
from sidestep.transport.process import resident
from sidestep.transport.upkeep import Upkeep, Watchdog

BUDGET = 0.002
"""Seconds of the event loop that one slice of draining may take."""
TICK = 0.05
"""Seconds between polls of the socket: libzmq's descriptor is edge-triggered."""
EXPIRE_INTERVAL = 1.0
"""Seconds between checks for silent streams, sources and engines."""
CLOSING = 1.0
"""Seconds that the final drain may take."""
MAX_LEAD = 0.05
"""Seconds that the socket or the sources may have been served longer than the other before it waits.
Whichever had nothing to read for a while must not keep the other waiting for as long afterwards."""
PATIENCE = 1.0
"""Seconds to wait for connections to close during shutdown."""


class Sources:
    """All sources; those that may have messages are read in turn."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._all = list(sources)
        self._ready: dict[Source, None] = {}
        """Sources that may have messages, in the order in which they are read."""

    def open(self, drain: Callable[[], None]) -> None:
        """Start all sources; ``drain`` is called when a message may be ready."""

        def wake(source: Source) -> None:
            self._ready.setdefault(source)
            drain()

        for source in self._all:
            source.open(partial(wake, source))
            self._ready.setdefault(source)

    def receive(self, now: float) -> bool:
        """Apply one message of the next ready source; return whether there was one."""
        while self._ready:
            source = next(iter(self._ready))
            del self._ready[source]
            if source.receive(now):
                self._ready[source] = None
                return True
        return False

    def tick(self, now: float) -> None:
        """Run the periodic work of each source, and read each once."""
        for source in self._all:
            source.tick(now)
            self._ready.setdefault(source)

    def cut(self) -> bool:
        """Free the memory that peers filled, in each source; return whether there is a source."""
        for source in self._all:
            source.cut()
        return bool(self._all)

    def close(self) -> None:
        """Start closing all sources."""
        for source in self._all:
            source.close()

    async def wait_closed(self) -> None:
        """Return when every source has closed its connections; they close concurrently."""
        for source in self._all:
            await source.wait_closed()


class Ingest:
    """Owner of the ingest socket, which runs the intake in slices of the event loop's time."""

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
        self._listener: IngestListener | None = None
        self._upkeep: Upkeep | None = None
        self._scheduled = self._ack_due = self._is_of_sources = False
        self._sources_lead = 0.0
        """Seconds that the sources' messages have taken more than the socket's."""
        self._served_at = 0.0
        self._holds = 0
        self._tick: asyncio.TimerHandle | None = None
        self._expire_at = 0.0
        intake.metrics.read("sidestep_loop_lag_seconds", self.lag.reading)

    @property
    def endpoints(self) -> list[str]:
        """The bound ingest endpoints; port 0 is replaced by the actual port."""
        return [] if self._listener is None else self._listener.endpoints

    def open(self, endpoints: Iterable[str], sources: Iterable[Source] = ()) -> None:
        """Bind the socket, and drain it and ``sources`` in the running event loop.

        Raises:
            ConfigError: An endpoint is malformed, taken, or may not be bound.
        """
        metrics = self.intake.metrics
        self._sources = Sources(sources)
        self._listener = IngestListener(
            list(endpoints),
            self._access,
            lambda: metrics.add("sidestep_auth_denied_total", 1, "curve"),
        )
        self._upkeep = Upkeep(
            self._listener, self._watchdog, metrics, self._sources.cut, lambda: self.intake.accepted
        )
        self._watch(self._listener)
        self._sources.open(self._drain)
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(TICK, self._on_tick, loop.time() + TICK)

    def drain(self) -> None:
        """Apply all messages that have arrived, then stop reading."""
        if self._listener is None:
            return
        self._unwatch(self._listener)
        if self._tick is not None:
            self._tick.cancel()
        # Bounded, so that a flood of messages cannot delay the shutdown.
        self._turn(CLOSING)
        while self.intake.busy:
            self.intake.work()
        # A slice that is scheduled already, or a snapshot that ends, must not read on.
        self._holds += 1
        self._sources.close()

    async def wait_closed(self) -> None:
        """Return when every source has closed its connections, or after ``PATIENCE``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._sources.wait_closed(), PATIENCE)
        # asyncio closes a transport in the next iteration of the loop.
        await asyncio.sleep(0)

    def leave(self) -> None:
        """Send the final acknowledgements and unbind."""
        if self._listener is None:
            return
        self._reply(self.intake.receiver.acks(float("inf")))
        # libzmq still holds the final acknowledgements: give it time to send them.
        self._listener.close(linger=200)
        self._listener = None

    def _watch(self, listener: IngestListener) -> None:
        for descriptor in listener.descriptors:
            asyncio.get_running_loop().add_reader(descriptor, self._drain)

    def _unwatch(self, listener: IngestListener) -> None:
        for descriptor in listener.descriptors:
            asyncio.get_running_loop().remove_reader(descriptor)

    # Only one slice is scheduled at a time: several that schedule each other would starve the loop.
    def _drain(self) -> None:
        if self._upkeep is not None and self._upkeep.has_too_many_connections():
            self._act(self._clock())
        if not self._scheduled and self._turn(BUDGET):
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._again)

    def _again(self) -> None:
        self._scheduled = False
        # With a backlog the memory fills, and a starved loop's next tick may be late.
        self._keep_up(self._clock())
        self._drain()

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Pause the intake between two frames, where its state is consistent, until the block ends."""
        self._holds += 1
        try:
            while self.intake.busy:  # noqa: ASYNC110 - each pass of the loop runs a slice
                await asyncio.sleep(0)
            yield
        finally:
            self._holds -= 1
            self._drain()

    def acknowledge(self) -> None:
        """Send due acknowledgements now instead of at the next tick."""
        self._reply(self.intake.receiver.acks(self._clock()))

    def _on_tick(self, expected: float) -> None:
        loop = asyncio.get_running_loop()
        self.lag.note(loop.time() - expected)
        self._ack_due = True
        now = self._clock()
        if not self._holds:
            # First, so that nothing expires that the exporter itself has slept through.
            self.intake.health.update(now)
            self.intake.applier.flush_block_lifetimes()
            self.intake.loads.update(now)
            self.intake.curves.update(now)
            if now >= self._expire_at:
                self._expire_at = now + EXPIRE_INTERVAL
                self.intake.expire(now)
            self._sources.tick(now)
        self._keep_up(now)
        self._drain()
        due = loop.time() + TICK
        self._tick = loop.call_at(due, self._on_tick, due)

    def _keep_up(self, now: float) -> None:
        """Refresh keys and maintain the socket; no applied state changes."""
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
        """Work for at most ``budget`` seconds; return whether more work is pending."""
        listener, intake = self._listener, self.intake
        if listener is None:
            return False
        self._served_at = time.perf_counter()
        deadline = self._served_at + budget
        more = listener.authenticate()
        while True:
            while intake.busy:
                intake.work()
                if time.perf_counter() > deadline:
                    self._note_time()
                    return True
            if self._ack_due:
                # Between two frames everything received is applied. Waiting for an idle slice
                # would starve the senders of a busy exporter.
                self._ack_due = False
                self.acknowledge()
            if self._holds:
                return False
            if not self._receive(listener):
                return more
            # Frames without items queue no work: check the deadline for them here.
            if not intake.busy and time.perf_counter() > deadline:
                self._note_time()
                return True

    def _receive(self, listener: IngestListener) -> bool:
        """Read one message of the socket or of the sources; return whether one was found.

        Each gets half of the time while both have messages. With half of the messages, publishers
        of large ones would keep engines waiting.
        """
        self._note_time()
        self._is_of_sources = self._sources_lead <= 0
        if self._is_of_sources and self._sources.receive(self._clock()):
            return True
        was_sources_turn, self._is_of_sources = self._is_of_sources, False
        now = self._clock()
        arrival = listener.receive()
        if self._upkeep is not None:
            self._upkeep.note_arrival(now, found=arrival is not None)
        if arrival is None:
            self._is_of_sources = True
            return not was_sources_turn and self._sources.receive(now)
        if arrival is not SKIPPING:
            peer, key, frames = arrival
            if replies := self.intake.accept(peer, frames, now, key):
                self._reply(replies)
        return True

    def _note_time(self) -> None:
        """Add the time since the last call to that of the side whose message was read last."""
        now = time.perf_counter()
        spent = now - self._served_at
        self._served_at = now
        lead = self._sources_lead + (spent if self._is_of_sources else -spent)
        self._sources_lead = min(max(lead, -MAX_LEAD), MAX_LEAD)

    def _reply(self, replies: Iterable[tuple[bytes, FromExporter]]) -> None:
        if self._listener is not None:
            for peer, message in replies:
                self._listener.send(peer, encode(message))
