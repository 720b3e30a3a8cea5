"""The engine's end of a stream: a deque, and one daemon thread that does the rest.

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
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from random import Random
from typing import Protocol

import zmq

from sidestep.errors import ConfigError
from sidestep.session.folding import Folder
from sidestep.session.sender import Sender, State
from sidestep.transport.connection import connect
from sidestep.wire.items import Item, encode_item
from sidestep.wire.limits import MAX_ITEM_BYTES
from sidestep.wire.messages import EngineInfo
from sidestep_adapters import processes

log = logging.getLogger(__name__)

QUEUE_ITEMS = 4096
FLUSH = 0.05
SLICE = 1e-4
"""Seconds of encoding after which the publisher lets the engine have the interpreter."""
REST = 5e-4
FOLDING_REST = 1e-3
"""Likewise while items are folded, which takes tens of microseconds each."""
BACKLOG = 64
"""Queued items for which a slice grows by its length."""
URGENT = 1024
"""From which on it only lets the engine have the interpreter, and goes on."""
DRAIN = 2.0
"""Seconds that closing may take while the exporter still answers."""
GREETING = 0.5
"""Seconds of them to wait for an exporter that has not answered yet."""
COMPLAIN = 60.0
RETRY = 1.0
"""Seconds between two looks at key files that cannot be used."""
PATIENCE = 30.0
"""Seconds without any answer after which a new socket may have more luck."""

Socket = zmq.Socket[bytes]
Later = Callable[[], Iterable[Item]]
"""Makes items in the publisher thread, from values of its own."""


class Notes(Protocol):
    """What the engine's threads noted down, to become items in the publisher's."""

    @property
    def lost(self) -> int:
        """How many found no place, so far."""

    def __len__(self) -> int: ...

    def items(self) -> Iterable[Item]:
        """The items of a slice of them, which are forgotten."""

    def clear(self) -> None:
        """Forget all."""

    def close(self) -> None:
        """Forget all, and take no more."""


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
        self._notes = notes
        self._flush = flush
        self._queue: deque[Item | Later] = deque()
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """By the number of items that are to be safe first."""
        self._overflowed = 0
        self._lost = 0
        """Of the notes lost, those that are counted."""
        self._encoding = False
        self._room = QUEUE_ITEMS
        self._extra_at = 0.0
        self._told: tuple[int | None, int] = (None, 0)
        self._thread: threading.Thread | None = None
        self._complained_at = -COMPLAIN
        self._opened_at = 0.0
        self._closed = False
        self._start()
        processes.enter(self)

    def push(self, item: Item | Later) -> None:
        """Queue ``item``, which must own its values; where the queue is full, count it."""
        if self._thread is None:
            self._revive()
        if len(self._queue) < self._room:
            self._queue.append(item)
        else:
            self._overflowed += 1

    def fail(self, what: str) -> None:
        """Count a record that could not be sent as it was; say so, and why, once a minute."""
        self.errors += 1
        self._complain("%s: %d so far", what, self.errors, exc_info=sys.exc_info()[0] is not None)

    def describe(self, engines: Sequence[EngineInfo]) -> None:
        """Replace what the stream says about its engines; known ones keep their index."""
        self._engines = list(engines)
        self._described.set()

    def after(self, then: Callable[[], None]) -> None:
        """Call ``then``, in the publisher's thread, once all that was said before is safe."""
        self._queue.append(partial(self._wait, then))

    @property
    def queued(self) -> int:
        """Items that are not encoded yet."""
        return len(self._queue)

    @property
    def held(self) -> int:
        """Bytes that are encoded and not known to outlive the exporter."""
        return self._sender.held_bytes

    @property
    def drained(self) -> bool:
        """Whether all that was pushed before the last flush has arrived, and is safe there."""
        # In this order: what has left the queue is being encoded, or is the sender's.
        return self._is_empty() and not self._encoding and self._sender.drained

    @property
    def connected(self) -> bool:
        """Whether the exporter has answered."""
        return self._sender.state is State.STREAMING

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
        return self._sender.dropped + self._overflowed

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
        processes.leave_alone(self._sender, self._thread, self._stop, self._described)
        self._thread = None
        self._queue = deque()
        self._waiting = deque()
        if self._notes is not None:
            self._notes.clear()

    def _start(self) -> None:
        incarnation = secrets.randbits(63)
        jitter = Random(incarnation)  # noqa: S311 - of reconnects
        self._folder = Folder()
        self._sender = Sender(self._stream, incarnation, self._engines, jitter, self._folder)
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
        self._overflowed = self.errors = 0
        self._room = QUEUE_ITEMS
        self._told = (None, 0)
        self._closed = False
        self._start()

    def _run(self) -> None:
        context = zmq.Context()
        socket: Socket | None = None
        self._prepare()
        while not self._stop.wait(self._flush) and not self.refused:
            try:
                if socket is None:
                    socket = self._connect(context)
                self._work(socket)
            except ConfigError as error:
                # Keys that cannot be used: files may yet appear, so try again, but never without.
                self._complain("nothing is sent: %s", error)
                self._stop.wait(RETRY)
            except Exception:  # noqa: BLE001 - nothing here may ever reach the engine
                self.fail("publishing failed")
                self._sender.reopen = True
            if self._sender.reopen:
                if socket is not None:
                    socket.close(linger=0)
                    socket = None
                self._sender.reopened()
        try:
            socket = socket or self._connect(context)
            self._finish(socket)
        except ConfigError as error:
            self._complain("nothing is sent: %s", error)
        except Exception:  # noqa: BLE001 - likewise
            self.fail("closing failed")
        if socket is not None:
            socket.close(linger=0)
        context.term()

    def _prepare(self) -> None:
        try:
            self._folder.prepare(self._engines)
        except Exception:  # noqa: BLE001 - what cannot be folded will be counted as dropped
            self.fail("nothing can be folded")

    def _work(self, socket: Socket) -> None:
        """One flush."""
        if not self.connected and time.monotonic() - self._opened_at > PATIENCE:
            # After some errors, such as at a port that wants a key, libzmq does not try again.
            self._sender.reopen = True
            return
        if self._extra is not None and time.monotonic() >= self._extra_at:
            self._extra_at = time.monotonic() + 1.0
            self._queue.append(self._extra)
        if not self._is_idle():
            self._encode()
            self._pump(socket)
        if self._waiting:
            self._settle()

    def _wait(self, then: Callable[[], None]) -> Iterable[Item]:
        self._waiting.append((self._sender.added, then))
        return ()

    def _settle(self) -> None:
        """Until a Hello is answered, the exporter may not know what it says."""
        settled = self._sender.settled if self.connected and not self._described.is_set() else -1
        while self._waiting and self._waiting[0][0] <= settled:
            self._waiting.popleft()[1]()

    def _give_up(self) -> None:
        """Another process has the stream's name: say so once, and take nothing any more."""
        log.warning("sidestep: nothing is sent any more: %s", self._sender.complaint)
        self._room = 0
        self._overflowed += len(self._queue)
        self._queue.clear()
        if self._notes is not None:
            self._notes.close()

    def _is_idle(self) -> bool:
        """Whether this flush can be left out; a publisher without work costs next to nothing."""
        return (
            self._is_empty()
            and not self._described.is_set()
            and self._sender.errors == self.errors
            and not self._overflowed
            and self._sender.idle(time.monotonic())
        )

    def _is_empty(self) -> bool:
        """Whether nothing waits to be encoded."""
        return not self._queue and not self._notes

    def _connect(self, context: zmq.Context[Socket]) -> Socket:
        self._opened_at = time.monotonic()
        # Without IMMEDIATE, frames would queue for, and die with, a connection never made.
        return connect(
            context,
            self._endpoint,
            (zmq.IMMEDIATE, 1),
            (zmq.SNDHWM, 64),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HEARTBEAT_IVL, 5000),
            (zmq.HEARTBEAT_TIMEOUT, 15000),
        )

    def _encode(self) -> None:
        """Encode what is queued, in slices: the interpreter belongs to the engine."""
        self._encoding = True
        sender = self._sender
        started = time.perf_counter()
        for _ in range(len(self._queue)):
            self._add(self._queue.popleft())
            started = self._rest(started)
        for _ in range(len(self._notes or ())):
            if not self._notes:
                break
            self._add(self._notes.items)
            started = self._rest(started)
        lost = 0 if self._notes is None else self._notes.lost
        sender.dropped += self._overflowed + lost - self._lost
        self._overflowed, self._lost = 0, lost
        sender.errors = self.errors
        self._encoding = False

    def _add(self, entry: Item | Later) -> None:
        encoded: list[bytes] = []
        try:
            items = entry() if callable(entry) else (entry,)
            encoded += map(encode_item, items)
        except Exception:  # noqa: BLE001 - an odd value costs its own record
            self.fail("an item could not be encoded")
        # Before its items: they may be of an engine that is new.
        self._tell_engines()
        fitting = [item for item in encoded if len(item) <= MAX_ITEM_BYTES]
        self._sender.dropped += len(encoded) - len(fitting)
        self._sender.add(fitting)

    def _tell_engines(self) -> None:
        if self._described.is_set():
            self._described.clear()
            self._sender.describe(self._engines)

    def _rest(self, started: float) -> float:
        """Let the engine have the interpreter if it is time to; when this slice has begun."""
        behind = len(self._queue)
        # Behind a thread that never rests each rest costs it 5 ms: a backlog takes longer slices.
        if time.perf_counter() - started <= SLICE * (1 + behind // BACKLOG):
            return started
        # On a machine that has no core to spare a rest lasts as long as others like.
        rest = FOLDING_REST if self._sender.folding else REST
        time.sleep(rest if behind < URGENT else 0)
        return time.perf_counter()

    def _pump(self, socket: Socket) -> None:
        """Send what may be sent, read what came, until neither goes on."""
        self._tell_engines()
        answered = True
        while answered:
            answered = False
            now = time.monotonic()
            while (frame := self._sender.next_frame(now)) is not None:
                try:
                    socket.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._sender.sent(now)
            while (answer := _receive(socket)) is not None:
                self._sender.receive(answer, now)
                answered = True
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
                self._queue.append(self._again)
            self._told = told

    def _finish(self, socket: Socket) -> None:
        """Drain until the deadline while the exporter answers, then say goodbye."""
        if self.refused:
            self._give_up()
            return
        if self._extra is not None:
            self._queue.append(self._extra)
        self._encode()
        absent = time.monotonic() + GREETING
        while time.monotonic() < (self._deadline if self.connected else absent):
            self._pump(socket)
            if self._sender.drained or self._sender.reopen or self.refused:
                break
            time.sleep(0.005)
        if self.connected:
            socket.send(self._sender.bye("closed"), zmq.NOBLOCK)
            # Its answer is the proof that linger 0 does not cut the goodbye off.
            socket.poll(max(0, int((self._deadline - time.monotonic()) * 1000)))

    def _complain(self, text: str, *args: object, exc_info: bool = False) -> None:
        now = time.monotonic()
        if now - self._complained_at >= COMPLAIN:
            self._complained_at = now
            log.warning(f"sidestep: {text}", *args, exc_info=exc_info)  # noqa: G004


def _receive(socket: Socket) -> bytes | None:
    # Asked first: there is rarely an answer, and an exception costs more than the question.
    if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
        return None
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None
