"""Engines whose streams fall silent and return."""

from __future__ import annotations

from itertools import cycle

import pytest

from intakes import Fed
from sidestep.engines.items import encode_item
from sidestep.engines.sglang.wire import SglangSchedulerStats, SglangStats
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.metrics import exposed_engines
from sidestep.metrics.exposed_engines import (
    ENGINE_EXPIRES_SECONDS,
    GAUGES_EXPIRE_SECONDS,
    TOTALS_EXPIRE_SECONDS,
)
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import CORE, ENGINE_CORE, FRONT_END, Bye, EngineInfo, Heartbeat
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.snapshot.capture import restore

INFO = {"cache_config": {"block_size": "16"}}


def engine(name: str = "e") -> EngineInfo:
    """Return an engine with an info metric."""
    return EngineInfo(name, "vllm", {"engine": name, "model_name": "m"}, INFO)


def step(tokens: int, running: int = 3, stamp: float = 1.0) -> bytes:
    """Return a step with a gauge."""
    stats = SchedulerStats(num_running_reqs=running)
    return encode_item(VllmStep(0, stamp, 1.0, stats, IterationStats(tokens)))


@pytest.fixture
def fed() -> Fed:
    """Return an intake with an engine that two streams feed."""
    made = Fed()
    for stream in ("one", "two"):
        made.send_hello(stream, [engine()])
        made.items(stream, [step(5)])
    return made


def by_engine(fed: Fed, name: str) -> dict[str, float]:
    """Return the samples of a self-metric by the label ``engine``, the first of its labels."""
    found = fed.intake.metrics.samples({name})
    return {engine: value for _, samples in found for (engine, *_), value in samples}


def up(fed: Fed) -> dict[str, float]:
    """Return ``sidestep_engine_up`` by engine."""
    return by_engine(fed, "sidestep_engine_up")


def test_gauges_expire_after_the_last_stream_is_silent(fed: Fed) -> None:
    """Counters stay; the engine's state is unknown."""
    fed.advance(GAUGES_EXPIRE_SECONDS / 2)
    fed.send("two", Heartbeat(2, 1, 0))
    fed.advance(GAUGES_EXPIRE_SECONDS / 2 + 1)

    assert up(fed) == {"e": 1.0}
    assert 'vllm:num_requests_running{engine="e",model_name="m"} 3' in fed.page
    fed.advance(GAUGES_EXPIRE_SECONDS)
    assert up(fed) == {"e": 0.0}
    assert "vllm:num_requests_running" not in fed.page
    assert "vllm:cache_config_info" not in fed.page
    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 10' in fed.page


def test_gauges_return_with_any_message(fed: Fed) -> None:
    """A process that was stopped has sent all of its changes."""
    fed.advance(GAUGES_EXPIRE_SECONDS + 1)
    fed.send("one", Heartbeat(1, 1, 0))

    assert up(fed) == {"e": 1.0}
    assert 'vllm:num_requests_running{engine="e",model_name="m"} 3' in fed.page


def test_a_new_process_does_not_inherit_gauges(fed: Fed) -> None:
    """A new process has no gauges until it has reported its state."""
    fed.advance(GAUGES_EXPIRE_SECONDS + 1)
    fed.restart("one")
    fed.send_hello("one", [engine()])

    assert "vllm:num_requests_running" not in fed.page
    fed.items("one", [step(1, running=7, stamp=0.5)])
    assert 'vllm:num_requests_running{engine="e",model_name="m"} 7' in fed.page
    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 11' in fed.page


def test_an_engine_that_a_new_process_names_later_restarted_too() -> None:
    """A restart counts once per engine; an engine that was unknown before has not restarted."""
    made = Fed()
    made.send_hello("one", [engine("a"), engine("b")])
    made.items("one", [step(5)])
    made.send_hello("one", [engine("a"), engine("b"), engine("c")])
    assert {"a": 0, "b": 0, "c": 0} == restarts(made)

    made.restart("one")
    made.send_hello("one", [engine("b")])
    for known in ([], ["c"], ["c", "d"]):
        made.send_hello("one", [engine(name) for name in ("b", "a", *known)])

    assert {"a": 1, "b": 1, "c": 0, "d": 0} == restarts(made)
    made.items("one", [encode_item(VllmStep(1, 0.5, 1.0, SchedulerStats(num_running_reqs=7)))])
    assert 'vllm:num_requests_running{engine="a",model_name="m"} 7' in made.page


