"""CURVE keys: authorization at the exporter's socket while it runs, and keys of senders."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from command_line import one_line, sidestep
from exporters import MAIN_RUN, Start, until
from key_ring import Ring
from peers import count, generated, publisher
from sidestep.app.exporter import Exporter
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Ack, EngineInfo, FromExporter, Hello, Nack
from sidestep.transport import keys
from sidestep.transport.access import Access
from sidestep.transport.keys import CLIENT_KEY, SERVER_KEY
from sidestep_adapters.publisher import publisher as push
from sidestep_adapters.recording.recorder import Tee
from socket_peers import Peer, batch, connect, step, tokens

DENIED = "sidestep_auth_denied_total"


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    """Keys of an exporter, in a directory of the test."""
    return Ring(tmp_path)


def hello(stream: str, *engines: str, incarnation: int = 1) -> Hello:
    """Return a Hello of a stream that feeds ``engines``."""
    infos = [EngineInfo(e, "vllm", {"engine": e, "model_name": "m"}) for e in engines]
    return Hello(VERSION, stream, incarnation, 1, 1, infos)


async def refused(peer: Peer, message: Hello) -> str:
    """Return the code and the detail with which the exporter refuses ``message``."""
    await peer.send(message)
    answer: FromExporter = await peer.receive()
    assert isinstance(answer, Nack), answer
    return f"{answer.code}: {answer.detail}"


async def test_a_key_is_accepted_as_soon_as_its_file_appears(
    ring: Ring, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Until then it is denied, counted and logged; an empty directory is logged at start."""
    late = ring.engine("late", admitted=False)
    async with start(**ring.flags) as exporter, ring.connect(exporter, late) as peer:
        assert "no engine can connect" in caplog.text
        await peer.send(hello("s", "s0"))
        await until(lambda: exporter.metrics.value(DENIED, "curve") >= 1)
        assert ring.text("late") in caplog.text
        assert not exporter.intake.receiver.streams
        (ring.authorized / "late.pub").write_text((ring.directory / "late.pub").read_text())
        await until(lambda: "s" in exporter.intake.receiver.streams)


async def test_a_removed_key_is_refused_while_it_is_connected(ring: Ring, start: Start) -> None:
    """Its frames are answered with the reason, its next connection is refused, and other keys go on."""
    bad, good = ring.engine("bad"), ring.engine("good")
    async with start(**ring.flags) as exporter, ring.connect(exporter, bad) as peer:
        await peer.send_hello()
        await peer.send(batch(1, step()))
        await until(lambda: tokens(exporter) == 1)
        ring.remove("bad")
        await until(lambda: len(exporter.intake.guard._keys or ()) == 1)
        for frame in (batch(2, step()), b"\xc1"):
            await peer.send(frame)
            while isinstance(answer := await peer.receive(), Ack):
                pass  # That of the first batch may come late.
            assert isinstance(answer, Nack)
            assert answer.code == "unauthorised"
        async with ring.connect(exporter, bad) as again:
            await again.send(batch(2, step()))
            await until(lambda: exporter.metrics.value(DENIED, "curve") >= 1)
        async with ring.connect(exporter, good) as other:
            await other.send_hello("s", incarnation=2)
            await other.send(batch(1, step(), incarnation=2))
            await until(lambda: tokens(exporter) == 2)

        assert exporter.metrics.value("sidestep_rejected_total", "unauthorised") == 2


