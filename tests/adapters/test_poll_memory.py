"""Memory after requests that fail: what they read is gone, without a run of the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from exporters import Start, until
from polled import Polled, Says, head, polled, raw, stall
from sidestep_adapters.polling import http_client

SIZE = 1 << 20
BODY = b"x" * SIZE
REQUESTS = 30


def closing(*parts: bytes) -> Says:
    """Send the parts, and close the connection."""

    async def write(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await raw(*parts)(reader, writer)
        writer.close()

    return write


OK = b"HTTP/1.1 200 OK\r\n"
"""Without a media type, which every client accepts."""
FAILURES = {
    "cut": closing(OK + b"Content-Length: %d\r\n\r\n" % (2 * SIZE), BODY),
    "cut in a chunk": closing(OK + b"Transfer-Encoding: chunked\r\n\r\n200000\r\n", BODY),
    "too long": raw(OK + b"Content-Length: %d\r\n\r\n" % (SIZE + 1), BODY + b"\n"),
    "a long header": raw(OK + b"X: " + BODY),
    "an error": raw(head(SIZE, "500 Error"), BODY),
    "too many lines": raw(OK + b"Content-Length: 65000\r\n\r\n", b"\n" * 65000),
    "slow": stall(OK + b"Content-Length: %d\r\n\r\n" % (2 * SIZE), BODY),
}


@pytest.fixture
def traced() -> Iterator[None]:
    """Trace allocations while nothing is collected, as hardly anything is in a running exporter."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    yield
    tracemalloc.stop()
    gc.enable()


@pytest.mark.parametrize("says", FAILURES.values(), ids=FAILURES.keys())
@pytest.mark.usefixtures("traced")
async def test_failed_polls_keep_nothing(
    says: Says, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory after 30 polls is that after 10, of every kind of target."""
    monkeypatch.setattr(http_client, "MAX_BODY_BYTES", SIZE)
    # aiohttp keeps a response that arrives at the moment of the timeout until the next collection.
    options = f"interval=0.05,timeout={0.05 if says is FAILURES['slow'] else 10}"
    async with polled(says) as page, polled(says) as triton, polled(says) as llama:
        flags = {
            "scrape": (f"{page.url},{options}",),
            "triton": (f"{triton.url},{options}",),
            "engine": (f"llamacpp={llama.url},{options}",),
        }
        async with start(**flags):
            assert await grown(page, triton, llama) < 3 * SIZE


async def grown(*servers: Polled) -> int:
    """Return how much the traced memory grows from 10 requests of each server to 30."""
    found = []
    for count in (10, REQUESTS):
        await until(lambda: all(len(one.heads) >= count for one in servers), timeout=60)  # noqa: B023
        found.append(tracemalloc.get_traced_memory()[0])
    return found[1] - found[0]
