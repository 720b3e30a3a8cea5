"""Translation of vLLM's objects into items: by name, owned, and without exceptions."""

from __future__ import annotations

import enum
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import SchedulerStats, VllmRejection, VllmSleep, VllmStep
from sidestep.protocol.limits import MAX_OBSERVATIONS, MAX_STRUCTS
from sidestep_adapters.vllm import stats as stats_module
from sidestep_adapters.vllm.stats import VllmTap, gauges_of


class Reason(enum.IntEnum):
    """An enum like the engine's finish reasons."""

    STOP = 0
    LENGTH = 1


class Sink:
    """A tap and the items that it pushes."""

    def __init__(self, *, later: bool = False, **options: Any) -> None:
        self.pushed: list[Any] = []
        self.later = later
        self.failures: list[str] = []
        self.tap = VllmTap(self.push, self.failures.append, [0, 1], **options)

    def push(self, item: Any) -> None:
        """Make deferred items at once unless ``later`` is set, as the publisher thread does."""
        self.pushed += item() if callable(item) and not self.later else [item]

    def sent(self) -> list[Any]:
        """Return what the exporter would decode."""
        made = [m for item in self.pushed for m in (item() if callable(item) else [item])]
        return [DIALECTS.decode(encode_item(item)) for item in made]


def scheduler(**fields: Any) -> SimpleNamespace:
    """Return the scheduler's stats of some release."""
    return SimpleNamespace(**{"num_running_reqs": 2, "kv_cache_usage": 0.5, **fields})


def iteration(**fields: Any) -> SimpleNamespace:
    """Return a front end's stats of some release."""
    return SimpleNamespace(**{"num_generation_tokens": 3, **fields})


def test_fields_are_read_by_name() -> None:
    """Missing fields take defaults, unknown ones are ignored, enums become numbers."""
    sink = Sink()
    finished = SimpleNamespace(finish_reason=Reason.LENGTH, e2e_latency=1.5, request_id="secret")
    sink.tap.record(
        scheduler(new_in_the_next_release=object()),
        iteration(finished_requests=[finished]),
        None,
        1,
    )
    (step,) = sink.sent()

    assert isinstance(step, VllmStep)
    assert step.engine == 1
    assert step.scheduler is not None
    assert step.scheduler.num_running_reqs == 2
    assert step.iteration is not None
    assert step.iteration.finished_requests[0].finish_reason == 1
    assert step.iteration.finished_requests[0].queued_time is None
    assert b"secret" not in encode_item(step)


def test_items_own_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes that the engine makes to its objects after the call have no effect.

    Of objects that it makes for every step only the numbers are copied at the call.
    """
    # Other tests have objects of these classes without some of the numbers.
    monkeypatch.setattr(stats_module, "_numbers", {})
    sink = Sink(later=True, connector="NixlConnector")
    stats = scheduler(kv_connector_stats={"num_failed_transfers": [1]})
    output = iteration()
    sink.tap.record(stats, output, None, 0)

    stats.num_running_reqs = output.num_generation_tokens = 99
    stats.kv_connector_stats["num_failed_transfers"].append(7)
    step, connector = sink.sent()

    assert step.scheduler.num_running_reqs == 2
    assert step.iteration.num_generation_tokens == 3
    assert connector.families[0].samples[0].value == 1


def test_equal_latencies_are_sent_as_a_run() -> None:
    """Nearly all decode steps have equal ones; others are sent as lists."""
    sink = Sink()
    unknown = [math.nan] * 300
    for latencies in ([0.25] * 300, [0.25] * 299 + [0.5], [0.25] * 3, unknown):
        sink.tap.record(None, iteration(inter_token_latencies_iter=latencies), None, 0)
    even, uneven, few, none = (step.iteration for step in sink.sent())

    assert even.inter_token_latencies_iter == []
    assert [(run.value, run.count) for run in even.inter_token_latencies_iter_runs] == [(0.25, 300)]
    assert len(uneven.inter_token_latencies_iter) == 300
    assert len(few.inter_token_latencies_iter) == 3
    assert len(none.inter_token_latencies_iter) == 300
    assert none.inter_token_latencies_iter_runs == []


@pytest.mark.parametrize("odd", [math.nan, -1, object(), True])
def test_an_invalid_value_drops_only_itself(odd: Any) -> None:
    """The rest of the record arrives; the loss is counted once."""
    sink = Sink()
    sink.tap.record(scheduler(kv_cache_usage=odd), iteration(), None, 0)
    (step,) = sink.sent()

    assert step.scheduler.num_running_reqs == 2
    assert step.iteration.num_generation_tokens == 3
    assert len(sink.failures) == (0 if odd is True else 1)


def test_an_oversized_step_is_split() -> None:
    """Nothing is lost, and the counts are in the first item only."""
    sink = Sink()
    many = [0.001 * n for n in range(MAX_OBSERVATIONS * 2 + 5)]
    events = [
        SimpleNamespace(lifetime_seconds=1.0, idle_seconds=0.5, reuse_gaps_seconds=(0.1,))
        for _ in range(MAX_STRUCTS + 1)
    ]
    sink.tap.record(
        scheduler(kv_cache_eviction_events=events),
        iteration(inter_token_latencies_iter=many),
        None,
        0,
    )
    first, *rest = sink.sent()

    assert not first.more
    assert all(step.more for step in rest)
    latencies = [v for s in (first, *rest) for v in s.iteration.inter_token_latencies_iter]
    assert latencies == many
    found = sum(len(step.scheduler.kv_cache_eviction_events) for step in (first, *rest))
    assert found == len(events)
    assert sum(step.iteration.num_generation_tokens for step in (first, *rest)) == 3
    assert sink.failures == []


def test_values_over_the_wires_limits_are_cut_and_counted() -> None:
    """With hundreds of adapters, a long name or many gaps, the step still arrives."""
    sink = Sink()
    adapters = {f"adapter{n}": 1 for n in range(500)} | {"x" * 1000: 1}
    event = SimpleNamespace(reuse_gaps_seconds=[0.1] * 1000)
    stats = scheduler(running_lora_adapters=adapters, kv_cache_eviction_events=[event])
    sink.tap.record(stats, iteration(), None, 0)
    (step,) = sink.sent()

    assert len(step.scheduler.running_lora_adapters) == 128
    assert len(step.scheduler.kv_cache_eviction_events[0].reuse_gaps_seconds) == 64
    assert step.iteration.num_generation_tokens == 3
    assert len(sink.failures) == 1


junk: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
fields = st.sampled_from(
    [
        "num_running_reqs", "kv_cache_usage", "prefix_cache_stats", "kv_cache_eviction_events",
        "spec_decoding_stats", "running_lora_adapters", "kv_connector_stats",
        "num_generation_tokens", "finished_requests", "inter_token_latencies_iter",
        "prompt_token_stats",
    ]
)  # fmt: skip


@given(st.dictionaries(fields, junk), st.integers(-2, 3), st.sampled_from(["", "NixlConnector"]))
def test_no_exception_reaches_the_engine(
    values: dict[str, Any], engine: int, connector: str
) -> None:
    """For any record the tap raises nothing and every item can be sent."""
    sink = Sink(connector=connector)
    stats = SimpleNamespace(**values)
    sink.tap.record(stats, stats, stats, engine)
    sink.sent()


class Hostile:
    """An object that raises at every attribute, and as text."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError


