"""A Collector, Prometheus 3 and Phoenix (``make test-otlp``) have what the page and the records have."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from exporters import Start, until
from otlp_programs import COLLECTOR, PHOENIX, PROMETHEUS, collector, get_json, phoenix
from otlp_pushes import RUNS, pushed, replay_all
from otlp_receiver import Samples, as_text, encoded_spans, receiver
from pages import get
from prometheus_server import Prometheus
from records_of import ENGINE
from schedulers import WALL
from sidestep.app.exporter import Exporter
from sidestep.otlp.resource import Resource
from sidestep.otlp.spans import spans
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Preempted,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.requests.record import RequestRecord
from sidestep_adapters.publisher.publisher import Publisher

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
pytestmark = pytest.mark.otlp


def needs(program: Path) -> pytest.MarkDecorator:
    """Return a mark that skips a test without a receiver."""
    reason = f"there is no {program.name} (tools/setup_otlp.sh build/otlp)"
    return pytest.mark.skipif(not program.exists(), reason=reason)


@asynccontextmanager
async def running_prometheus(directory: Path, *flags: str) -> AsyncIterator[tuple[Prometheus, str]]:
    """Run a Prometheus that receives OTLP; yield it, and the URL to which metrics are pushed."""
    config = directory / "prometheus.yml"
    config.write_text("global: {}\n")
    data = f"--storage.tsdb.path={directory / 'data'}"
    server = Prometheus(str(PROMETHEUS), config, data, "--web.enable-otlp-receiver", *flags)
    await asyncio.to_thread(server.start)
    try:
        yield server, f"{server.url}/api/v1/otlp/v1/metrics"
    finally:
        await asyncio.to_thread(server.stop)


def translated(page: str) -> dict[str, str]:
    """Return the page's names by those that Prometheus stores: counters get ``_total``."""
    return {
        f"{name}_total": name
        for name in re.findall(r"(?m)^# TYPE (\S+) counter$", page)
        if not name.endswith("_total")
    }


@needs(PROMETHEUS)
async def test_prometheus_has_the_samples_of_the_page(start: Start, tmp_path: Path) -> None:
    """Those of recorded runs of vLLM, SGLang and Triton, after the translation of names."""
    async with (
        running_prometheus(tmp_path) as (server, url),
        start(otlp_endpoint=url, otlp_interval="1") as exporter,
    ):
        await replay_all(exporter, RUNS)
        names = translated(await get(exporter.url))

        def stored() -> Samples:
            found: Samples = {}
            result = server.ask('{__name__!=""}')
            for series in result:
                labels = {
                    key.removeprefix("key") if key.startswith("key_") else key: value
                    for key, value in series["metric"].items()
                    if key not in ("job", "instance")
                }
                name = labels.pop("__name__")
                if name.endswith("_bucket"):
                    labels["le"] = as_text(float(labels["le"]))
                key = names.get(name, name), tuple(sorted(labels.items()))
                found[key] = float(series["value"][1])
            return found

        assert await pushed(exporter, stored) > 3000


@needs(COLLECTOR)
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_collector_passes_on_what_the_page_and_the_records_have(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Metrics as on the page, spans as the records make them, log records as in the file."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    log = tmp_path / "requests.jsonl"
    async with receiver() as found:
        with collector(tmp_path, found.url, protocol) as url:
            async with start(
                requests_log=str(log), otlp_endpoint=url, otlp_traces_endpoint=url,
                otlp_logs_endpoint=url, otlp_interval="1",
            ) as exporter:  # fmt: skip
                await replay_all(exporter, RUNS)
                await send_traced(exporter)
                assert await pushed(exporter, lambda: found.samples) > 3000
            lines = log.read_text().splitlines()
            expected = {span.span_id: span for line in lines for span in spans_of(line)}
            await until(lambda: {span.span_id for span in found.spans} == expected.keys(), 30.0)
            await until(lambda: len(found.log_records) == len(lines), 30.0)
    assert {span.span_id: span for span in found.spans} == expected
    assert sorted(one.body.string_value for one in found.log_records) == sorted(lines)
    (traced,) = [span for span in expected.values() if span.parent_span_id.hex() == PARENT]
    assert traced.trace_id.hex() == TRACE


@needs(PHOENIX)
async def test_phoenix_has_the_spans(start: Start, tmp_path: Path) -> None:
    """Ids, parents, status and lengths are those of the record."""
    log = tmp_path / "requests.jsonl"
    with phoenix(tmp_path) as url:
        async with start(requests_log=str(log), otlp_traces_endpoint=url) as exporter:
            await send_traced(exporter)
            await until(lambda: exporter.metrics.value("sidestep_otlp_spans_total") == 6)
        (line,) = log.read_text().splitlines()
        stored: dict[str, Any] = {}

        async def has_all() -> bool:
            query = f"{url}/v1/projects/default/spans?trace_id={TRACE}&limit=100"
            found = (await asyncio.to_thread(get_json, query))["data"]
            stored.update({span["context"]["span_id"]: span for span in found})
            return len(stored) == 6

        await until(has_all, 60.0)
    for span in spans_of(line):
        found = stored[span.span_id.hex()]
        assert found["name"] == span.name
        assert found["context"]["trace_id"] == TRACE
        assert found["parent_id"] == span.parent_span_id.hex()
        begin, end = (datetime.fromisoformat(found[name]) for name in ("start_time", "end_time"))
        length = round((end - begin).total_seconds() * 1e6)
        assert length == (span.end_time_unix_nano - span.start_time_unix_nano) // 1000
        assert begin.timestamp() == pytest.approx(span.start_time_unix_nano * 1e-9, abs=2e-6)
        assert found["status_code"] == ("ERROR" if span.name == "llm_request" else "UNSET")
    names = sorted(span["name"] for span in stored.values())
    assert names == ["decode", "llm_request", "preempted", "preempted", "prefill", "queue"]


def spans_of(line: str) -> list[Span]:
    """Return the spans of a line of the file."""
    record = msgspec.json.decode(line, type=RequestRecord)
    assert json.loads(line)["key"] == record.key
    return encoded_spans(spans(record, b"", Resource({})))


async def send_traced(exporter: Exporter) -> None:
    """Send the events of a request with a trace context, twice preempted and then aborted."""

    def step(stamp: float) -> Event:
        return Iteration(stamp - 0.01, stamp, WALL + stamp, [Output(stamp, [7])])

    events: list[Event] = [
        Queued(7, 1.25, WALL + 1.0, 512, identity=Identity("r", trace=f"00-{TRACE}-{PARENT}-01")),
        Scheduled(7, 1.5),
        step(2.0),
        Preempted(7, 2.5),
        Scheduled(7, 3.0),
        step(3.25),
        Preempted(7, 3.5),
        Scheduled(7, 3.75),
        step(4.000123),
        Finished(7, 4.25, WALL + 4.25, FINISH_REASONS.index("abort"), 512, 3, 2),
    ]
    publisher = Publisher(exporter.endpoints[0], "s", [ENGINE])
    try:
        publisher.push(RequestEvents(0, 5.0, 1, events))
        await until(lambda: publisher.drained)
    finally:
        publisher.close(0.1)
