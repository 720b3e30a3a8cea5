"""Delivery of spans and log records: to receivers that misbehave, over kills, and bounded."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from exporter_processes import process
from exporters import Start, until
from otlp_receiver import Receiver, accepted, receiver, values
from pages import get, parse
from ports import free_port
from records_of import ENGINE, recorded
from replays import replay
from request_runs import lines
from schedulers import WALL
from sidestep.otlp.destination import LOGS, TRACES, Destination
from sidestep.otlp.resource import Resource
from sidestep.otlp.senders import record_output
from sidestep.otlp.spans import log_records, spans
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.requests import record_output as outputs
from sidestep.requests.record_output import LOST, RecordOutput
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep_adapters.publisher.publisher import Publisher

STOP = FINISH_REASONS.index("stop")
Answers = Callable[[web.Request], Awaitable[web.StreamResponse]]


def simple(number: int) -> list[Event]:
    """Return the events of a request with one token."""
    stamp = float(number)
    step = Iteration(stamp, stamp + 0.01, WALL + stamp + 0.01, [Output(stamp + 0.01, [number])])
    return [
        Queued(number, stamp, WALL + stamp, 5),
        Scheduled(number, stamp + 0.001),
        step,
        Finished(number, stamp + 0.01, WALL + stamp + 0.01, STOP, 5, 1),
    ]


def line(number: int) -> bytes:
    """Return the line of a request."""
    (record,) = recorded(simple(number)).records
    return msgspec.json.encode(record) + b"\n"


class Sending:
    """An output of spans or log records, and its metrics."""

    def __init__(self, url: str, output: str) -> None:
        self.metrics = SelfMetrics()
        self.queue = RecordOutput(output, "--otlp.x", self.metrics)
        self.signal, convert = (TRACES, spans) if output == "traces" else (LOGS, log_records)
        self.destination = Destination(self.signal, f"{url}/v1/{output}", self.metrics)
        write = record_output(self.queue, convert, Resource({}), self.destination)
        self.queue.write_by(write, 0.02)

    def put(self, *numbers: int) -> None:
        """Queue records."""
        for number in numbers:
            self.queue.put(line(number))

    async def flush(self) -> None:
        """Write all records; an attempt that fails is the last one."""
        self.queue.start()
        await asyncio.to_thread(self.queue.close)

    @property
    def counts(self) -> tuple[float, float]:
        """Accepted and rejected parts."""
        names = f"{self.signal.parts}_total", f"rejected_{self.signal.parts}_total"
        accepted, rejected = (self.metrics.value(f"sidestep_otlp_{name}") for name in names)
        return accepted, rejected

    def requests(self) -> dict[tuple[str, ...], float]:
        """Return the requests by signal and status."""
        return dict(self.metrics._values["sidestep_otlp_requests_total"])


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SDK's exporters give up before the first repetition."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.7")


@pytest.fixture(params=["traces", "logs"])
async def sending(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Sending, Receiver]]:
    """Run a receiver and an output to it."""
    async with receiver() as found:
        made = Sending(found.url, request.param)
        try:
            yield made, found
        finally:
            found.answer = None
            made.destination.close()


def parts(made: Sending, records: int) -> int:
    """Return how many spans or log records as many records have."""
    return records * (4 if made.signal is TRACES else 1)


def answering(status: int, **headers: str) -> Answers:
    """Return an answer with a status."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="why", headers=headers)

    return answer


