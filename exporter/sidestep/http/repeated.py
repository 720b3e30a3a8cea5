"""Answers given again to who asks the same, byte for byte: a poll costs no parsing then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from aiohttp import HttpVersion11, web

Holds = Callable[[], bool]

MANY = 32
"""Kinds of requests whose answers are kept at once; routers of one kind ask alike."""
END = b"\r\n\r\n"
"""Of a request's head."""
LONGEST = 4096
"""Bytes of a request that is remembered; others are not repeated."""


def never() -> bool:
    """For answers that hold for nobody else."""
    return False


class LastingResponse(web.Response):
    """A short answer that may be given again, to who asks the same, while ``holds`` says so."""

    def __init__(self, parts: Sequence[bytes], headers: Mapping[str, str], holds: Holds) -> None:
        self.whole = b"".join(parts)
        self.holds = holds
        super().__init__(body=self.whole, headers=headers)


class _Kept(NamedTuple):
    answer: bytes
    holds: Holds


class Repeated:
    """What has been answered lately, by the bytes of the requests.

    The same bytes are the same request: method, path, what the client accepts and who it says
    it is are all in them.
    """

    def __init__(self) -> None:
        self._kept: dict[bytes, _Kept] = {}

    def answer(self, asked: bytes) -> bytes | None:
        """What the same request has got, head and body; None where that does not hold any more."""
        kept = self._kept.get(asked)
        if kept is None:
            return None
        if kept.holds():
            return kept.answer
        del self._kept[asked]
        return None

    def keep(self, asked: bytes, request: web.Request, response: LastingResponse) -> bool:
        """Give ``response``, which is sent, to who asks the same; whether that may be.

        Args:
            asked: The bytes of the request.
            request: What aiohttp has made of them.
            response: The answer to that.
        """
        if request.method != "GET" or not response.keep_alive or not response.holds():
            return False
        # What does not hold any more would keep its page.
        self._kept = {one: kept for one, kept in self._kept.items() if kept.holds()}
        if len(self._kept) >= MANY and asked not in self._kept:
            self._kept.pop(next(iter(self._kept)))
        self._kept[asked] = _Kept(_head(response) + response.whole, response.holds)
        return True

    def forget(self) -> None:
        """Whoever asks is to be looked at again."""
        self._kept.clear()


def is_plain(asked: bytes, request: web.Request) -> bool:
    """Whether ``asked`` is ``request`` and nothing else: after it all is as it was before."""
    return (
        request.method in {"GET", "HEAD"}
        and request.version == HttpVersion11
        and not request.body_exists
        and not {"Upgrade", "Expect"} & request.headers.keys()
        # Two requests in one piece are two.
        and asked.partition(END)[1:] == (END, b"")
    )


def _head(response: LastingResponse) -> bytes:
    """As aiohttp has written it, of the headers as they are after that."""
    lines = (f"{name}: {value}\r\n" for name, value in response.headers.items())
    return f"HTTP/1.1 200 OK\r\n{''.join(lines)}\r\n".encode()