async def test_a_key_cannot_use_names_of_another_key(ring: Ring, start: Start) -> None:
    """Nor can a local peer; once the key is removed its names are free."""
    a, b = ring.engine("a"), ring.engine("b")
    async with (
        start(**ring.flags) as exporter,
        ring.connect(exporter, a) as first,
        ring.connect(exporter, b) as second,
        connect(exporter.endpoints[1]) as local,
    ):
        await first.send_hello("s")
        assert (await refused(second, hello("s", "f", incarnation=2))).startswith("unauthorised: ")
        assert (await refused(second, hello("t", "s0", incarnation=2))).startswith("unauthorised: ")
        assert (await refused(local, hello("u", "s0", incarnation=3))).startswith("unauthorised: ")
        await first.send(batch(1, step()))
        await until(lambda: tokens(exporter) == 1)

        assert exporter.metrics.value("sidestep_rejected_total", "unauthorised") == 3
        assert list(exporter.intake.receiver.streams) == ["s"]
        ring.remove("a")
        await until(lambda: len(exporter.intake.guard._keys or ()) == 1)
        await second.send_hello("s", incarnation=2)


async def test_a_key_with_patterns_is_refused_other_engines(ring: Ring, start: Start) -> None:
    """The answer names the engine."""
    a = ring.engine("a", "prod/*")
    async with start(**ring.flags) as exporter, ring.connect(exporter, a) as peer:
        answer = await refused(peer, hello("s", "prod/x", "test/x"))
        assert answer.startswith("unauthorised: ")
        assert "this key may not feed engine test/x" in answer
        await peer.send_hello("prod/s")


async def test_throttling_is_by_key(ring: Ring, start: Start) -> None:
    """A new connection does not reset the count."""
    a = ring.engine("a")
    async with start(**ring.flags) as exporter:
        for round_number in range(1, 4):
            async with ring.connect(exporter, a) as peer:
                for _ in range(60):
                    await peer.send(b"\xc1")
                await until(lambda: refusals(exporter) == 60 * round_number)  # noqa: B023

        assert exporter.metrics.value("sidestep_rejected_total", "throttled") == 180 - 101


def refusals(exporter: Exporter) -> float:
    """Return the number of rejected messages, read or throttled."""
    reasons = ("bad_schema", "throttled")
    return sum(exporter.metrics.value("sidestep_rejected_total", reason) for reason in reasons)


async def test_the_state_of_the_zap_handler_is_exposed(ring: Ring, start: Start) -> None:
    """So is the number of keys; without keys neither is."""
    ring.engine("a")

    def shown(exporter: Exporter) -> dict[str, float]:
        return {
            row.name: value
            for row, found in exporter.metrics.samples(
                ["sidestep_zap_up", "sidestep_authorized_keys"]
            )
            for _, value in found
        }

    async with start(**ring.flags) as exporter:
        assert shown(exporter) == {"sidestep_zap_up": 1, "sidestep_authorized_keys": 1}
    async with start() as exporter:
        assert shown(exporter) == {}


async def test_rebinding_preserves_which_endpoints_require_keys(ring: Ring, start: Start) -> None:
    """The port requires keys as before, the path none."""
    good = ring.engine("good")
    async with start(**ring.flags) as exporter:
        (ring.directory / "own" / "i.ipc").unlink()
        await until(lambda: exporter.metrics.value("sidestep_rebinds_total", "stolen") == 1)
        async with ring.connect(exporter, good) as peer:
            await peer.send_hello()
        async with ring.connect(exporter, ring.engine("bad", admitted=False)) as peer:
            await peer.send(hello("bad", "e"))
            await until(lambda: exporter.metrics.value(DENIED, "curve") >= 1)
        async with connect(exporter.endpoints[1]) as local:
            await local.send_hello("local", incarnation=2)