def test_objects_that_raise_are_counted() -> None:
    """Failing records count once each, and nothing is raised."""
    sink = Sink()
    sink.tap.record(Hostile(), Hostile(), None, 0)
    sink.tap.record(scheduler(), None, None, 99)
    sink.tap.record_sleep_state("deep", None)  # type: ignore[arg-type]
    sink.tap.record_admission_rejection(Hostile())  # type: ignore[arg-type]

    assert len(sink.failures) == 4


def test_sleep_states_are_of_all_engines_and_rejections_of_none() -> None:
    """The engine index of a rejection is 0, as vLLM does not report one."""
    sink = Sink()
    sink.tap.record_sleep_state(1, 2)
    sink.tap.record_admission_rejection("max_num_queued_reqs")

    assert [type(item) for item in sink.sent()] == [VllmSleep, VllmSleep, VllmRejection]
    assert [item.engine for item in sink.sent()] == [0, 1, 0]


@pytest.mark.parametrize("level", [-1, 99, 1 << 80])
def test_a_level_of_sleep_without_a_name_is_no_level(level: int) -> None:
    """An engine falls asleep at any level, and the exporter would refuse the item."""
    sink = Sink()
    sink.tap.record_sleep_state(1, level)

    assert [(item.sleep, item.level) for item in sink.sent()] == [(1, 0)] * 2


def test_a_diffusion_models_numbers_have_their_own_field() -> None:
    """The numbers arrive in the struct of speculative decoding."""
    sink = Sink(diffusion=True)
    sink.tap.record(scheduler(spec_decoding_stats=SimpleNamespace(num_drafts=4)), None, None, 0)
    (step,) = sink.sent()

    assert step.scheduler.spec_decoding_stats is None
    assert step.scheduler.diffusion_stats.num_drafts == 4


def test_the_state_that_is_sent_again_has_every_gauge() -> None:
    """An idle engine's gauge would otherwise become 0 after a restart of the exporter."""
    rows = [row for row in DIALECTS["vllm"].rows if row.kind == "gauge"]
    paths = [row.source.split(".") for row in rows if isinstance(row.source, str)]
    read = {
        path[1].removesuffix("[]").removesuffix("{}") for path in paths if path[0] == "scheduler"
    }
    # Properties are computed from fields.
    names = read & {*SchedulerStats.__struct_fields__}
    stats = SchedulerStats()
    for name in names:
        setattr(stats, name, object())
    again = gauges_of(stats)

    assert {"num_running_reqs", "kv_cache_usage"} <= names
    assert [name for name in names if getattr(again, name) is not getattr(stats, name)] == []
