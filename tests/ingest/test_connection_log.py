"""Log lines on engines that connect, leave, return or are refused; time is data."""

from __future__ import annotations

import asyncio
import json
import logging

import msgspec
import pytest

from exporters import Start, until
from intakes import Fed
from peers import count, publisher
from sidestep.app import run
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol import sender
from sidestep.protocol.limits import VERSION, printable
from sidestep.protocol.messages import (
    ENGINE_CORE,
    VERSIONS,
    Batch,
    Bye,
    EngineInfo,
    Heartbeat,
    Hello,
    encode,
)
from sidestep.protocol.receiver import MAX_STREAMS
from sidestep.protocol.request_events import Event, Queued, RequestEvents
from sidestep.telemetry.logs import _Json
from socket_peers import batch, connect

NAMES = "sidestep.ingest.connection_log", "sidestep.ingest.health"
RELEASES = {"vllm": "0.32.0", "sidestep": "0.1.0"}
ENGINE = EngineInfo("ns/m/0", "vllm", {"engine": "0", "model_name": "m"}, {VERSIONS: RELEASES})


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sidestep")


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the lines on engines since the last call."""
    found = [record for record in caplog.records if record.name in NAMES]
    caplog.clear()
    return found


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return their texts."""
    return [record.getMessage() for record in records(caplog)]


def beat(fed: Fed, stream: str = "s") -> None:
    """Send a heartbeat of ``stream``, and let a second pass."""
    fed.send(stream, Heartbeat(fed.incarnation(stream), 0, 0))
    fed.advance(1.0)


def connected() -> Fed:
    """Return an exporter with an engine that was connected more than a minute ago."""
    fed = Fed()
    fed.send_hello("s", [ENGINE])
    for _ in range(61):
        beat(fed)
    return fed


def test_an_engine_that_connects_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """With its model, the releases, its streams, and that its counters are new."""
    fed = connected()
    fed.send_hello("s", [ENGINE])
    beat(fed)
    (record,) = records(caplog)

    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "engine ns/m/0 has connected: model m, vllm 0.32.0, sidestep 0.1.0, stream s;"
        " its counters start at 0"
    )
    line = json.loads(_Json().format(record))
    assert line.pop("time").endswith("Z")
    assert line.pop("msg") == record.getMessage()
    assert line == {
        "level": "info",
        "logger": NAMES[0],
        "event": "connected",
        "id": "ns/m/0",
        "engine": "0",
        "model": "m",
        "dialect": "vllm",
        "versions": RELEASES,
        "streams": ["s"],
        "counters": "its counters start at 0",
    }


def test_an_engine_that_stays_for_less_than_a_second_has_no_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as one of a recording at full speed."""
    fed = Fed()
    fed.send_hello("s", [ENGINE])
    fed.send("s", Bye(fed.incarnation("s"), 0))
    fed.advance(2.0)

    assert texts(caplog) == []


def test_an_engine_that_leaves_and_returns(caplog: pytest.LogCaptureFixture) -> None:
    """The engine returns as another process."""
    fed = connected()
    texts(caplog)
    fed.send("s", Bye(fed.incarnation("s"), 0))
    fed.advance(1.0)
    left = texts(caplog)
    fed.restart("s")
    fed.send_hello("s", [ENGINE])
    fed.advance(1.0)
    (returned,) = texts(caplog)

    assert left == ["engine ns/m/0 has left: its process has closed the connection"]
    assert returned.startswith("engine ns/m/0 has connected: model m, vllm 0.32.0")
    assert returned.endswith("; a new process, its counters go on")


@pytest.mark.parametrize("is_new", [False, True], ids=["same", "new"])
def test_counters_from_a_snapshot_go_on(is_new: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The exporter has restarted, and perhaps the engine as well."""
    fed = connected()
    texts(caplog)
    if is_new:
        pieces = fed.snapshot()
        fed.restart("s")
        other = fed.restarted(pieces)
    else:
        other = fed.restarted(fed.snapshot())
    other.advance(1.0)
    (line,) = texts(caplog)

    start = "a new process, " if is_new else ""
    assert line.endswith(f"; {start}its counters go on from the saved state")


def test_an_engine_that_flaps_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """A peer may connect and leave as often as it likes."""
    fed = Fed()
    for _ in range(300):
        fed.send_hello("s", [ENGINE])
        fed.advance(1.0)
        fed.send("s", Bye(fed.incarnation("s"), 0))
        fed.advance(1.0)
        fed.restart("s")

    assert 10 <= len(texts(caplog)) <= 2 * 11


