"""Engines that fall silent, and come back."""

from __future__ import annotations

from itertools import cycle

import pytest

from intakes import Fed
from sidestep.engines.items import VllmStep, encode_item
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.metrics.registry import (
    ENGINE_EXPIRES_SECONDS,
    GAUGES_EXPIRE_SECONDS,
    MAX_ENGINES,
    TOTALS_EXPIRE_SECONDS,
)
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import Bye, EngineInfo, Heartbeat
from sidestep.protocol.self_described import Family, Sample, Samples

INFO = {"cache_config": {"block_size": "16"}}


def engine(name: str = "e") -> EngineInfo:
    """With an info metric."""
    return EngineInfo(name, "vllm", {"engine": name, "model_name": "m"}, INFO)


def step(tokens: int, running: int = 3, stamp: float = 1.0) -> bytes:
    """A step with a gauge."""
    stats = SchedulerStats(num_running_reqs=running)
    return encode_item(VllmStep(0, stamp, 1.0, stats, IterationStats(tokens)))


@pytest.fixture
def fed() -> Fed:
    """An engine that two streams feed."""
    made = Fed()
    for stream in ("one", "two"):
        made.greet(stream, [engine()])
        made.items(stream, [step(5)])
    return made


def up(fed: Fed) -> dict[str, float]:
    """``sidestep_engine_up`` by engine."""
    found = (m for m in fed.intake.metrics.collect() if m.name == "sidestep_engine_up")
    return {sample.labels["engine"]: sample.value for m in found for sample in m.samples}


def test_gauges_go_with_the_last_stream_that_is_heard(fed: Fed) -> None:
    """Counters stay; what the engine's state is nobody knows any more."""
    fed.pass_time(GAUGES_EXPIRE_SECONDS / 2)
    fed.say("two", Heartbeat(2, 1, 0))
    fed.pass_time(GAUGES_EXPIRE_SECONDS / 2 + 1)

    assert up(fed) == {"e": 1.0}
    assert 'vllm:num_requests_running{engine="e",model_name="m"} 3' in fed.page
    fed.pass_time(GAUGES_EXPIRE_SECONDS)
    assert up(fed) == {"e": 0.0}
    assert "vllm:num_requests_running" not in fed.page
    assert "vllm:cache_config_info" not in fed.page
    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 10' in fed.page


def test_gauges_come_back_with_any_word(fed: Fed) -> None:
    """A process that was stopped has told of all its changes: what is known is true."""
    fed.pass_time(GAUGES_EXPIRE_SECONDS + 1)
    fed.say("one", Heartbeat(1, 1, 0))

    assert up(fed) == {"e": 1.0}
    assert 'vllm:num_requests_running{engine="e",model_name="m"} 3' in fed.page


def test_gauges_of_a_process_that_has_ended_are_not_its_successors(fed: Fed) -> None:
    """The new one has not told of anything yet."""
    fed.pass_time(GAUGES_EXPIRE_SECONDS + 1)
    fed.restart("one")
    fed.greet("one", [engine()])

    assert "vllm:num_requests_running" not in fed.page
    fed.items("one", [step(1, running=7, stamp=0.5)])
    assert 'vllm:num_requests_running{engine="e",model_name="m"} 7' in fed.page
    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 11' in fed.page


def test_an_engine_that_the_new_process_names_later_has_begun_anew_as_well() -> None:
    """Once, whatever it names after that; one that nobody told of before has not."""
    made = Fed()
    made.greet("one", [engine("a"), engine("b")])
    made.items("one", [step(5)])
    made.greet("one", [engine("a"), engine("b"), engine("c")])
    assert {"a": 0, "b": 0, "c": 0} == restarts(made)

    made.restart("one")
    made.greet("one", [engine("b")])
    for known in ([], ["c"], ["c", "d"]):
        made.greet("one", [engine(name) for name in ("b", "a", *known)])

    assert {"a": 1, "b": 1, "c": 0, "d": 0} == restarts(made)
    made.items("one", [encode_item(VllmStep(1, 0.5, 1.0, SchedulerStats(num_running_reqs=7)))])
    assert 'vllm:num_requests_running{engine="a",model_name="m"} 7' in made.page


def restarts(fed: Fed) -> dict[str, float]:
    """``sidestep_engine_restarts_total`` by engine."""
    found = (m for m in fed.intake.metrics.collect() if m.name == "sidestep_engine_restarts")
    return {sample.labels["engine"]: sample.value for m in found for sample in m.samples}


