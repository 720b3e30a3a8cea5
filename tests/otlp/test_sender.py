"""Pushes by OTLP to receivers that misbehave: bounded, counted, and the exporter is unharmed."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from exporters import MAIN_RUN, Start, until
from intakes import Fed
from otlp_receiver import (
    KIND,
    Answer,
    Receiver,
    Samples,
    accepted,
    hang,
    metrics_of,
    points_of,
    receiver,
)
from pages import get, parse
from polled import polled
from replays import replay
from sidestep.exposition.pages import PageCopier
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.otlp.destination import METRICS, Destination
from sidestep.otlp.increments import Increments
from sidestep.otlp.metric_sender import MetricSender
from sidestep.otlp.page_families import PageFamilies
from sidestep.otlp.resource import Resource
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry

INFO = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})
TOKENS = "vllm:generation_tokens_total"


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SDK's exporters give up before the first repetition."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.7")


class Pushing:
    """A sender of one engine's series, with its metrics and monotonic seconds that a test sets."""

    def __init__(self, url: str, query: str = "") -> None:
        fed = Fed()
        fed.send_hello("s", [INFO])
        self.metrics, self.now, self.wall = SelfMetrics(), 100.0, time.time_ns()
        copier = PageCopier(
            fed.intake.registry,
            PassthroughRegistry(fed.intake.registry.names),
            own_registry(self.metrics, ()),
        )
        families = PageFamilies(copier, SeriesFilter(), exponential=False)
        url = f"{url}/v1/metrics{query}"
        self.receiver = Destination(METRICS, url, self.metrics, clock=lambda: self.now)
        self.sender = MetricSender(
            families,
            Increments((), None),
            Resource({}),
            self.receiver,
            self.metrics,
            wall=lambda: self.wall,
        )

    def requests(self) -> dict[str, float]:
        """Return the requests by status."""
        name = "sidestep_otlp_requests_total"
        return {labels[1]: value for labels, value in self.metrics._values[name].items()}

    def value(self, name: str) -> float:
        """Return a metric without labels."""
        return self.metrics.value(f"sidestep_otlp_{name}")


@asynccontextmanager
async def pushing() -> AsyncIterator[tuple[Pushing, Receiver]]:
    """Run a receiver and a sender to it."""
    async with receiver() as found:
        made = Pushing(found.url)
        try:
            yield made, found
        finally:
            made.receiver.close()


async def test_a_push_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points, request and time; OpenTelemetry's variables compress the body and add headers."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    async with pushing() as (made, found):
        await made.sender.push()

    (request,) = found.requests
    points = sum(1 for metric in metrics_of(request) for _ in points_of(metric))
    assert made.value("points_total") == points > 50
    assert made.requests() == {"200": 1}
    assert made.value("last_success_timestamp_seconds") > 1e9
    assert made.value("rejected_points_total") == 0
    headers = {name.lower(): value for name, value in found.headers[0].items()}
    assert headers["content-encoding"] == "gzip"
    assert headers["content-type"] == KIND
    assert headers["authorization"] == "Bearer x"


async def test_a_time_in_the_future_lasts_only_if_it_was_accepted() -> None:
    """Receivers refuse it, and what follows one that they have taken must be later."""
    hour = 3600 * 10**9
    async with pushing() as (made, found):
        now = made.wall
        for wall, answer in ((now + hour, answering(400)), (now, None), (now - hour, None)):
            made.wall, found.answer = wall, answer
            await made.sender.push()

    times = [
        {point.time_unix_nano for metric in metrics_of(request) for point in points_of(metric)}
        for request in found.requests
    ]
    assert times == [{now}, {now + 1}]


async def test_a_partial_success_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """Rejected points are counted and logged with the receiver's reason."""

    async def reject(_: web.Request) -> web.StreamResponse:
        return accepted(3, "three are\ntoo old")

    async with pushing() as (made, found):
        await made.sender.push()
        points = made.value("points_total")
        found.answer = reject
        await made.sender.push()
        await made.sender.push()
        found.answer = None

    assert made.value("rejected_points_total") == 6
    assert points < made.value("points_total") < 3 * points
    lines = [text for text in caplog.messages if "does not accept" in text]
    assert len(lines) == 1
    assert lines[0].endswith("/v1/metrics does not accept 3 points: 200: three are too old")


async def cut(request: web.Request) -> web.StreamResponse:
    """Answer with less than is announced."""
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"x")
    assert request.transport is not None
    request.transport.close()
    return response


