"""Renders that concurrent and closely following requests share, and their gzip, made in a thread."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import zlib
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, Generic, TypeVar

try:
    from isal import isal_zlib
except ImportError:
    _library: Any = zlib
    COMPRESSOR = "zlib"
else:
    _library = isal_zlib
    COMPRESSOR = "isal"

LEVEL = 1
"""A scrape is read once: a higher level costs more time than the smaller page saves."""
RUN = 100
"""Parts to compress at once: many are short."""
GZIP = 16 + zlib.MAX_WBITS
"""``wbits`` of a gzip header and trailer."""


def compress(parts: Sequence[bytes]) -> list[bytes]:
    """Return ``parts`` as one gzip member, in parts again."""
    squeeze = _library.compressobj(LEVEL, zlib.DEFLATED, GZIP)
    runs = (b"".join(parts[start : start + RUN]) for start in range(0, len(parts), RUN))
    return [one for one in (*map(squeeze.compress, runs), squeeze.flush()) if one]


@dataclasses.dataclass(eq=False, slots=True)
class Body:
    """Parts of a page, which are never joined because pages are long; and their gzip, made on demand.

    Attributes:
        stamp: ``FinalScrape.stamp`` when the rendering began.
    """

    parts: Sequence[bytes]
    stamp: float = 0.0
    _packed: asyncio.Task[list[bytes]] | None = None

    async def packed(self) -> Sequence[bytes]:
        """Return the parts of the gzip."""
        if self._packed is None:
            self._packed = asyncio.create_task(asyncio.to_thread(compress, self.parts))
        # A client that disconnects must not cancel what others wait for.
        return await asyncio.shield(self._packed)


Key = TypeVar("Key", bound=Hashable)


class SharedRenders(Generic[Key]):
    """Renders by key, in flight or finished a moment ago."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._renders: dict[Key, asyncio.Task[Body]] = {}

    def __len__(self) -> int:
        return len(self._renders)

    async def get(self, key: Key, render: Callable[[], Coroutine[Any, Any, Body]]) -> Body:
        """Return the body of ``key``, from ``render`` if there is none."""
        task = self._renders.get(key)
        if task is None:
            task = self._renders[key] = asyncio.create_task(render())
            task.add_done_callback(functools.partial(self._expire, key))
        # A client that disconnects must not cancel the render that others wait for.
        return await asyncio.shield(task)

    def _expire(self, key: Key, task: asyncio.Task[Body]) -> None:
        """Drop a body once it is too old, and a failed render at once."""
        if task.cancelled() or task.exception() is not None:
            del self._renders[key]
        else:
            task.get_loop().call_later(self._seconds, self._renders.pop, key)