def test_a_refusal_says_what_to_do_once_a_minute_and_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another peer with the same problem has its own line."""
    fed = Fed()
    for _ in range(90):
        for name in ("s", "t"):
            fed.send(name, Hello(VERSION, name, 1, 1, 1, [EngineInfo("e", "no-such-dialect")]))
        fed.advance(1.0)
    first, other, again, _ = records(caplog)

    assert first.levelno == logging.WARNING
    assert first.getMessage() == (
        "refused stream s: unknown_dialect: no-such-dialect; install the same release of sidestep"
        " here and in the engine's environment"
    )
    assert other.getMessage().startswith("refused stream t: ")
    assert again.getMessage().endswith(" (59 more like this since the last)")
    line = json.loads(_Json().format(first))
    assert (line["event"], line["reason"], line["sender"]) == (
        "refused", "unknown_dialect", "stream s",
    )  # fmt: skip


HELLO = Hello(VERSION, "s", 1, 1, 1, [ENGINE])
TOO_LONG = Hello(VERSION, "s", 1, 1, 1, [EngineInfo("e", "vllm", {"model_name": "m" * 300})])
REFUSED: dict[str, list[Hello | Batch | bytes]] = {
    "connection 73: bad_schema: ": [b"nonsense"],
    "stream s: bad_schema: ": [HELLO, b"nonsense"],
    "stream s: bad_schema: Expected `str` of length <= 256 - at labels of engine 0": [TOO_LONG],
    "stream s: over_limit: too many streams": [
        *(Hello(VERSION, f"s{number}", number, 1, 1, []) for number in range(2, MAX_STREAMS + 2)), HELLO,
    ],
    "an item of stream s: unknown_engine": [
        HELLO, Batch(1, 1, [msgspec.Raw(encode_item(VllmStep(7, 1.0, 1.0)))]),
    ],
    "an item of stream s: too_big: 300005 bytes": [
        HELLO, Batch(1, 1, [msgspec.Raw(msgspec.msgpack.encode(b"x" * 300_000))]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_each_refusal_names_its_sender(line: str, caplog: pytest.LogCaptureFixture) -> None:
    """A frame, a Hello and an item; each is counted once by its reason."""
    fed = Fed()
    for message in REFUSED[line]:
        frame = message if isinstance(message, bytes) else encode(message)
        fed.intake.accept(b"s", [frame], 0.0)
        while fed.intake.busy:
            fed.intake.work()
    (found,) = [text for text in texts(caplog) if text.startswith("refused")]

    assert found.startswith(f"refused {line}")
    ((reason, last),) = fed.intake.refusals.items()
    assert f"refused {last}" == found.partition("; ")[0]
    assert fed.rejected == {(reason,): 1}


LABELS = {"engine": "0", "model_name": "m"}
UNPRINTABLE = {
    "the stream's name": ("\u3000", []),
    "the engine's id": ("s", [EngineInfo("\u3000", "vllm", LABELS)]),
    "label model_name": ("s", [EngineInfo("e", "vllm", {**LABELS, "model_name": "\u3000"})]),
    "cache_config dtype": ("s", [EngineInfo("e", "vllm", LABELS, {"cache_config": {"dtype": "\u3000"}})]),
    "a value of position": ("s", [EngineInfo("e", "vllm", LABELS, closed={"position": ["\u3000"]})]),
}  # fmt: skip


@pytest.mark.parametrize("field", UNPRINTABLE)
def test_an_unprintable_text_is_named(field: str, caplog: pytest.LogCaptureFixture) -> None:
    """By its sender, its field and its value; a namespace would not mend it."""
    fed = Fed()
    stream, infos = UNPRINTABLE[field]
    fed.send("s", Hello(VERSION, stream, 1, 1, 1, infos))
    (line,) = texts(caplog)

    assert line.startswith(
        f"refused stream {printable(stream)}: not_printable: {field} is '\\u3000'"
    )
    assert "; give it another name (of a model: --served-model-name)" in line
    assert "SIDESTEP_NAMESPACE" not in line
    assert fed.rejected == {("not_printable",): 1}


async def test_a_sender_of_another_protocol_is_seen_at_both_ends(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its release is not this exporter's."""
    monkeypatch.setattr(sender, "VERSION", VERSION + 1)
    async with start() as exporter:
        one = publisher(exporter.endpoints[0])
        one.push(count())
        await until(lambda: "refuses the stream: version sender uses" in caplog.text)
        (line,) = texts(caplog)
        await asyncio.to_thread(one.close, 0.1)

    text = f"sender uses version {VERSION + 1}, this exporter {VERSION}; install the same release"
    assert text in line


async def test_an_exporter_without_engines_says_how_to_connect_one(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The plugin may not be loaded, of which neither end sees anything else."""
    assert run.ABSENT_AFTER == 15.0
    monkeypatch.setattr(run, "ABSENT_AFTER", 0.1)
    async with start() as exporter:
        expected = f"SIDESTEP_ENDPOINT={exporter.endpoints[0]} and sidestep in their environment"
        await until(lambda: expected in caplog.text)

    assert "`sidestep doctor`" in caplog.text


async def test_requests_over_the_limit_of_those_in_flight(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Their latencies are missing in histograms, so the log says which engine and what to raise."""
    info = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"}, features=[ENGINE_CORE])
    queued: list[Event] = [Queued(number, 1.0, 1.0, 10, "") for number in range(5)]
    async with start(requests_max_tracked="2") as exporter, connect(exporter) as peer:
        await peer.greet(Hello(VERSION, "s", 1, 1, 1, [info]))
        await peer.send(batch(1, RequestEvents(0, 1.0, 9, queued)))
        line = (
            "engine 'e': 3 requests are not tracked, --requests.max-tracked is reached; their intervals"
            " are in no histogram: raise it"
        )
        await until(lambda: line in caplog.messages)