def test_a_goodbye_is_believed_at_once(fed: Fed) -> None:
    """The engine is not up any more; its gauges stay for as long as after any last word."""
    for number, stream in enumerate(("one", "two"), start=1):
        fed.say(stream, Bye(number, 1))

    assert up(fed) == {"e": 0.0}
    assert "vllm:num_requests_running" in fed.page
    fed.pass_time(GAUGES_EXPIRE_SECONDS + 1)
    assert "vllm:num_requests_running" not in fed.page


def test_an_engine_that_is_gone_is_not_shown_and_comes_back_with_its_totals(fed: Fed) -> None:
    """It may be a pod that was moved, or a machine that slept; it has to say again who it is."""
    fed.pass_time(ENGINE_EXPIRES_SECONDS + 1)

    assert fed.page == ""
    assert up(fed) == {}
    fed.say("one", Heartbeat(1, 1, 0))
    assert up(fed) == {}
    fed.greet("one", [engine()])
    fed.items("one", [step(2)])
    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 12' in fed.page
    assert up(fed) == {"e": 1.0}


def test_another_process_of_a_gone_engine_goes_on_with_its_totals(fed: Fed) -> None:
    """A counter never goes back because an engine was away for long."""
    fed.pass_time(ENGINE_EXPIRES_SECONDS + 1)
    fed.restart("one")
    fed.greet("one", [engine()])
    fed.items("one", [step(2)])

    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 12' in fed.page


def test_totals_outlive_the_process_while_nobody_feeds_them(fed: Fed) -> None:
    """Not shown by the next one either, until the engine is back."""
    fed.pass_time(ENGINE_EXPIRES_SECONDS + 1)
    other = fed.reborn(fed.snapshot())
    other.items("one", [step(1)])

    assert 'vllm:generation_tokens_total{engine="e",model_name="m"} 11' in other.page


def test_totals_are_forgotten_in_the_end(fed: Fed) -> None:
    """After a day, and where there are too many the first that went."""
    fed.pass_time(ENGINE_EXPIRES_SECONDS + 1)
    assert list(fed.intake.registry.retired) == ["e"]
    fed.now += TOTALS_EXPIRE_SECONDS
    fed.intake.expire(fed.now)

    assert fed.intake.registry.retired == {}
    for batch in range(2):
        for number in range(MAX_ENGINES - 5):
            fed.greet("many", [engine(f"e{batch}/{number}")])
            fed.restart("many")
        fed.greet("many", [])
        fed.pass_time(ENGINE_EXPIRES_SECONDS + 1)
    kept = list(fed.intake.registry.retired)
    assert len(kept) == MAX_ENGINES
    assert kept[-1] == f"e1/{MAX_ENGINES - 6}"


def test_an_engine_that_comes_back_under_other_labels_starts_anew(fed: Fed) -> None:
    """While it is fed, the first labels stand: two streams must not take turns."""
    other = EngineInfo("e", "vllm", {"engine": "e", "model_name": "another"})
    fed.greet("three", [other])
    assert 'model_name="another"' not in fed.page
    for number, stream in enumerate(("one", "two", "three"), start=1):
        fed.say(stream, Bye(number, fed.seqs[stream]))
    fed.restart("one")
    fed.greet("one", [other])

    assert 'model_name="m"' not in fed.page
    assert 'vllm:generation_tokens_total{engine="e",model_name="another"} 0' in fed.page


def test_gauges_that_describe_themselves_go_as_well(fed: Fed) -> None:
    """And their room is there for others."""
    families = [
        Family("own_state", "gauge", ["k"], [Sample([str(n)], 1.0) for n in range(9)]),
        Family("own_total", "counter", [], [Sample([], 4.0)]),
    ]
    fed.items("one", [encode_item(Samples(0, 1.0, families))])
    series = fed.intake.registry.quota.series
    fed.pass_time(GAUGES_EXPIRE_SECONDS + 1)

    assert "own_state" not in fed.page
    assert "own_total" in fed.page
    fed.restart("one")
    fed.greet("one", [engine()])
    assert "own_state" not in fed.page
    assert fed.intake.registry.quota.series == series - 9


def test_clocks_that_jump_change_nothing() -> None:
    """Unix time is told to people; what is silent or old is measured by a clock that never jumps."""
    pages = []
    for times in (cycle([1e9]), cycle([1e9, 2e9, 5.0])):
        fed = Fed()
        fed.greet("one", [engine()])
        for tokens in range(5):
            fed.intake._wall = lambda times=times: next(times)  # type: ignore[misc]
            fed.items("one", [step(tokens)])
            fed.pass_time(2.0)
            assert up(fed) == {"e": 1.0}
            fed = fed.reborn(fed.snapshot())
        pages.append(fed.page)

    assert pages[0] == pages[1]
