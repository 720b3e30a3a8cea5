"""Gzip of pages: at level 1, in parts, and so that what is packed once can be on many pages."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

try:
    from isal import isal_zlib
except ImportError:
    _library: Any = zlib
    NAME = "zlib"
    SHORT = 8 << 10
    """Bytes."""
else:
    _library = isal_zlib
    NAME = "isal"
    SHORT = 128 << 10

LEVEL = 1
"""Read at once and thrown away: who compresses more waits longer for less."""
_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"
"""RFC 1952: deflate, no name, no time, the fastest, of no system."""


class Packed(NamedTuple):
    """Deflated text that others can follow in one gzip member.

    Attributes:
        parts: Whole bytes, none the last of a stream.
        crc: Of the text.
        size: Of the text.
        spent: CPU seconds that it took.
    """

    parts: Sequence[bytes]
    crc: int
    size: int
    spent: float


NOTHING = Packed((), 0, 0, 0.0)


def deflated(texts: Sequence[bytes], before: Packed = NOTHING, *, last: bool = False) -> Packed:
    """``texts`` deflated, behind ``before`` where they follow it; nothing is packed twice.

    Args:
        texts: In their order.
        before: What they follow: it is not packed again.
        last: Whether nothing follows, so that it is a whole gzip file.
    """
    started = time.thread_time()
    squeeze = _library.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    parts, crc, size = list(before.parts), before.crc, before.size
    for text in texts:
        crc = _library.crc32(text, crc)
        size += len(text)
        parts.append(squeeze.compress(text))
    parts.append(squeeze.flush(zlib.Z_FINISH if last else zlib.Z_FULL_FLUSH))
    if last:
        end = crc.to_bytes(4, "little") + (size & 0xFFFFFFFF).to_bytes(4, "little")
        parts = [_HEAD, *parts, end]
    parts = [part for part in parts if part]
    return Packed(parts, crc, size, time.thread_time() - started)


async def pack(texts: Sequence[bytes], before: Packed = NOTHING, *, last: bool = False) -> Packed:
    """Likewise, off the event loop; but what is ``SHORT`` takes less there than a thread to wake up."""
    if sum(map(len, texts)) <= SHORT:
        return deflated(texts, before, last=last)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(None, lambda: deflated(texts, before, last=last))


class Body:
    """Parts of a page, and the same in gzip: made once, for whoever asks first, and kept."""

    def __init__(self, parts: Sequence[bytes], before: Body | None = None) -> None:
        self._own = parts
        self._before = before
        self._packed: asyncio.Task[Packed] | None = None

    @property
    def parts(self) -> Sequence[bytes]:
        """All of them."""
        return [*self._before.parts, *self._own] if self._before else self._own

    async def packed(self, *, last: bool = True) -> Packed:
        """All of them in gzip; of what others follow nothing is packed again."""
        if self._packed is None or self._has_failed(self._packed):
            self._packed = asyncio.create_task(self._pack(last=last))
        # One who hangs up must not take it from others.
        return await asyncio.shield(self._packed)

    @staticmethod
    def _has_failed(task: asyncio.Task[Packed]) -> bool:
        """Whether it could not be packed, for want of memory maybe: the next who asks tries again."""
        return task.done() and (task.cancelled() or task.exception() is not None)

    async def _pack(self, *, last: bool) -> Packed:
        if self._before is None:
            return await pack(self._own, last=last)
        return await pack(self._own, await self._before.packed(last=False), last=last)
