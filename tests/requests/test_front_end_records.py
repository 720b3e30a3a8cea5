"""Records, goodput and objectives of requests whose front end reports what its users waited."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import Start, until
from intakes import Fed
from sidestep.catalog.slo import Objective
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import FrontEndLatencies, VllmStep
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.messages import CORE, ENGINE_CORE, FRONT_END, EngineInfo
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Iteration,
    Output,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.requests.record_output import RecordOutput
from sidestep.requests.request_log import EngineRequests, RequestLog
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.requests.front_end import HOLD_SECONDS
from sidestep_adapters.publisher.publisher import Publisher

WALL = 1_795_173_151.25
HOP = 0.25
"""Seconds until the front end has an output."""
STOP, ABORT = FINISH_REASONS.index("stop"), FINISH_REASONS.index("abort")
LIMITS = {"ttft": ("vllm:time_to_first_token_seconds", 3.0),
          "e2e": ("vllm:e2e_request_latency_seconds", 5.0)}  # fmt: skip
SLO = [Objective(name, (family,), limit) for name, (family, limit) in LIMITS.items()]


@dataclasses.dataclass
class Asked:
    """A request: the seconds of its first output, of its end, and of its end at the front end."""

    number: int
    arrival: float
    first: int
    received: int
    ended: int
    group: int = 0

    @property
    def queued(self) -> float:
        """When it entered the queue."""
        return 1.0 + self.number / 1024

    def core(self, second: int) -> list[Event]:
        """Return its end, if it is in this second; the core knows no stop strings."""
        if second != self.ended:
            return []
        is_stop = self.received < self.ended
        reason = ABORT if is_stop else STOP
        return [Finished(self.number, second, WALL + second, reason, 8, 2, stop_strings=is_stop)]


def core_items(asked: list[Asked], seconds: int = 12) -> list[bytes]:
    """Return the core's items, one a second."""
    made: list[list[Event]] = [[]]
    for one in asked:
        made[0] += [
            Queued(one.number, one.queued, one.arrival, 8, group=one.group, sample=one.number),
            Scheduled(one.number, 1.5),
        ]
    for second in range(2, seconds):
        served = [one.number for one in asked if one.first <= second <= one.ended]
        output = [Output(float(second), served)] if served else []
        made.append([Iteration(second - 0.5, float(second), WALL + second, output)])
        made[-1] += [event for one in asked for event in one.core(second)]
    return [encode_item(RequestEvents(0, 20.0, 1, events)) for events in made]


def front_end_items(asked: list[Asked], seconds: int = 12) -> list[bytes]:
    """Return the front end's items, one a second."""
    made = []
    for second in range(2, seconds):
        at = WALL + second + HOP
        ended = [one for one in asked if one.received == second]
        latencies = FrontEndLatencies(
            at,
            [at - one.arrival for one in asked if one.first == second],
            [at - one.arrival for one in ended],
            [1.5 - one.queued for one in ended],
        )
        made.append(encode_item(VllmStep(0, 5.0, 1.0, front_end=latencies)))
    return made


def info(role: str) -> list[EngineInfo]:
    """Return the engine as a process with this role describes it."""
    labels = {"engine": "0", "model_name": "m"}
    return [EngineInfo("e", "vllm", labels, features=[ENGINE_CORE], role=role)]


class Recorded:
    """An intake with a core and a front end, and the records of its requests."""

    def __init__(self) -> None:
        self.queue = RecordOutput("file", "", SelfMetrics())
        self.fed = Fed(slo=SLO)
        self.attach(self.fed)
        self.fed.send_hello("core", info(CORE))
        self.fed.send_hello("api", info(FRONT_END))

    def attach(self, fed: Fed) -> None:
        """Make records of the requests of another intake."""
        log = RequestLog([self.queue], SelfMetrics())
        fed.intake.registry.tracking.request_sink = lambda engine: EngineRequests(log, None, engine)

    def records(self) -> dict[int, dict[str, Any]]:
        """Return the records by the numbers of their requests."""
        found = [json.loads(line) for some in self.queue.chunks() for line in some]
        numbers = [int(record["key"].rpartition("/")[2]) for record in found]
        assert len({*numbers}) == len(numbers)
        return dict(zip(numbers, found, strict=True))

    def counted(self, name: str) -> dict[tuple[str, ...], float]:
        """Return the children of a family of the engine."""
        (engine,) = self.fed.intake.registry.engines.values()
        children: dict[tuple[str, ...], float] = engine.keyed[engine.layout.handler_slot(name)]
        return children

    def goodput(self) -> float:
        """Return the requests that met all objectives."""
        (engine,) = self.fed.intake.registry.engines.values()
        return engine.values[engine.layout.handler_slot("goodput_requests")] or 0


