"""Lines of an engine's log on its connection to an exporter, over real sockets."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from fuzz import zmtp_peer as raw

from exporters import Start, until
from key_ring import Ring
from peers import count, publisher
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry import peer_log
from sidestep.transport.keys import CLIENT_KEY, SERVER_KEY
from sidestep_adapters.publisher import publisher as push

LISTENER = "sidestep.transport.listener"


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    """Keys of an exporter, in a directory of the test."""
    return Ring(tmp_path)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert peer_log.PATIENCE <= 10.0
    monkeypatch.setattr(peer_log, "PATIENCE", 0.3)
    caplog.set_level(logging.INFO, push.log.name)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the publisher's lines."""
    return [r.getMessage() for r in caplog.records if r.name == push.log.name]


async def absent(endpoint: str, caplog: pytest.LogCaptureFixture) -> str:
    """Return the only line of a publisher for ``endpoint``, which is a warning."""
    one = publisher(endpoint)
    await until(lambda: bool(lines(caplog)))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(one.close, 0.1)
    (record,) = [r for r in caplog.records if r.name == push.log.name]
    assert record.levelno == logging.WARNING
    start = f"sidestep: no connection to the exporter at {endpoint} for "
    assert record.getMessage().startswith(start)
    return record.getMessage().removeprefix(start).partition(" s: ")[2]


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        (
            "ipc://{folder}/none",
            "No such file or directory: is it running, and is the socket's dir",
        ),
        ("ipc://{folder}/dead", "Connection refused: is it running?"),
        ("tcp://none.invalid:1", ": check the host's name"),
    ],
)
async def test_an_exporter_that_is_not_there(
    endpoint: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The system's own text, and what to look at; a dead exporter leaves its socket behind."""
    raw.listen(tmp_path / "dead").close()

    assert reason in await absent(endpoint.format(folder=tmp_path), caplog)


def test_items_that_no_exporter_has_taken_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that ends before any other line is due logs that its counts are lost."""
    endpoint = f"ipc://{tmp_path}/none"
    one = publisher(endpoint)
    one.push(count())
    one.close(0.0)

    expected = f"sidestep: the exporter at {endpoint} has not taken the last items"
    assert lines(caplog)[-1] == expected


HANDSHAKES = (
    "the handshake of a peer at {} fails: check its keys, which both ends need or neither",
    "a peer ends its handshake at {}: it is a probe of the port, or an engine with wrong keys",
)
"""Which of the two it is depends on which end is faster."""


@pytest.mark.parametrize("wrong", ["own key", "exporter without keys", "no own key"])
async def test_wrong_keys(
    wrong: str,
    ring: Ring,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The exporter ends the handshake in any case, so the line names all keys; it has one itself.

    It lets that of a key which is not authorized time out after 3 s.
    """
    monkeypatch.setattr(peer_log, "PATIENCE", 5.0 if wrong == "own key" else 1.0)
    caplog.set_level(logging.INFO, LISTENER)
    if wrong != "no own key":
        ring.environ(monkeypatch, ring.engine("a", admitted=wrong != "own key"))
    flags = {"ingest_endpoint": ("tcp://127.0.0.1:*",)} if "without" in wrong else ring.flags
    async with start(**flags) as exporter:
        endpoint = exporter.endpoints[0]
        line = await absent(endpoint, caplog)
    said = [record.getMessage() for record in caplog.records if record.name == LISTENER]

    asks = "the peer asks for CURVE keys" if wrong == "no own key" else "the handshake fails"
    assert line.startswith(f"{asks}: check the keys, ")
    assert SERVER_KEY in line
    assert CLIENT_KEY in line
    assert len({*said}) == len(said)
    denied = {each for each in said if each.endswith(" is not authorized")}
    assert bool(denied) == (wrong == "own key")
    assert {each.format(endpoint) for each in HANDSHAKES}.issuperset({*said} - denied)
    assert said


async def test_an_exporter_that_comes_later_and_again(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line for the outage and one for its end."""
    one = publisher(f"ipc://{tmp_path}/ingest.ipc")
    await until(lambda: len(lines(caplog)) == 1)
    async with start():
        await until(lambda: len(lines(caplog)) == 2)
    await asyncio.to_thread(one.close, 0.1)
    absent, connected = lines(caplog)

    assert "no connection to the exporter" in absent
    assert f"connected to the exporter at ipc://{tmp_path}/ingest.ipc, after " in connected


async def test_a_refusal_has_a_line_of_its_own(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, and none on a connection that is missing.

    The exporter's detail repeats what it received; a terminal must not obey it.
    """
    named = EngineInfo("e", "vllm", bounds={"a\n\x1b[31mERROR \u202e": [2.0, 1.0]})
    async with start() as exporter:
        one = push.Publisher(exporter.endpoints[0], "s", [named], flush_interval=0.01)
        await until(lambda: bool(lines(caplog)))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(one.close, 0.1)
    (line,) = lines(caplog)

    assert "refuses the stream: bad_schema" in line
    assert line.isprintable()
    assert "a??[31mERROR ?" in line
    assert "must increase strictly" in line
