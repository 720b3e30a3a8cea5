"""The engine's end of a stream: a queue, and one daemon thread that encodes and sends.

``Publisher.push`` appends to a deque and returns: no encoding, no lock, no system call and
no exception on the thread that serves requests. The publisher thread encodes, sends,
retransmits and reads acknowledgements by the rules of ``sidestep.protocol.sender``.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import util as multiprocessing_util
from random import Random

from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import Item
from sidestep.errors import ConfigError, RunError
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.progress import Progress
from sidestep.protocol.sender import Sender, State
from sidestep.telemetry.peer_log import PeerLog
from sidestep.transport.link import Link
from sidestep_adapters.publisher.process_hooks import weak
from sidestep_adapters.publisher.queue import DeferredItems, ItemFactory, ItemQueue, next_interval
from sidestep_adapters.publisher.server_identity import process_name, server_key

log = logging.getLogger(__name__)

FLUSH_INTERVAL = 0.05
"""Least seconds between two flushes."""
CLOSE_TIMEOUT = 2.0
"""Maximum seconds that closing takes while there is a connection, or an exporter has answered."""
CONNECT_TIMEOUT = 0.5
"""Seconds of ``CLOSE_TIMEOUT`` to wait for a connection if no exporter has answered yet."""
PROGRESS_INTERVAL = 0.2
"""Least seconds between two measurements of progress; an idle publisher wakes less often."""
WARNING_INTERVAL = 60.0
RECONNECT_AFTER = 30.0
"""Seconds without any answer after which the publisher opens a new connection."""


HANDSHAKE_STEPS, HANDSHAKE_WAIT = 4, 0.01
"""How often a flush waits for a handshake to proceed, and how many seconds each time."""


_inherited: list[object] = []
"""Objects that forked children have of their parents, kept so that nothing closes them there."""


class Publisher:
    """Sender of one process's items to the exporter.

    Args:
        stream: Name of this process's stream, stable over restarts.
        periodic_items: Makes additional items about once a second, in the publisher thread.
        current_state: Makes the items that a restarted exporter needs again.
        deferred: Recorded values that each flush turns into items.
        progress: Measures the engines' progress at a monotonic time, in the publisher thread,
            several times a second. Without it, the stream's heartbeats have no progress.
        flush_interval: Least seconds between two flushes; the most are ``MAX_INTERVALS`` times as many.
    """

    def __init__(
        self,
        endpoint: str,
        stream: str,
        engines: Sequence[EngineInfo],
        *,
        periodic_items: ItemFactory | None = None,
        current_state: ItemFactory | None = None,
        deferred: DeferredItems | None = None,
        progress: Callable[[float], Sequence[Progress]] | None = None,
        flush_interval: float = FLUSH_INTERVAL,
    ) -> None:
        self._endpoint = endpoint
        self._stream = stream
        # A forked child belongs to the server of its parent.
        self._server = server_key()
        self._engines = list(engines)
        self._periodic_items = periodic_items
        self._current_state = current_state
        self._progress = progress
        self._flush_interval = flush_interval
        self._queue = ItemQueue(deferred, self.fail)
        self._periodic_at = self._measured_at = 0.0
        self._thread: threading.Thread | None = None
        self._warned_at = -WARNING_INTERVAL
        self._start()
        os.register_at_fork(after_in_child=weak(self.after_fork))
        atexit.register(weak(self.close))

    def push(self, item: Item | ItemFactory) -> None:
        """Queue ``item``, which must own its values; count it as dropped if the queue is full."""
        if self._thread is None:
            self._restart_after_fork()
        queue = self._queue
        if len(queue.entries) < queue.capacity:
            queue.entries.append(item)
        else:
            queue.overflowed += 1

    def fail(self, problem: str) -> None:
        """Count a record that could not be sent as it was; log the cause once a minute."""
        self.errors += 1
        self._warn("%s: %d so far", problem, self.errors, exc_info=sys.exc_info()[0] is not None)

    def lose(self, problem: str) -> None:
        """Count a record as failed and as dropped: what it has ended has to be found out."""
        self.fail(problem)
        self._queue.overflowed += 1

    def describe(self, engines: Sequence[EngineInfo]) -> None:
        """Replace the description of the stream's engines; known engines keep their index."""
        self._engines = list(engines)
        self._description_changed.set()

    @property
    def queued(self) -> int:
        """Return the number of items that are not encoded yet."""
        return len(self._queue.entries)

    @property
    def held_bytes(self) -> int:
        """Return the encoded bytes kept for retransmission, until the exporter has saved them."""
        return self._sender.held_bytes

    @property
    def drained(self) -> bool:
        """Return whether the exporter has received and saved everything pushed before the last flush."""
        # The order matters: an item leaves the queue, is being encoded, then belongs to the sender.
        queue = self._queue
        return not queue and not queue.encoding and self._sender.drained

    @property
    def connected(self) -> bool:
        """Return whether the exporter has answered on this connection."""
        return self._sender.state is State.STREAMING

    @property
    def kv_sample_rate(self) -> float | None:
        """Return the share of KV blocks to sample, as last received; ``None`` without one."""
        return self._sender.kv_sample_rate

    @property
    def lookup_key(self) -> bytes:
        """Return the secret from which keys of looked-up blocks are made; empty: send no lookups."""
        return self._sender.lookup_key

    @property
    def refused(self) -> bool:
        """Return whether another process has taken over the stream's name."""
        return self._sender.state is State.STOPPED

    @property
    def dropped(self) -> int:
        """Return the number of items dropped so far."""
        return self._sender.dropped + self._queue.overflowed

    def close(self, timeout: float = CLOSE_TIMEOUT, *, wait: bool = True) -> None:
        """Send what is queued, close the stream and stop, within ``timeout`` seconds.

        Without ``wait`` the publisher thread does so while the caller continues.
        """
        if self._thread is None:
            return
        if not self._stop.is_set():
            self._deadline = time.monotonic() + timeout
            self._stop.set()
        if wait:
            self._thread.join(max(0.0, self._deadline - time.monotonic()) + 1.0)

    def after_fork(self) -> None:
        """Drop what a forked child inherits: the thread and the queued items are the parent's."""
        # Closing a parent's sockets in a child would disturb the parent.
        _inherited.append(
            (self._sender, self._link, self._thread, self._stop, self._description_changed)
        )
        self._thread = None
        self._queue.clear()

    def _start(self) -> None:
        self.errors = 0
        self._last_session: tuple[int | None, int] = (None, 0)
        incarnation = secrets.randbits(63)
        jitter = Random(incarnation)  # noqa: S311 - of reconnects
        self._folder = ItemFolder()
        self._sender = Sender(
            self._stream,
            incarnation,
            self._engines,
            jitter,
            self._folder,
            server=self._server,
            process=process_name(),
        )
        self._link = Link(self._endpoint, jitter)
        self._peer_log = PeerLog(log, "sidestep", f"the exporter at {self._endpoint}")
        self._stop = threading.Event()
        self._description_changed = threading.Event()
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._run, name="sidestep-publisher", daemon=True)
        # A child of multiprocessing leaves through ``os._exit``, which skips atexit, but runs the finalizers
        # that were registered in the child.
        multiprocessing_util.Finalize(self, weak(self.close), exitpriority=10)
        self._thread.start()

    def _restart_after_fork(self) -> None:
        """Restart in a forked child that pushes for the first time, as a stream of its own."""
        self._stream = f"{self._stream}/{os.getpid()}"
        self._queue.reset()
        self._start()

    def _run(self) -> None:
        self._attempt(lambda: self._folder.prepare(self._engines), "preparing to fold items failed")
        shortest = interval = self._flush_interval
        while not self._stop.wait(interval) and not self.refused:
            # A handshake proceeds by one step at each flush.
            interval = (
                next_interval(interval, len(self._queue), shortest) if self.connected else shortest
            )
            if not self._attempt(self._flush, "publishing failed"):
                self._sender.reopen = True
        self._attempt(self._finish, "closing failed")
        if not self._sender.drained:
            log.warning("sidestep: the exporter at %s has not taken the last items", self._endpoint)
        self._link.close()

    def _attempt(self, step: Callable[[], object], failure: str) -> bool:
        """Run ``step``; return whether it raised no unexpected exception: none may reach the engine."""
        try:
            step()
        except (ConfigError, RunError) as error:
            # Unusable keys or a lack of descriptors may be temporary: try again.
            self._warn("nothing is sent: %s", error)
        except Exception:  # noqa: BLE001 - as the docstring says
            self.fail(failure)
            return False
        return True

    def _flush(self) -> None:
        """Measure progress, connect, encode, send and receive."""
        self._report_progress(time.monotonic())
        self._connect()
        if self._periodic_items is not None and time.monotonic() >= self._periodic_at:
            self._periodic_at = time.monotonic() + 1.0
            self._queue.entries.append(self._periodic_items)
        # An idle publisher costs almost nothing.
        if (
            self._queue
            or self._description_changed.is_set()
            or self._sender.errors != self.errors
            or self._queue.overflowed
            or not self._sender.idle(time.monotonic())
        ):
            self._encode()
            self._pump()
        now, problem = time.monotonic(), self._link.problem
        if self.connected:
            self._peer_log.connected(now)
        elif problem or not self._sender.complaint:
            # A refusal has a line of its own.
            self._peer_log.absent(now, problem)

    def _report_progress(self, now: float) -> None:
        if self._progress is None or now < self._measured_at + PROGRESS_INTERVAL:
            return
        self._measured_at = now
        try:
            progress = self._progress(now)
        except Exception:  # noqa: BLE001 - no exception may reach the engine
            self.fail("progress could not be measured")
            # The exporter would take what it received last for what still holds.
            progress = [Progress(index) for index in range(len(self._engines))]
        self._sender.report(progress)

    def _connect(self) -> None:
        """Keep the link connected; the sender repeats its Hello on a new connection."""
        link, now = self._link, time.monotonic()
        is_reconnected = link.advance(now)
        for _ in range(HANDSHAKE_STEPS):
            if not link.ready:
                link.wait(HANDSHAKE_WAIT)
                is_reconnected |= link.advance(time.monotonic())
        if is_reconnected:
            self._sender.reopened()
        elif self._sender.reopen or (not self.connected and now - link.opened_at > RECONNECT_AFTER):
            # After some errors, such as a port that requires a key, libzmq does not reconnect.
            link.drop(now)
            self._sender.reopened()

    def _encode(self) -> None:
        self._queue.encode(self._sender, self._send_description)
        self._sender.errors = self.errors

    def _send_description(self) -> None:
        if self._description_changed.is_set():
            self._description_changed.clear()
            self._sender.describe(self._engines)

    def _pump(self) -> None:
        """Send and receive until there is no progress, or for so long that encoding has to go on."""
        self._send_description()
        link, deadline = self._link, time.monotonic() + FLUSH_INTERVAL
        has_progress = True
        while has_progress and (now := time.monotonic()) < deadline:
            has_progress = False
            while (frame := self._sender.next_frame(now)) is not None:
                if not link.send(frame):
                    # The kernel's buffer is full, or the link is not connected.
                    has_progress = link.ready
                    break
                self._sender.sent(now)
            while (reply := link.receive(now)) is not None:
                self._sender.receive(reply, now)
                has_progress = True
            if has_progress and frame is not None:
                link.wait(deadline - now)
        session = self._sender.boot, self._sender.seals
        if session != self._last_session:
            # Another exporter may lack what is sent only once; folded items have no requests in flight.
            if self._last_session[0] is not None and self._current_state is not None:
                self._queue.entries.append(self._current_state)
            self._last_session = session
        if self._sender.complaint and not self.refused:
            self._warn(
                "the exporter at %s refuses the stream: %s", self._endpoint, self._sender.complaint
            )

    def _finish(self) -> None:
        """Drain until the deadline if there is an exporter, then send a Bye."""
        if self.refused:
            log.warning("sidestep: sending has stopped: %s", self._sender.complaint)
            self._queue.close()
            return
        if self._periodic_items is not None:
            self._queue.entries.append(self._periodic_items)
        self._encode()
        deadline = self._deadline
        if self._sender.boot is None:
            deadline = min(time.monotonic() + CONNECT_TIMEOUT, deadline)
        # An exporter that has answered may have closed all connections, and takes the rest soon.
        while time.monotonic() < deadline:
            self._connect()
            if self._link.ready:
                # It may not answer until it knows that the process before this one has ended (R10).
                deadline = self._deadline
            self._pump()
            if self._sender.drained or self.refused:
                break
            time.sleep(0.005)
        if self.connected and self._link.send(self._sender.bye("closed")):
            # The exporter's answer confirms the Bye.
            self._link.wait(self._deadline - time.monotonic())
            self._link.close(self._deadline - time.monotonic())

    def _warn(self, text: str, *args: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now - self._warned_at >= WARNING_INTERVAL:
            self._warned_at = now
            log.warning(f"sidestep: {text}", *args, exc_info=exc_info)  # noqa: G004
