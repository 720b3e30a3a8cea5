"""A stream proxy that misbehaves in one way at a time.

Endpoints are ZMQ's: ``tcp://host:port`` and ``ipc://path``; ZMQ's ipc is an ordinary
Unix socket, so the same faults work for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

Mode = Literal["pass", "delay", "drop", "half_open", "reset", "throttle", "refuse"]
MODES: tuple[Mode, ...] = ("pass", "delay", "drop", "half_open", "reset", "throttle", "refuse")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

CHUNK = 4096
DELAY = (0.02, 0.2)
"""Least and most seconds."""
CUT = 3000
"""Most bytes of a connection that ``drop`` and ``reset`` let through before they end it."""
BYTES_A_SECOND = 64 << 10
HOLD = (0.3, 3.0)
"""Seconds for which the schedule keeps a mode."""


@dataclasses.dataclass(slots=True, eq=False)
class _Link:
    """One connection through the proxy.

    Attributes:
        left: Bytes until its end, if the mode ends it.
        deaf: Bytes of the near end are discarded from now on: no network lets bytes through
            after some that it lost.
    """

    near: Streams
    far: Streams
    left: int
    deaf: bool = False


class Proxy:
    """Proxy that listens at ``near`` and connects to ``far``.

    ``delay`` holds each piece back, with jitter. ``drop`` ends a connection inside a
    frame, ``reset`` does so with an RST. ``half_open`` accepts connections, discards what the
    near end sends, and passes the far end's answers. ``throttle`` lets some bytes a second
    through. ``refuse`` accepts no connection, and ends all others.

    Attributes:
        mode: The present mode; set it at any time.
        counts: Connections by the mode in which they came, and ends by the mode that caused them.
    """

    def __init__(self, near: str, far: str, seed: int = 1) -> None:
        self.near, self.far = near, far
        self.counts: Counter[str] = Counter()
        self._mode: Mode = "pass"
        self._random = random.Random(seed)
        # Separate, because what connections draw depends on when they come.
        self._schedule = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._links: dict[_Link, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def mode(self) -> Mode:
        """The present mode."""
        return self._mode

    async def start(self) -> None:
        """Listen; for port 0, ``near`` then has the actual port."""
        if self.near.startswith("ipc://"):
            path = self.near.removeprefix("ipc://")
            Path(path).unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._accept, path)
            return
        host, _, port = self.near.removeprefix("tcp://").rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        found = self._server.sockets[0].getsockname()[1]
        self.near = f"tcp://{host}:{found}"

    async def close(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            self._end(link)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set(self, mode: Mode) -> None:
        """Misbehave in this way from now on, on existing connections as well."""
        self._mode = mode
        for link in list(self._links):
            link.left = self._random.randrange(CUT)
            if mode == "refuse":
                self._end(link)

    async def follow(self, seconds: float, modes: Sequence[Mode] = MODES) -> None:
        """Switch among ``modes`` by the seed for some time, then pass everything."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while (left := until - loop.time()) > 0:
            self.set(self._schedule.choice(modes))
            await asyncio.sleep(min(self._schedule.uniform(*HOLD), left))
        self.set("pass")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve((reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, near: Streams) -> None:
        self.counts[f"came in {self._mode}"] += 1
        if self._mode == "refuse":
            near[1].transport.abort()
            return
        try:
            far = await self._dial()
        except OSError:
            near[1].transport.abort()
            return
        link = _Link(near, far, self._random.randrange(CUT))
        self._links[link] = None
        try:
            await asyncio.gather(
                self._carry(link, near[0], far[1], to_far=True),
                self._carry(link, far[0], near[1], to_far=False),
            )
        except OSError:
            self.counts["broken"] += 1
        finally:
            self._end(link)

    async def _dial(self) -> Streams:
        if self.far.startswith("ipc://"):
            return await asyncio.open_unix_connection(self.far.removeprefix("ipc://"))
        host, _, port = self.far.removeprefix("tcp://").rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _carry(
        self, link: _Link, source: asyncio.StreamReader, to: asyncio.StreamWriter, *, to_far: bool
    ) -> None:
        """Forward one direction until either end closes; then close both."""
        while piece := await source.read(CHUNK):
            mode = self._mode
            if mode == "delay":
                await asyncio.sleep(self._random.uniform(*DELAY))
            elif mode == "throttle":
                await asyncio.sleep(len(piece) / BYTES_A_SECOND)
            if to_far and (link.deaf or mode == "half_open"):
                link.deaf = True
                self.counts["swallowed bytes"] += len(piece)
                continue
            if mode in ("drop", "reset"):
                link.left -= len(piece)
                if link.left < 0:
                    to.write(piece[: link.left])
                    self._cut(link, mode)
                    return
            to.write(piece)
            await to.drain()
        self._end(link)

    def _cut(self, link: _Link, mode: Mode) -> None:
        self.counts[f"ended by {mode}"] += 1
        for _, writer in (link.near, link.far):
            end = writer.get_extra_info("socket")
            if mode == "reset" and end is not None and end.family != socket.AF_UNIX:
                # Linger 0: the kernel throws away what is queued and sends RST instead of FIN.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            else:
                writer.close()
        self._links.pop(link, None)

    def _end(self, link: _Link) -> None:
        self._links.pop(link, None)
        for _, writer in (link.near, link.far):
            writer.close()


class ProxyThread:
    """A proxy in a thread with an event loop of its own."""

    def __init__(self, near: str, far: str, seed: int) -> None:
        self.proxy = Proxy(near, far, seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.proxy.start(), self._loop).result(10.0)

    def begin(self, seconds: float) -> None:
        """Misbehave by the schedule for some time."""
        asyncio.run_coroutine_threadsafe(self.proxy.follow(seconds), self._loop)

    def close(self) -> None:
        """Close everything."""
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.proxy.close(), self._loop).result(10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()