def restarts(fed: Fed) -> dict[str, float]:
    """Return ``sidestep_engine_restarts_total`` by engine."""
    return by_engine(fed, "sidestep_engine_restarts_total")


def test_self_described_gauges_expire_too(fed: Fed) -> None:
    """Counters stay; the gauges' share of the limits is free again."""
    families = [
        Family("own_state", "gauge", ["k"], [Sample([str(n)], 1.0) for n in range(9)]),
        Family("own_total", "counter", [], [Sample([], 4.0)]),
    ]
    fed.items("one", [encode_item(Samples(0, 1.0, families))])
    series = fed.intake.registry.quota.series
    fed.advance(GAUGES_EXPIRE_SECONDS + 1)

    assert "own_state" not in fed.page
    assert "own_total" in fed.page
    fed.restart("one")
    fed.send_hello("one", [engine()])
    assert "own_state" not in fed.page
    assert fed.intake.registry.quota.series == series - 9


def test_totals_of_a_retired_engine_survive_a_restart(fed: Fed) -> None:
    """The next exporter exposes them once the engine returns."""
    fed.advance(ENGINE_EXPIRES_SECONDS + 1)
    other = fed.restarted(fed.snapshot())
    other.items("one", [step(1)])

    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 11' in other.page


def test_a_returning_engine_has_its_totals(fed: Fed) -> None:
    """A pod may have moved or slept; its stream needs a new Hello."""
    fed.advance(ENGINE_EXPIRES_SECONDS + 1)

    assert fed.page == ""
    assert up(fed) == {}
    fed.send("one", Heartbeat(1, 1, 0))
    assert up(fed) == {}
    fed.send_hello("one", [engine()])
    fed.items("one", [step(2)])
    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 12' in fed.page
    assert up(fed) == {"e": 1.0}