def answering(status: int, body: bytes = b"") -> Answer:
    """Return an answer with a status."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, content_type=KIND)

    return answer


SUCCESSES = [
    (200, answering(200)),
    (202, answering(202)),
    (200, answering(200, b"\xff" * 100)),
    (200, answering(200, b"<html>")),
    (200, answering(200, b"\x0a\xff\xff\xff\xff\x0f")),
    (200, cut),
]


@pytest.mark.parametrize(("status", "answer"), SUCCESSES)
async def test_every_status_of_success_is_one(status: int, answer: Answer) -> None:
    """Whatever follows it: the points were accepted, and are not sent twice."""
    async with pushing() as (made, found):
        found.answer = answer
        await made.sender.push()
        found.answer = None

    assert made.requests() == {str(status): 1}
    assert made.value("points_total") > 0
    assert made.value("last_success_timestamp_seconds") > 0


@pytest.mark.usefixtures("_impatient")
async def test_an_answer_that_is_no_http_is_logged_without_secrets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The URL's query may be one."""

    async def garbage(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x00\xff no HTTP\r\n\r\n")

    async with polled(garbage) as server:
        made = Pushing(server.url, "?token=s3cret")
        await made.sender.push()
        made.receiver.close()

    assert made.requests() == {"connection": 1}
    assert "does not accept points: connection: " in caplog.text
    assert "s3cret" not in caplog.text


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(("status", "rejects"), [(400, True), (302, True), (429, False)])
async def test_refusals_are_counted_and_logged_once(
    status: int, rejects: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal that no repetition changes counts its points; a redirect is not followed."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="out of\norder", headers={"Location": request.path})

    async with pushing() as (made, found):
        await made.sender.push()
        points = made.value("points_total")
        found.answer = refuse
        await made.sender.push()
        await made.sender.push()
        found.answer = None

    assert made.requests() == {"200": 1, str(status): 2}
    assert made.value("points_total") == points
    assert (made.value("rejected_points_total") > points) is rejects
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.getMessage().partition("/v1/metrics ")[2] for line in lines] == [
        f"does not accept points: {status}: out of order"
    ]


async def test_ingest_goes_on_while_a_receiver_hangs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One push is in flight and nothing is queued; the first one that is accepted has all counts."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    async with receiver() as found:
        found.answer = hang
        async with start(otlp_endpoint=found.url, otlp_interval="1") as exporter:
            await until(lambda: found.in_flight == 1)
            await replay(exporter, MAIN_RUN)
            page = counts(await get(exporter.url))
            await until(lambda: len(found.headers) >= 3)
            assert found.most_in_flight == 1
            found.answer = None
            await until(lambda: len(found.requests) > 0)
            samples = found.samples
            assert {key: samples.get(key) for key in page} == page
        async with start() as other:
            await replay(other, MAIN_RUN)
            assert page == counts(await get(other.url))


async def test_a_push_waits_for_a_snapshot_of_what_it_has(start: Start, tmp_path: Path) -> None:
    """No counter that a receiver has seen decreases after a crash."""
    state, crashed = tmp_path / "state", tmp_path / "crashed"
    async with receiver() as found:

        async def crash(request: web.Request) -> web.StreamResponse:
            if wanted and not crashed.exists():
                shutil.copytree(state, crashed)
                found.requests.append(ExportMetricsServiceRequest.FromString(await request.read()))
            return accepted()

        wanted = False
        found.answer = crash
        flags = {"otlp_endpoint": found.url, "otlp_interval": "1", "state_dir": str(state)}
        async with start(**flags) as exporter:
            await replay(exporter, MAIN_RUN)
            (engine,) = exporter.registry.engines.values()
            (slot,) = engine.layout.find(TOKENS).slots
            wanted = True
            while not crashed.exists():
                # As items that are applied just before a push.
                engine.values[slot] = (engine.values[slot] or 0) + 1
                exporter.registry.touch(engine)
                await asyncio.sleep(0)
        pushed = {key: value for key, value in found.samples.items() if key[0] == TOKENS}
    async with start(state_dir=str(crashed)) as exporter:
        restored = counts(await get(exporter.url))

    assert pushed
    assert all(restored[key] >= value for key, value in pushed.items())


def counts(page: str) -> Samples:
    """Return the samples of vLLM's counters and histograms."""
    return {
        (name, tuple(pair for pair in labels if pair[1])): value
        for family in parse(page).values()
        if family.kind in ("counter", "histogram")
        for (name, labels), value in family.samples.items()
        if name.startswith("vllm:")
    }


async def test_the_last_push_has_the_last_counts(start: Start) -> None:
    """An exporter that stops sends what it has drained."""
    async with receiver() as found:
        async with start(otlp_endpoint=found.url, otlp_interval="3600") as exporter:
            await until(lambda: len(found.requests) > 0)
            await replay(exporter, MAIN_RUN)
            page = parse(await get(exporter.url))[TOKENS.removesuffix("_total")]
        assert {key: found.samples[key] for key in page.samples} == page.samples


def test_without_the_extra_the_error_says_what_to_install(tmp_path: Path) -> None:
    """One line, and exit code 2."""
    (tmp_path / "opentelemetry.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "sidestep", "serve", "--otlp.endpoint", "http://127.0.0.1:1",
         "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", f"ipc://{tmp_path}/i.ipc"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip

    assert done.returncode == 2
    assert "pip install '.[otlp]' in a clone" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_exporter_without_a_receiver_does_not_load_the_sdk() -> None:
    """They take time and memory."""
    code = "import sys, sidestep.app.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "sidestep.app.run" in done.stdout.split()
    assert not any(name.startswith("opentelemetry") for name in done.stdout.split())
