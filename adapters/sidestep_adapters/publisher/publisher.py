"""The engine's end of a stream: a queue, and one daemon thread that does the rest.

``push`` appends to a deque and returns: no encoding, no lock, no system call and
no exception on the thread that serves requests. The publisher thread encodes,
sends, retransmits and reads acknowledgements by the rules of ``session.sender``.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from random import Random

from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import Item
from sidestep.errors import ConfigError, RunError
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.sender import Sender, State
from sidestep.transport.link import Link
from sidestep_adapters.publisher import process_hooks as processes
from sidestep_adapters.publisher.queue import Later, Notes, Pending

log = logging.getLogger(__name__)

FLUSH = 0.05
DRAIN = 2.0
"""Seconds that closing may take while the exporter still answers."""
GREETING = 0.5
"""Seconds of them to wait for an exporter that has not answered yet."""
COMPLAIN = 60.0
PATIENCE = 30.0
"""Seconds without any answer after which a new connection may have more luck."""
HANDSHAKE_STEPS, HANDSHAKE_WAIT = 4, 0.01
"""How often, and how many seconds each time, a flush waits for a handshake to go on."""


class Publisher:
    """Sends one process's items to the exporter.

    Args:
        endpoint: The exporter's.
        stream: Name of this process's stream, stable over restarts.
        engines: What the stream feeds.
        extra: Makes more items about once a second, in the publisher's thread.
        again: Makes the items that a restarted exporter needs to hear again.
        notes: Taken in with every flush.

    Attributes:
        errors: Records that could not be translated or encoded.
    """

    def __init__(
        self,
        endpoint: str,
        stream: str,
        engines: Sequence[EngineInfo],
        *,
        extra: Later | None = None,
        again: Later | None = None,
        notes: Notes | None = None,
        flush: float = FLUSH,
    ) -> None:
        self.errors = 0
        self._endpoint = endpoint
        self._stream = stream
        self._engines = list(engines)
        self._extra = extra
        self._again = again
        self._flush = flush
        self._pending = Pending(notes, self.fail)
        self._extra_at = 0.0
        self._told: tuple[int | None, int] = (None, 0)
        self._thread: threading.Thread | None = None
        self._complained_at = -COMPLAIN
        self._closed = False
        self._start()
        processes.enter(self)

    def push(self, item: Item | Later) -> None:
        """Queue ``item``, which must own its values; where the queue is full, count it."""
        if self._thread is None:
            self._revive()
        pending = self._pending
        if len(pending.queue) < pending.room:
            pending.queue.append(item)
        else:
            pending.overflowed += 1

    def fail(self, what: str) -> None:
        """Count a record that could not be sent as it was; say so, and why, once a minute."""
        self.errors += 1
        self._complain("%s: %d so far", what, self.errors, exc_info=sys.exc_info()[0] is not None)

    def describe(self, engines: Sequence[EngineInfo]) -> None:
        """Replace what the stream says about its engines; known ones keep their index."""
        self._engines = list(engines)
        self._described.set()

    @property
    def queued(self) -> int:
        """Items that are not encoded yet."""
        return len(self._pending.queue)

    @property
    def held(self) -> int:
        """Bytes that are encoded and not known to outlive the exporter."""
        return self._sender.held_bytes

    @property
    def drained(self) -> bool:
        """Whether all that was pushed before the last flush has arrived, and is safe there."""
        # In this order: what has left the queue is being encoded, or is the sender's.
        pending = self._pending
        return not pending and not pending.encoding and self._sender.drained

    @property
    def connected(self) -> bool:
        """Whether the exporter has answered."""
        return self._sender.state is State.STREAMING

    @property
    def problem(self) -> str:
        """Why there is no connection to the exporter; empty while nothing is known to be wrong."""
        return self._link.problem

    @property
    def kv_sample_rate(self) -> float | None:
        """Share of KV blocks to follow, as the exporter said last; ``None``: it said nothing.

        May be read in every step: two attributes, no lock.
        """
        return self._sender.kv_sample_rate

    @property
    def refused(self) -> bool:
        """Whether another process has taken the stream's name."""
        return self._sender.state is State.STOPPED

    @property
    def dropped(self) -> int:
        """Items given up so far."""
        return self._sender.dropped + self._pending.overflowed

    @property
    def folded(self) -> int:
        """Items added up so far, because the ring was full."""
        return self._sender.folded

    def close(self, timeout: float = DRAIN) -> None:
        """Send what is queued, say goodbye, stop; at most ``timeout`` seconds, at most once."""
        if self._closed or self._thread is None:
            return
        self._closed = True
        self._deadline = time.monotonic() + timeout
        self._stop.set()
        self._thread.join(timeout + 1.0)

    def after_fork(self) -> None:
        """In a forked child: the thread is the parent's, and so is all that is queued."""
        processes.leave_alone(self._sender, self._link, self._thread, self._stop, self._described)
        self._thread = None
        self._pending.clear()

    def _start(self) -> None:
        incarnation = secrets.randbits(63)
        jitter = Random(incarnation)  # noqa: S311 - of reconnects
        self._folder = ItemFolder()
        self._sender = Sender(self._stream, incarnation, self._engines, jitter, self._folder)
        self._link = Link(self._endpoint, jitter)
        self._stop = threading.Event()
        self._described = threading.Event()
        self._deadline = 0.0
        thread = threading.Thread(target=self._run, name="sidestep-publisher", daemon=True)
        self._thread = thread
        processes.started(self)
        thread.start()

    def _revive(self) -> None:
        """A forked child pushes for the first time: it is a stream of its own."""
        self._stream = f"{self._stream}/{os.getpid()}"
        self.errors = 0
        self._pending.renew()
        self._told = (None, 0)
        self._closed = False
        self._start()

    def _run(self) -> None:
        link = self._link
        self._prepare()
        while not self._stop.wait(self._flush) and not self.refused:
            try:
                self._work(link)
            except (ConfigError, RunError) as error:
                # Keys that cannot be used, or no descriptors: that may change, so try again.
                self._complain("nothing is sent: %s", error)
            except Exception:  # noqa: BLE001 - nothing here may ever reach the engine
                self.fail("publishing failed")
                self._sender.reopen = True
        try:
            self._finish(link)
        except (ConfigError, RunError) as error:
            self._complain("nothing is sent: %s", error)
        except Exception:  # noqa: BLE001 - likewise
            self.fail("closing failed")
        link.close()

    def _prepare(self) -> None:
        try:
            self._folder.prepare(self._engines)
        except Exception:  # noqa: BLE001 - what cannot be folded will be counted as dropped
            self.fail("nothing can be folded")

    def _work(self, link: Link) -> None:
        """One flush."""
        self._connect(link)
        if self._extra is not None and time.monotonic() >= self._extra_at:
            self._extra_at = time.monotonic() + 1.0
            self._pending.queue.append(self._extra)
        if not self._is_idle():
            self._encode()
            self._pump(link)

    def _give_up(self) -> None:
        """Another process has the stream's name: say so once, and take nothing any more."""
        log.warning("sidestep: nothing is sent any more: %s", self._sender.complaint)
        self._pending.close()

    def _is_idle(self) -> bool:
        """Whether this flush can be left out; a publisher without work costs next to nothing."""
        return (
            not self._pending
            and not self._described.is_set()
            and self._sender.errors == self.errors
            and not self._pending.overflowed
            and self._sender.idle(time.monotonic())
        )

    def _connect(self, link: Link) -> None:
        """Keep the link connected; on a new connection the sender says Hello again.

        Raises:
            ConfigError: The endpoint or the keys cannot be used.
            RunError: This process has no file descriptors left.
        """
        now = time.monotonic()
        has_ended = link.advance(now)
        for _ in range(HANDSHAKE_STEPS):
            if not link.ready:
                link.wait(HANDSHAKE_WAIT)
                has_ended |= link.advance(time.monotonic())
        if has_ended:
            self._sender.reopened()
        elif self._sender.reopen or (not self.connected and now - link.opened_at > PATIENCE):
            # After some errors, such as at a port that wants a key, libzmq does not try again.
            link.drop(now)
            self._sender.reopened()

    def _encode(self) -> None:
        self._pending.encode(self._sender, self._tell_engines)
        self._sender.errors = self.errors

    def _tell_engines(self) -> None:
        if self._described.is_set():
            self._described.clear()
            self._sender.describe(self._engines)

    def _pump(self, link: Link) -> None:
        """Send what may be sent, read what came, until neither goes on."""
        self._tell_engines()
        deadline = time.monotonic() + FLUSH
        goes_on = True
        while goes_on:
            goes_on = False
            now = time.monotonic()
            while (frame := self._sender.next_frame(now)) is not None:
                if not link.send(frame):
                    # The kernel's buffer is full, or there is no connection.
                    goes_on = link.ready and now < deadline
                    break
                self._sender.sent(now)
            while (answer := link.receive(now)) is not None:
                self._sender.receive(answer, now)
                goes_on = True
            if goes_on and frame is not None:
                link.wait(deadline - now)
        self._tell_again()
        if self._sender.complaint and not self.refused:
            self._complain("the exporter at %s refuses: %s", self._endpoint, self._sender.complaint)

    def _tell_again(self) -> None:
        """Say anew what is said but once.

        Another exporter than before may not have heard it; and what was folded has no
        requests in flight, which the exporter goes on with from here.
        """
        told = self._sender.boot, self._sender.seals
        if told != self._told:
            if self._told[0] is not None and self._again is not None:
                self._pending.queue.append(self._again)
            self._told = told

    def _finish(self, link: Link) -> None:
        """Drain until the deadline while the exporter answers, then say goodbye."""
        if self.refused:
            self._give_up()
            return
        if self._extra is not None:
            self._pending.queue.append(self._extra)
        self._encode()
        absent = min(time.monotonic() + GREETING, self._deadline)
        while time.monotonic() < (self._deadline if self.connected else absent):
            self._connect(link)
            self._pump(link)
            if self._sender.drained or self.refused:
                break
            time.sleep(0.005)
        if self.connected and link.send(self._sender.bye("closed")):
            # Its answer shows that the Bye has arrived.
            link.wait(max(0.0, self._deadline - time.monotonic()))
            link.close(max(0.0, self._deadline - time.monotonic()))

    def _complain(self, text: str, *args: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now - self._complained_at >= COMPLAIN:
            self._complained_at = now
            log.warning(f"sidestep: {text}", *args, exc_info=exc_info)  # noqa: G004