def test_totals_expire(fed: Fed, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a day; with too many retired engines, the oldest go first."""
    most = 20
    monkeypatch.setattr(exposed_engines, "MAX_ENGINES", most)
    fed.advance(ENGINE_EXPIRES_SECONDS + 1)
    assert list(fed.intake.registry.retired) == ["e"]
    fed.now += TOTALS_EXPIRE_SECONDS
    fed.intake.expire(fed.now)

    assert fed.intake.registry.retired == {}
    for batch in range(2):
        for number in range(most - 5):
            fed.send_hello("many", [engine(f"e{batch}/{number}")])
            fed.send("many", Bye(fed.incarnation("many"), 0))
            fed.restart("many")
        fed.send_hello("many", [])
        fed.advance(ENGINE_EXPIRES_SECONDS + 1)
    kept = list(fed.intake.registry.retired)
    assert len(kept) == most
    assert kept[-1] == f"e1/{most - 6}"


def test_an_engine_that_returns_with_other_labels_restarts(fed: Fed) -> None:
    """While a stream feeds it, its labels are fixed: two streams must not alternate."""
    other = EngineInfo("e", "vllm", {"engine": "e", "model_name": "another"})
    fed.send_hello("three", [other])
    assert 'model_name="another"' not in fed.page
    for number, stream in enumerate(("one", "two", "three"), start=1):
        fed.send(stream, Bye(number, fed.seqs[stream]))
    fed.restart("one")
    fed.send_hello("one", [other])

    assert 'model_name="m"' not in fed.page
    assert 'vllm:generation_tokens_total{engine="e",model_name="another"} 0' in fed.page


def test_a_jump_of_the_wall_clock_changes_nothing() -> None:
    """Silence and age are measured with the monotonic clock."""
    pages = []
    for times in (cycle([1e9]), cycle([1e9, 2e9, 5.0])):
        fed = Fed()
        fed.send_hello("one", [engine()])
        for tokens in range(5):
            fed.intake._wall = lambda times=times: next(times)  # type: ignore[misc]
            fed.items("one", [step(tokens)])
            fed.advance(2.0)
            assert up(fed) == {"e": 1.0}
            fed = fed.restarted(fed.snapshot())
        pages.append(fed.page)

    assert pages[0] == pages[1]


def with_role(role: str, *features: str) -> EngineInfo:
    """Return the engine as a process with this role describes it."""
    info = engine()
    info.role, info.features = role, [*features]
    return info


def advance_without(fed: Fed, seconds: int, *talking: str) -> None:
    """Let ``seconds`` pass in which only the streams ``talking`` send heartbeats."""
    for _ in range(seconds):
        fed.advance(1.0)
        for stream in talking:
            fed.send(stream, Heartbeat(fed.incarnation(stream), fed.seqs[stream], 0))


@pytest.fixture
def tapped() -> Fed:
    """Return an intake with an engine that its core and an API server feed."""
    made = Fed()
    made.send_hello("core", [with_role(CORE, ENGINE_CORE)])
    made.send_hello("api", [with_role(FRONT_END, ENGINE_CORE)])
    made.items("core", [step(5)])
    made.items("api", [step(2, running=3)])
    return made


SILENT = int(GAUGES_EXPIRE_SECONDS) + 1
RUNNING = 'vllm:num_requests_running{engine="e",model_name="m"} 3'
TOKENS = 'vllm:generation_tokens_total{engine="e",model_name="m"} 7'


def test_a_silent_core_counts_by_itself(tapped: Fed) -> None:
    """An engine whose core is frozen is down, though its API server still sends."""
    advance_without(tapped, SILENT, "core", "api")
    assert up(tapped) == {"e": 1.0}

    advance_without(tapped, SILENT, "api")
    assert up(tapped) == {"e": 0.0}
    assert "vllm:num_requests_running" not in tapped.page
    assert TOKENS in tapped.page

    advance_without(tapped, int(ENGINE_EXPIRES_SECONDS), "api")
    tapped.send_hello("api", [with_role(FRONT_END, ENGINE_CORE)])
    assert up(tapped) == {"e": 0.0}
    assert "vllm:num_requests_running" not in tapped.page
    assert TOKENS in tapped.page

    tapped.send_hello("core", [with_role(CORE, ENGINE_CORE)])
    assert up(tapped) == {"e": 1.0}
    assert RUNNING in tapped.page


def test_a_silent_api_server_leaves_its_core_up(tapped: Fed) -> None:
    """The core schedules whatever other front ends send it."""
    advance_without(tapped, SILENT, "core")

    assert up(tapped) == {"e": 1.0}
    assert RUNNING in tapped.page


def test_a_cores_goodbye_marks_the_engine_as_down(tapped: Fed) -> None:
    """A core that has closed leaves its engine down until the core's next process, whatever its API server sends."""
    tapped.send("core", Bye(tapped.incarnation("core"), 1))
    assert up(tapped) == {"e": 0.0}
    assert RUNNING in tapped.page

    tapped.restart("core")
    tapped.send_hello("core", [with_role(CORE, ENGINE_CORE)])
    assert up(tapped) == {"e": 1.0}


def test_a_frozen_core_stays_silent_over_the_exporters_restart(tapped: Fed) -> None:
    """A snapshot has which streams are cores, so an API server alone brings nothing back."""
    restarted = Fed(boot=2)
    restore(restarted.intake, tapped.snapshot(), 0.0)
    restarted.seqs, restarted.processes = tapped.seqs, tapped.processes
    restarted.send_hello("api", [with_role(FRONT_END, ENGINE_CORE)])
    assert up(restarted) == {"e": 0.0}
    assert "vllm:num_requests_running" not in restarted.page

    restarted.send_hello("core", [with_role(CORE, ENGINE_CORE)])
    assert up(restarted) == {"e": 1.0}
    assert RUNNING in restarted.page


def test_an_engine_that_returns_without_its_tap_is_up(tapped: Fed) -> None:
    """A front end without the tap's feature shows that no stream of a core will follow."""
    advance_without(tapped, SILENT)
    tapped.restart("api")
    tapped.send_hello("api", [with_role("")])

    assert up(tapped) == {"e": 1.0}


def test_a_silent_scheduler_of_sglang_counts_by_itself() -> None:
    """A scheduler's gauges become stale while the server's other processes still send."""
    made = Fed()
    ranks = {"engine_type": "unified", "pp_rank": "0", "tp_rank": "0", "moe_ep_rank": "0"}
    scheduler = EngineInfo("s", "sglang", {"model_name": "m", **ranks}, role=CORE)
    tokenizer = EngineInfo("t", "sglang", {"model_name": "m", "engine_type": "unified"})
    made.send_hello("scheduler", [scheduler])
    made.send_hello("tokenizer", [tokenizer])
    stats = SglangSchedulerStats(num_used_tokens=5)
    made.items("scheduler", [encode_item(SglangStats(0, 1.0, 1.0, stats))])
    assert "sglang:num_used_tokens{" in made.page

    advance_without(made, SILENT, "tokenizer")

    assert up(made) == {"s": 0.0, "t": 1.0}
    assert "sglang:num_used_tokens{" not in made.page