async def test_records_are_delivered_and_counted(sending: tuple[Sending, Receiver]) -> None:
    """In one request; the queue is empty then."""
    made, found = sending
    made.put(1, 2, 3)
    await made.flush()

    assert len(found.headers) == 1
    assert len(found.spans or found.log_records) == parts(made, 3)
    assert made.counts == (parts(made, 3), 0)
    assert made.requests() == {(made.signal.name, "200"): 1}
    assert (len(made.queue), made.queue.taken) == (0, 3)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_receiver_gets_the_same_later(
    sending: tuple[Sending, Receiver], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records stay in the queue until they are accepted."""
    monkeypatch.setattr(outputs, "RETRY_SECONDS", 0.02)
    made, found = sending
    made.put(1, 2)
    found.answer = answering(status)
    made.queue.start()
    await until(lambda: made.requests().get((made.signal.name, str(status)), 0) >= 2)
    assert (len(made.queue), made.counts) == (2, (0, 0))

    found.answer = None
    await until(lambda: not made.queue)
    assert made.counts == (parts(made, 2), 0)
    await asyncio.to_thread(made.queue.close)


@pytest.mark.parametrize("status", [302, 400, 500])
async def test_a_refusal_is_counted_and_not_repeated(
    sending: tuple[Sending, Receiver], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One refused batch does not hold up the next ones."""
    made, found = sending
    made.put(1, 2)
    found.answer = answering(status)
    made.queue.start()
    await until(lambda: not made.queue)
    found.answer = None
    made.put(3)
    await asyncio.to_thread(made.queue.close)

    assert made.counts == (parts(made, 1), parts(made, 2))
    assert len(made.queue) == 0
    assert f"{status}: why" in caplog.text


async def test_a_partial_success_is_counted(
    sending: tuple[Sending, Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    """Rejected records are not sent again."""

    async def reject(_: web.Request) -> web.StreamResponse:
        return accepted(2, "too old")

    made, found = sending
    made.put(1, 2, 3)
    found.answer = reject
    await made.flush()

    assert made.counts == (parts(made, 3) - 2, 2)
    assert len(made.queue) == 0
    shown = made.signal.parts.replace("_", " ")
    assert f"does not accept 2 {shown}: 200: too old" in caplog.text


@pytest.mark.usefixtures("_impatient")
async def test_a_receiver_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """Records wait up to a bound; more are lost and counted; the log says both once."""
    made = Sending(f"http://127.0.0.1:{free_port()}", "traces")
    first = line(1)
    made.queue.restore([first] * (outputs.MAX_PENDING - 2))
    made.put(1, 2, 3, 4, 5)
    await made.flush()
    made.destination.close()

    assert len(made.queue) == outputs.MAX_PENDING
    assert made.metrics.value(LOST, "full", "traces") == 3
    assert made.requests().keys() == {("traces", "connection")}
    assert sum("records of requests are lost: --otlp.x" in text for text in caplog.messages) == 1
    assert sum("does not accept spans" in text for text in caplog.messages) == 1


async def test_an_unreadable_record_is_counted(sending: tuple[Sending, Receiver]) -> None:
    """The others are sent."""
    made, _ = sending
    strange = line(2).replace(b'"trace_id":""', b'"trace_id":"xyz"')
    made.queue.restore([b"{}\n", line(1), b"\xff\n", strange])
    await made.flush()

    assert made.counts == (parts(made, 1), 0)
    assert made.metrics.value(LOST, "unreadable", made.queue.name) == 3


async def test_all_outputs_have_the_same_records(start: Start, tmp_path: Path) -> None:
    """A file, spans and log records of a recorded run; conditions apply to all of them."""
    log = tmp_path / "requests.jsonl"
    async with receiver() as found:
        flags = {"otlp_traces_endpoint": found.url, "otlp_logs_endpoint": found.url}
        async with start(requests_log=str(log), **flags) as exporter:
            await replay(exporter, "core_aborts")
        written = lines(log)
        assert [json.loads(one.body.string_value) for one in found.log_records] == written
        requests = {
            values(span.attributes)["sidestep.request.key"]: span
            for span in found.spans
            if span.name == "llm_request"
        }
        assert requests.keys() == {record["key"] for record in written}
        assert len(written) > 50
        for record in written:
            span = requests[record["key"]]
            whole = span.end_time_unix_nano - span.start_time_unix_nano
            assert whole == round(record["e2e_seconds"] * 1e9)
        found.spans.clear()
        found.log_records.clear()
        async with start(**flags, requests_log_if="reason = abort") as exporter:
            await replay(exporter, "core_aborts")
        aborted = [record for record in written if record["reason"] == "abort"]
        assert len(found.log_records) == len(aborted) > 0
        assert sum(span.name == "llm_request" for span in found.spans) == len(aborted)


@asynccontextmanager
async def publisher(folder: Path) -> AsyncIterator[Publisher]:
    """Run an engine's publisher."""
    made = Publisher(f"ipc://{folder}/i.ipc", "s", [ENGINE])
    try:
        yield made
    finally:
        made.close(0.1)


@pytest.mark.long
async def test_kills_lose_no_record(tmp_path: Path) -> None:
    """Each is delivered, some twice: then it is the same span and has the same key."""
    number = 0
    async with receiver() as found, publisher(tmp_path) as engine:
        flags = ("--otlp.traces-endpoint", found.url, "--otlp.logs-endpoint", found.url)
        for _ in range(4):
            async with process(tmp_path, *flags) as (exporter, _):
                for _ in range(30):
                    for _ in range(10):
                        number += 1
                        engine.push(RequestEvents(0, number, 1, simple(number)))
                    await asyncio.sleep(0.02)
                exporter.kill()
        async with process(tmp_path, *flags) as (_, url):
            await until(lambda: engine.drained)
            keys = {f"e/1/{n}" for n in range(1, number + 1)}
            await until(lambda: keys_of(found) == (keys, keys))
            page = parse(await get(url))
    assert "sidestep_request_records_lost" not in page
    by_id: dict[bytes, set[str]] = {}
    for span in found.spans:
        if span.name == "llm_request":
            key = values(span.attributes)["sidestep.request.key"]
            by_id.setdefault(span.span_id, set()).add(key)
    assert len(by_id) == number
    assert all(len(one) == 1 for one in by_id.values())
    bodies = Counter(one.body.string_value for one in found.log_records)
    assert len(bodies) == number


def keys_of(found: Receiver) -> tuple[set[str], set[str]]:
    """Return the keys of all spans and of all log records."""
    return (
        {
            values(s.attributes)["sidestep.request.key"]
            for s in found.spans
            if s.name == "llm_request"
        },
        {values(one.attributes)["sidestep.request.key"] for one in found.log_records},
    )


@pytest.mark.usefixtures("_impatient")
async def test_a_successor_sends_what_waits(start: Start, tmp_path: Path) -> None:
    """Each record once; with another output it is counted as lost."""
    state = str(tmp_path / "state")
    async with receiver() as found:
        found.answer = answering(503)
        flags = {"otlp_traces_endpoint": found.url, "otlp_logs_endpoint": found.url}
        async with start(state_dir=state, **flags) as exporter:
            await replay(exporter, "core_aborts")
            made = exporter.metrics.value("sidestep_request_records_total")
        assert made > 50
        found.answer = None
        async with start(state_dir=state, otlp_logs_endpoint=found.url) as exporter:
            log = exporter.request_log
            assert log is not None
            # Those whose answer has not arrived at an exporter's end are sent again.
            await until(lambda: len(found.log_records) == made and not any(map(len, log.outputs)))
            assert exporter.metrics.value(LOST, "removed", "traces") == made
        async with start(state_dir=state, **flags) as exporter:
            assert exporter.request_log is not None
            assert [len(queue) for queue in exporter.request_log.outputs] == [0, 0]
        assert (found.spans, len(found.log_records)) == ([], made)
