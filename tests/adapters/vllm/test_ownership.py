"""Owners of a step's fields: with a tapped core, the core or the front end sends each field."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import fake_vllm
from fake_vllm import importable
from sidestep.engines.vllm.wire import CacheStats, FrontEndLatencies, SchedulerStats, VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_OBSERVATIONS
from sidestep_adapters.vllm.description import describe
from sidestep_adapters.vllm.ownership import FRONT_END_FIELDS, SCHEDULER_MODULE, Role, is_tapped
from sidestep_adapters.vllm.stats import VllmTap

STRUCTS: dict[str, Any] = {"scheduler": SchedulerStats, "iteration": IterationStats}


def numbers(part: str) -> dict[str, float]:
    """Return the names and defaults of a part's numbers."""
    struct = STRUCTS[part]
    return {
        name: default
        for name, default in zip(struct.__struct_fields__, struct.__struct_defaults__, strict=True)
        if isinstance(default, int | float)
    }


def stats(part: str) -> Any:
    """Return an object in which every number is 1."""
    return SimpleNamespace(**dict.fromkeys(numbers(part), 1))


def sent(role: Role, *records: tuple[Any, Any, Any]) -> list[VllmStep]:
    """Return the items that a process with ``role`` makes of these records."""
    pushed: list[Any] = []
    tap = VllmTap(pushed.append, pytest.fail, [0], role=role)
    for record in records:
        tap.record(*record)
    return [item for make in pushed for item in make()]


def non_defaults(steps: list[VllmStep], part: str) -> set[str]:
    """Return the numbers of a part that differ from their defaults."""
    return {
        name
        for step in steps
        for name, default in numbers(part).items()
        if getattr(getattr(step, part), name, default) != default
    }


def test_each_number_is_sent_by_its_owner_only() -> None:
    """The core sends the scheduler's fields, the front end its own few."""
    iteration = stats("iteration")
    cache = SimpleNamespace(reset=False, requests=1, queries=2, hits=1)
    front_end = sent("front_end", (stats("scheduler"), iteration, cache))
    core = sent("core", (stats("scheduler"), None, None))

    assert set() == non_defaults(front_end, "scheduler")
    assert set(FRONT_END_FIELDS) == non_defaults(front_end, "iteration")
    assert numbers("scheduler").keys() == non_defaults(core, "scheduler")
    assert set() == non_defaults(core, "iteration")
    assert CacheStats(False, 1, 2, 1) == front_end[0].mm_cache
    assert set(FRONT_END_FIELDS) <= numbers("iteration").keys()


def test_a_front_end_sends_what_users_waited() -> None:
    """First tokens and ends of requests, however many of a step, with the time of their measurement."""
    finished = [SimpleNamespace(e2e_latency=4.0, queued_time=queued) for queued in (1.0, -2.0)]
    waited = [float(number) for number in range(MAX_OBSERVATIONS + 1)]
    first, ended = (
        SimpleNamespace(iteration_timestamp=100.0, num_generation_tokens=3, **values)
        for values in (
            {"time_to_first_tokens_iter": waited, "finished_requests": []},
            {"time_to_first_tokens_iter": [1.5], "finished_requests": finished},
        )
    )

    *split, last = sent("front_end", (stats("scheduler"), first, None), (None, ended, None))

    found = [step.front_end for step in split if step.front_end is not None]
    assert [step.more for step in (*split, last)] == [False, True, False]
    assert waited == [value for one in found for value in one.time_to_first_tokens]
    assert {100.0} == {one.iteration_timestamp for one in found}
    assert last.front_end == FrontEndLatencies(100.0, [1.5], [4.0, 4.0], [1.0, 0.0])
    assert (last.iteration, last.scheduler) == (None, None)


def test_a_front_end_without_own_values_sends_nothing() -> None:
    """A step costs the serving loop almost nothing."""
    iteration = stats("iteration")
    vars(iteration).update(dict.fromkeys(FRONT_END_FIELDS, 0))

    assert [] == sent("front_end", (stats("scheduler"), iteration, None), (None, None, None))


class DerivedScheduler:
    """A class in vLLM's configuration that derives from the tapped scheduler."""


DerivedScheduler.__module__ = SCHEDULER_MODULE


@pytest.mark.parametrize(
    ("chosen", "ours"),
    [
        (None, False),
        (f"{SCHEDULER_MODULE}.SidestepScheduler", True),
        (DerivedScheduler, True),
        (SimpleNamespace, False),
        (f"{__name__}.DerivedScheduler", True),
        ("schedulers.Scheduler", False),
        ("no_such_module.Scheduler", False),
    ],
)
def test_the_scheduler_class_decides_whether_the_core_is_tapped(chosen: Any, ours: bool) -> None:
    """The class, given by name or as an object, counts for the core's and a front end's description."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="m", max_model_len=100),
        scheduler_config=SimpleNamespace(scheduler_cls=chosen),
        observability_config=SimpleNamespace(enable_logging_iteration_details=True),
    )

    description = describe(config, [0])

    assert ours is is_tapped(config)
    assert description.role == ("front_end" if ours else "alone")
    features = {"engine_core", "kv_cache_metrics"} if ours else {"iteration_details"}
    assert features == set(description.features)
    assert description.core_stream != description.stream


@pytest.mark.parametrize("has_front_end", [True, False])
def test_a_tap_that_front_ends_cannot_see_stays_off(
    has_front_end: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A function made the scheduler; a front end that gets its statistics would count the same."""
    with importable(monkeypatch, "ipc:///nowhere/s") as ours:
        config = fake_vllm.config()
        config.scheduler_config.scheduler_cls = f"{__name__}.no_class"
        scheduler = ours.scheduler(config, log_stats=has_front_end)
        taps = scheduler._core is None, [r for r in caplog.records if r.levelname == "ERROR"]
        scheduler.shutdown()

    assert taps[0] is has_front_end
    assert len(taps[1]) == has_front_end