async def test_an_engine_with_a_key_delivers(
    ring: Ring, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over tcp with the key, as a file or as text; over a path without."""
    ring.environ(monkeypatch, ring.engine("a"))
    async with start(**ring.flags) as exporter:
        for number, endpoint in enumerate(exporter.endpoints):
            one = publisher(endpoint, f"s{number}", f"e{number}")
            one.push(count())
            await until(lambda: generated(exporter, f"e{number}") == 1)  # noqa: B023
            await asyncio.to_thread(one.close)
        monkeypatch.setenv(SERVER_KEY, keys.read_public(ring.public).text)
        one = publisher(exporter.endpoints[0], "s0", "e0")
        one.push(count())
        await until(lambda: generated(exporter, "e0") == 2)
        await asyncio.to_thread(one.close)


BAD_ENVIRONS: dict[str, tuple[dict[str, str], str]] = {
    "no client key": ({SERVER_KEY: "exporter.pub"}, f"{CLIENT_KEY} is not set"),
    "no server key": ({CLIENT_KEY: "a.key"}, f"{SERVER_KEY} is not set"),
    "missing file": ({SERVER_KEY: "exporter.pub", CLIENT_KEY: "none.key"}, "No such file"),
    "a directory": ({SERVER_KEY: "exporter.pub", CLIENT_KEY: "authorized"}, "cannot read key file"),
}


@pytest.mark.parametrize("bad", BAD_ENVIRONS.values(), ids=BAD_ENVIRONS.keys())
async def test_an_invalid_key_never_disturbs_the_engine(
    bad: tuple[dict[str, str], str],
    ring: Ring,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A log line without traceback, and one at the end; nothing is sent, even to a plain exporter, until the key is valid."""
    environ, what = bad
    good = ring.engine("a")
    for name, file in environ.items():
        monkeypatch.setenv(name, str(ring.directory / file))
    async with start(ingest_endpoint=("tcp://127.0.0.1:*",)) as plain:
        one = publisher(plain.endpoints[0])
        one.push(count())
        await until(lambda: what in caplog.text)
        assert not plain.intake.receiver.streams
        await asyncio.to_thread(one.close)
        assert not plain.intake.receiver.streams
    record, end = (record for record in caplog.records if record.name == push.__name__)
    assert not record.exc_info
    assert end.getMessage().endswith(" has not taken the last items")
    assert one.errors == 0

    async with start(**ring.flags) as exporter:
        caplog.clear()
        two = publisher(exporter.endpoints[0])
        two.push(count())
        await until(lambda: what in caplog.text)
        ring.environ(monkeypatch, good)
        await until(lambda: generated(exporter) == 1)
        await asyncio.to_thread(two.close)


async def test_commands_use_the_same_keys(ring: Ring, start: Start) -> None:
    """Replay and record connect with the keys of the environment; an invalid key is one line."""
    environ = {SERVER_KEY: str(ring.public), CLIENT_KEY: str(ring.engine("a"))}
    async with start(**ring.flags) as exporter:
        replay = ("replay", MAIN_RUN, "--speed", "max", "--connect", exporter.endpoints[0])
        done = await asyncio.to_thread(sidestep, *replay, **environ)
        assert done.returncode == 0, done.stderr
        bad = {**environ, CLIENT_KEY: "/none"}
        record = ("record", ring.directory / "x", "--connect", exporter.endpoints[0])
        listen = ("--listen", f"ipc://{ring.directory}/tee.ipc")
        done = await asyncio.to_thread(sidestep, *record, *listen, **bad)
        one_line(done, 2, "SIDESTEP_CLIENT_KEY: ")
        assert not (ring.directory / "x").exists()


async def test_a_recording_listens_with_the_exporters_keys(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has authorized peers only."""
    good, bad = ring.engine("good"), ring.engine("bad", admitted=False)
    access = Access.of(str(ring.secret), str(ring.authorized), "", plain_tcp=False)
    tee = Tee("tcp://127.0.0.1:*", "", ring.directory / "x", access)
    stop = threading.Event()
    thread = threading.Thread(target=tee.run, args=(stop,))
    thread.start()
    try:
        endpoint = tee._listener.endpoints[0]
        async with ring.connect(endpoint, bad) as stranger:
            await stranger.send(hello("bad", "e"))
            ring.environ(monkeypatch, good)
            engine = publisher(endpoint, "good")
            engine.push(count())
            await until(lambda: engine.connected and engine.drained)
            await asyncio.to_thread(engine.close)
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)

    assert tee.items == 1
    assert list(tee._receiver.streams) == ["good"]