@st.composite
def requests(draw: st.DrawFn) -> list[Asked]:
    """Draw requests, some of one arrival, some that the front end ends before the core."""
    made = []
    for number in range(draw(st.integers(1, 12))):
        first = draw(st.integers(2, 6))
        received = draw(st.integers(first, 8))
        arrival = WALL + draw(st.sampled_from((0.0, 0.5)))
        ended = received + draw(st.integers(0, 2))
        made.append(Asked(number, arrival, first, received, ended, draw(st.sampled_from((0, 7)))))
    return made


@given(requests(), st.data())
def test_records_have_what_users_waited(asked: list[Asked], data: st.DataObject) -> None:
    """Whichever side reports first: TTFT and e2e of the histograms, request by request."""
    made = Recorded()
    waiting = {"core": core_items(asked), "api": front_end_items(asked)}
    while any(waiting.values()):
        stream = data.draw(st.sampled_from([name for name, items in waiting.items() if items]))
        count = data.draw(st.integers(1, len(waiting[stream])))
        made.fed.items(stream, waiting[stream][:count])
        del waiting[stream][:count]

    records = made.records()
    assert records.keys() == {one.number for one in asked}
    for one in asked:
        record = records[one.number]
        ttft, e2e = (WALL + at + HOP - one.arrival for at in (one.first, one.received))
        assert (record["ttft_seconds"], record["e2e_seconds"]) == (ttft, e2e)
        parts = record["queue_seconds"], record["prefill_seconds"], record["decode_seconds"]
        assert sum(parts) <= e2e
        assert sum(record["parts"].values()) == pytest.approx(e2e, abs=1.5e-6)
        assert record["objectives"] == {"ttft": ttft <= 3.0, "e2e": e2e <= 5.0}
    whole = sum(record["e2e_seconds"] for record in records.values())
    assert sum(made.counted("request_parts").values()) == pytest.approx(whole, abs=1e-5)
    met = Counter(
        ("good" if is_met else "bad", name)
        for record in records.values()
        for name, is_met in record["objectives"].items()
    )
    assert {key: n for key, n in made.counted("slo_requests").items() if n} == met
    assert made.goodput() == sum(all(r["objectives"].values()) for r in records.values())


ONE = Asked(1, WALL, 2, 4, 4)


@pytest.mark.parametrize("is_received", [True, False])
def test_a_client_that_left_has_the_first_token_that_it_got(is_received: bool) -> None:
    """A front end does not report a first token of a request that it has aborted."""
    made = Recorded()
    aborted = Finished(1, 4.0, WALL + 4.0, ABORT, 8, 2)
    if is_received:
        made.fed.items("api", front_end_items([ONE], 3))
    made.fed.items("core", core_items([ONE], 3))
    made.fed.items("core", [encode_item(RequestEvents(0, 4.0, 1, [aborted]))])
    assert len(made.records()) == is_received
    made.fed.advance(HOLD_SECONDS + 1.0)
    (record,) = made.records().values()
    assert record["reason"] == "abort"
    assert record["ttft_seconds"] == (2.25 if is_received else None)


@pytest.mark.parametrize("first", ["core", "api"])
def test_a_killed_exporters_requests_still_wait(first: str) -> None:
    """The snapshot has what only one side has reported."""
    made = Recorded()
    items = {"core": core_items([ONE]), "api": front_end_items([ONE])}
    made.fed.items(first, items.pop(first))
    other = Fed(boot=2, slo=SLO)
    made.attach(other)
    made.fed = made.fed.restarted(made.fed.snapshot(), into=other)
    ((stream, rest),) = items.items()
    made.fed.items(stream, rest)
    (record,) = made.records().values()
    assert (record["ttft_seconds"], record["e2e_seconds"]) == (2.25, 4.25)


async def test_an_exporter_that_ends_writes_what_waits(start: Start, tmp_path: Path) -> None:
    """Over real sockets, without a state directory."""
    log = tmp_path / "requests.jsonl"
    async with start(requests_log=str(log)) as exporter:
        endpoint = exporter.endpoints[0]
        core, api = (
            Publisher(endpoint, "core", info(CORE)),
            Publisher(endpoint, "api", info(FRONT_END)),
        )
        await until(lambda: core.connected and api.connected)
        for item in core_items([ONE]):
            core.push(DIALECTS.decode(item))
        await until(lambda: core.drained)
        assert log.read_text() == ""
        for publisher in (core, api):
            publisher.close()
    (line,) = log.read_text().splitlines()
    assert json.loads(line)["e2e_seconds"] == 4.0
