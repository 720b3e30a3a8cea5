"""With a tapped core every field of a step has one owner, which alone sends it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sidestep.engines.items import VllmStep
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats
from sidestep.protocol.iteration_stats import IterationStats
from sidestep_adapters.vllm.description import describe
from sidestep_adapters.vllm.ownership import FRONT_END, SCHEDULER_MODULE, UNOWNED, Role, is_tapped
from sidestep_adapters.vllm.stats import VllmTap

NUMBERS = {
    "scheduler": [
        name
        for name, default in zip(
            SchedulerStats.__struct_fields__, SchedulerStats.__struct_defaults__, strict=True
        )
        if isinstance(default, int | float)
    ],
    "iteration": [
        name
        for name, default in zip(
            IterationStats.__struct_fields__, IterationStats.__struct_defaults__, strict=True
        )
        if isinstance(default, int | float)
    ],
}


def stats(part: str) -> Any:
    """Return an object in which every number is 1."""
    return SimpleNamespace(**dict.fromkeys(NUMBERS[part], 1))


def sent(role: Role, *records: tuple[Any, Any, Any]) -> list[VllmStep]:
    """Return the items that a process with ``role`` makes of these records."""
    pushed: list[Any] = []
    tap = VllmTap(pushed.append, pytest.fail, [0], role=role)
    for record in records:
        tap.record(*record)
    return [item for make in pushed for item in make()]


def non_defaults(steps: list[VllmStep], part: str) -> set[str]:
    """Return the fields of a part that differ from their defaults."""
    structs = [getattr(step, part) for step in steps]
    return {
        name
        for struct in structs
        if struct is not None
        for name, default in zip(struct.__struct_fields__, struct.__struct_defaults__, strict=True)
        if isinstance(default, int | float) and getattr(struct, name) != default
    }


def test_each_number_is_sent_by_its_owner_only() -> None:
    """The core sends the scheduler's fields, the front end its own few."""
    iteration = stats("iteration")
    cache = SimpleNamespace(reset=False, requests=1, queries=2, hits=1)
    front_end = sent("front_end", (stats("scheduler"), iteration, cache))
    core = sent("core", (stats("scheduler"), None, None))

    assert set() == non_defaults(front_end, "scheduler")
    assert FRONT_END["iteration"] == non_defaults(front_end, "iteration")
    assert set(NUMBERS["scheduler"]) == non_defaults(core, "scheduler")
    assert set() == non_defaults(core, "iteration")
    assert CacheStats(False, 1, 2, 1) == front_end[0].mm_cache
    assert FRONT_END["iteration"] <= set(NUMBERS["iteration"])
    assert FRONT_END["mm_cache"] <= set(CacheStats.__struct_fields__)


def test_a_front_end_without_a_tapped_core_sends_all() -> None:
    """Nothing is left out."""
    steps = sent("alone", (stats("scheduler"), stats("iteration"), None))

    assert set(NUMBERS["scheduler"]) == non_defaults(steps, "scheduler")
    assert set(NUMBERS["iteration"]) == non_defaults(steps, "iteration")


def test_a_front_end_without_own_values_sends_nothing() -> None:
    """A step costs the serving loop almost nothing."""
    iteration = stats("iteration")
    for name in FRONT_END["iteration"]:
        setattr(iteration, name, 0)

    assert [] == sent("front_end", (stats("scheduler"), iteration, None), (None, None, None))


def test_iteration_details_have_no_owner() -> None:
    """The core times its iterations itself."""
    details = SimpleNamespace(elapsed_ms=5.0, num_ctx_requests=1)
    scheduler = SimpleNamespace(num_running_reqs=1, iteration_details=details)

    (core,) = sent("core", (scheduler, None, None))
    (alone,) = sent("alone", (scheduler, None, None))

    assert UNOWNED == {"iteration_details"}
    assert core.scheduler is not None
    assert core.scheduler.iteration_details is None
    assert alone.scheduler is not None
    assert alone.scheduler.iteration_details is not None


class DerivedScheduler:
    """A class in vLLM's configuration that derives from the tapped scheduler."""


DerivedScheduler.__module__ = SCHEDULER_MODULE


@pytest.mark.parametrize(
    ("chosen", "ours"),
    [
        (None, False),
        ("vllm.v1.core.sched.scheduler.Scheduler", False),
        (f"{SCHEDULER_MODULE}.SidestepScheduler", True),
        (DerivedScheduler, True),
        (type("Derived", (DerivedScheduler,), {}), True),
        (SimpleNamespace, False),
        (f"{__name__}.DerivedScheduler", True),
        ("schedulers.Scheduler", False),
        ("no_such_module.Scheduler", False),
        ("nothing", False),
    ],
)
def test_the_configuration_says_whether_the_core_is_tapped(chosen: Any, ours: bool) -> None:
    """The scheduler's name or class decides; both sides then describe the engine the same way."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="m", max_model_len=100),
        scheduler_config=SimpleNamespace(scheduler_cls=chosen),
        observability_config=SimpleNamespace(enable_logging_iteration_details=True),
    )

    description = describe(config, [0])

    assert ours is is_tapped(config)
    assert ours is description.tapped
    features = {"engine_core", "kv_cache_metrics"} if ours else {"iteration_details"}
    assert features == set(description.features)
    assert description.core_stream != description.stream
