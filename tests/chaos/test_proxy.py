"""The modes of the chaos proxy over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from chaos import proxy as chaos_proxy
from chaos.proxy import CUT, Proxy, Streams

from exporters import until

Connect = Callable[[], AbstractAsyncContextManager[tuple[Proxy, Streams]]]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send back all that is received."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture(params=["tcp", "ipc"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    """Return a function that runs an echo server behind a proxy, with a connection to it."""

    @contextlib.asynccontextmanager
    async def run() -> AsyncIterator[tuple[Proxy, Streams]]:
        if request.param == "ipc":
            server = await asyncio.start_unix_server(echo, tmp_path / "far")
            proxy = Proxy(f"ipc://{tmp_path}/near", f"ipc://{tmp_path}/far", 1)
        else:
            server = await asyncio.start_server(echo, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            proxy = Proxy("tcp://127.0.0.1:0", f"tcp://127.0.0.1:{port}", 1)
        await proxy.start()
        async with asyncio.timeout(20):
            streams = await dial(proxy)
            yield proxy, streams
            streams[1].close()
            await proxy.close()
            server.close()

    return run


async def dial(proxy: Proxy) -> Streams:
    """Connect to the proxy."""
    if proxy.near.startswith("ipc://"):
        return await asyncio.open_unix_connection(proxy.near.removeprefix("ipc://"))
    host, _, port = proxy.near.removeprefix("tcp://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def echoed(streams: Streams, data: bytes) -> bytes:
    """Send ``data`` and return the echo, or nothing if the connection ends before."""
    streams[1].write(data)
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        return await streams[0].readexactly(len(data))
    return b""


async def test_pass_transfers_everything(connect: Connect) -> None:
    """Mode ``pass`` transfers any amount both ways."""
    async with connect() as (_, streams):
        data = bytes(range(256)) * 400

        assert await echoed(streams, data) == data


async def test_delay_holds_data_back(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode ``delay`` delays data in both directions, and loses none."""
    monkeypatch.setattr(chaos_proxy, "DELAY", (0.05, 0.06))
    async with connect() as (proxy, streams):
        proxy.set("delay")
        loop = asyncio.get_running_loop()
        begin = loop.time()

        assert await echoed(streams, b"ping") == b"ping"
        assert loop.time() - begin >= 0.1


@pytest.mark.parametrize("mode", ["drop", "reset"])
async def test_drop_and_reset_end_a_connection(connect: Connect, mode: chaos_proxy.Mode) -> None:
    """Modes ``drop`` and ``reset`` end a connection in the middle of data; the next one works."""
    async with connect() as (proxy, streams):
        assert await echoed(streams, b"x") == b"x"
        proxy.set(mode)
        assert await echoed(streams, bytes(2 * CUT)) == b""
        assert proxy.counts[f"ended by {mode}"] == 1
        proxy.set("pass")
        again = await dial(proxy)

        assert await echoed(again, b"ping") == b"ping"
        again[1].close()


async def test_reset_sends_an_rst(connect: Connect) -> None:
    """Mode ``reset`` sends an RST over TCP; a Unix socket has none."""
    async with connect() as (proxy, streams):
        assert await echoed(streams, b"x") == b"x"
        proxy.set("reset")
        streams[1].write(bytes(2 * CUT))
        if proxy.near.startswith("tcp://"):
            with pytest.raises(ConnectionResetError):
                await streams[0].read()
        else:
            assert len(await streams[0].read()) < 2 * CUT


async def test_half_open_discards_data(connect: Connect) -> None:
    """Mode ``half_open`` discards the data of a connection for good; new ones work."""
    async with connect() as (proxy, streams):
        proxy.set("half_open")
        streams[1].write(b"lost")
        await until(lambda: proxy.counts["swallowed bytes"] > 0)
        proxy.set("pass")
        streams[1].write(b"more")
        await until(lambda: proxy.counts["swallowed bytes"] >= len(b"lostmore"))
        again = await dial(proxy)

        assert await echoed(again, b"ping") == b"ping"
        again[1].close()


async def test_throttle_limits_bytes_per_second(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode ``throttle`` limits bytes per second, and loses none."""
    monkeypatch.setattr(chaos_proxy, "BYTES_A_SECOND", 100_000)
    async with connect() as (proxy, streams):
        proxy.set("throttle")
        loop = asyncio.get_running_loop()
        begin = loop.time()
        data = bytes(20_000)

        assert await echoed(streams, data) == data
        assert loop.time() - begin >= 0.2


async def test_refuse_closes_and_refuses_connections(connect: Connect) -> None:
    """Mode ``refuse`` closes all connections and accepts none until the next mode."""
    async with connect() as (proxy, streams):
        assert await echoed(streams, b"x") == b"x"
        proxy.set("refuse")
        assert await streams[0].read() == b""
        refused = await dial(proxy)
        assert await echoed(refused, b"ping") == b""
        proxy.set("pass")
        again = await dial(proxy)

        assert await echoed(again, b"ping") == b"ping"
        for one in (refused, again):
            one[1].close()


async def test_the_schedule_follows_the_seed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed decides the sequence of modes, and ``pass`` is the last one."""
    monkeypatch.setattr(chaos_proxy, "HOLD", (0.01, 0.02))
    seen: list[list[str]] = []
    for _ in range(2):
        async with connect() as (proxy, _):
            modes: list[str] = []
            monkeypatch.setattr(proxy, "set", modes.append)
            await proxy.follow(0.2)
            seen.append(modes)

    assert seen[0][-1] == seen[1][-1] == "pass"
    common = min(map(len, seen)) - 1
    assert seen[0][:common] == seen[1][:common]
    assert len(set(seen[0])) > 1
