"""Releases of vLLM that call, name or return things otherwise: the engine works, and what is missing is said."""

from __future__ import annotations

import abc
import collections
import enum
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fake_vllm
from fake_vllm import (
    AsyncLLM,
    FinishReason,
    KVCacheMetricsCollector,
    Request,
    config,
    importable,
)
from scheduler_taps import Bench
from sidestep.protocol.request_events import Finished, Iteration, Queued
from sidestep_adapters.vllm import hook_installation
from sidestep_adapters.vllm.kv_cache import BlockTap
from sidestep_adapters.vllm.output_hook import UNSEEN_CALLS
from sidestep_adapters.vllm.ownership import is_tapped
from sidestep_adapters.vllm.stats import VllmTap
from vllm_front_ends import Client, Clock, HookedFrontEnd, output

MORE = {"energy": 1.5}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the time of front ends."""
    return Clock(monkeypatch)


class Base(abc.ABC):
    """The base of another release's stat loggers."""

    @abc.abstractmethod
    def record_energy(self, joules: float) -> None:
        """Record something new."""


class Prometheus(Base):
    """Its own metrics."""

    def record_energy(self, joules: float) -> None:
        """Count in a metric, which a stat logger in its place does not have."""
        self.counter.inc(joules)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["beside", "instead"])
def test_stat_loggers_take_any_call(
    mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """More arguments and more methods than are known; the step is recorded all the same."""
    monkeypatch.setenv("SIDESTEP_VLLM_MODE", mode)
    monkeypatch.setattr(fake_vllm, "PrometheusStatLogger", Prometheus)
    install = fake_vllm.install

    def with_other_base(patch: pytest.MonkeyPatch) -> None:
        install(patch)
        loggers: Any = sys.modules["vllm.v1.metrics"].loggers
        loggers.AggregateStatLoggerBase = Base

    monkeypatch.setattr(fake_vllm, "install", with_other_base)
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        logger = ours.stat_logger(config(), [3], "new", client_index=1)
        logger.record(fake_vllm.SchedulerStats(), fake_vllm.IterationStats(), **MORE)
        logger.record_sleep_state(1, 1, True, **MORE)
        logger.record_admission_rejection("full", **MORE)
        logger.log_engine_initialized(**MORE)
        logger.log(**MORE)
        logger.record_energy(1.5)
        pushed, errors = logger._publisher.queued, logger._publisher.errors
        logger._publisher.close()

    assert (pushed > 1, errors) == (True, 0)


class OwnMetrics:
    """vLLM's own metrics."""

    recorded: tuple[Any, ...] = ()

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self.made = vllm_config, engine_indexes

    def record(self, *call: Any) -> None:
        """Count a step."""
        self.recorded = call


def test_vllm_has_its_own_metrics_where_the_plugin_cannot_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise neither would have any, in mode ``instead``."""
    monkeypatch.setenv("SIDESTEP_VLLM_MODE", "instead")
    monkeypatch.setattr(fake_vllm, "PrometheusStatLogger", OwnMetrics)
    found = config()
    del found.model_config.max_model_len
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        logger = ours.stat_logger(found, [0])
    logger.record(1, 2)

    assert (type(logger), logger.made, logger.recorded) == (OwnMetrics, (found, [0]), (1, 2))
    assert sum("could not start" in message for message in caplog.messages) == 1


def test_vllm_has_its_own_metrics_where_the_endpoint_is_invalid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plugin replaces nothing that it cannot send."""
    monkeypatch.setenv("SIDESTEP_VLLM_MODE", "instead")
    monkeypatch.setattr(fake_vllm, "PrometheusStatLogger", OwnMetrics)
    with importable(monkeypatch, "http://exporter:9000") as ours:
        assert not issubclass(ours.stat_logger, OwnMetrics)


def test_a_record_of_an_unknown_engine_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without its index, it is not counted for the first engine."""
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        logger = ours.stat_logger(config(), [0, 1])
        logger.record(fake_vllm.SchedulerStats(), None, engine=1)
        errors = logger._publisher.errors
        logger._publisher.close()

    assert errors == 1


def test_iterators_reach_the_engine_whole(clock: Clock) -> None:
    """Outputs and names of aborted requests that can be read once only; what is not recorded is counted."""
    front = HookedFrontEnd(clock)
    processor = front.llm.output_processor
    front.add("a")
    front.add("b")
    names = []
    outputs = (each for each in [output("a", reason=FinishReason.STOP)])
    front.hook._around_outputs(lambda given, _: names.extend(given))(outputs, 1.0)
    aborted = front.hook._around_abort(lambda _: iter(["b"]))(["b"])

    assert ([each.request_id for each in names], [*aborted]) == (["a"], ["b"])
    assert (len(front.failures), front.requests.dropped) == (2, 2)
    assert processor.request_states.keys() == {"a", "b"}


def test_a_step_without_an_end_is_dropped(clock: Clock) -> None:
    """Stat loggers are not called: outputs are not kept for a step that never ends."""
    front = HookedFrontEnd(clock)
    front.llm.logger_manager.stat_loggers.clear()
    front.add("a")
    for stamp in range(3):
        front.llm.receive([output("a", queued=1.0)], float(stamp))

    assert front.failures == ["the end of a step was not recorded"] * 2
    assert front.events() == []
    assert front.requests._step.numbers == [1]


def test_outputs_of_an_unknown_engine_are_no_other_engines(clock: Clock) -> None:
    """An engine that came later is not described: its step is left out, and counted as dropped."""
    front = HookedFrontEnd(clock, [0, 1])
    front.add("a")
    front.add("b")
    front.llm.receive([output("a", queued=1.0)], 2.0, engine=7)
    front.llm.receive([output("b", queued=1.0)], 3.0, engine=1)

    (item,) = front.items()
    assert (item.engine, item.events[-1].outputs[0].requests) == (1, [2])
    assert (front.failures, front.requests.dropped) == (["an engine is unknown"], 1)


def test_requests_that_leave_unseen_are_compared(clock: Clock) -> None:
    """A method that is not wrapped ends a request: it is not in flight forever."""
    front = HookedFrontEnd(clock)
    front.add("a")
    front.add("b")
    front.receive(output("a", queued=1.0), output("b", queued=1.0))
    front.items()
    # Another dictionary, too.
    front.llm.output_processor.request_states = {"b": front.hook.states["b"]}
    for _ in range(UNSEEN_CALLS + 1):
        front.hook.compare()
    front.requests.resync(front.hook.states)

    assert front.failures == ["requests have left unseen"]
    assert front.requests.numbers.keys() == {"b"}
    assert [each.added.name for each in front.requests._requests.values()] == ["b"]


def test_an_event_of_another_clock_takes_no_others_along(clock: Clock) -> None:
    """The exporter would refuse an item with all of its step; the lost event counts as dropped."""
    front = HookedFrontEnd(clock)
    front.add("a")
    front.add("b")
    front.receive(output("a", queued=-1.0), output("b", queued=1.0))

    assert [type(event) for event in front.events()] == [Queued, Iteration]
    assert (front.failures, front.requests.dropped) == (
        ["an event has a value that cannot be sent"],
        1,
    )


def test_a_request_without_events_has_waited_since_its_arrival(clock: Clock) -> None:
    """Its prompt and its latencies are counted; the error is, too."""
    front = HookedFrontEnd(clock)
    front.add("a")
    clock.now += 2
    front.receive(output("a", reason=FinishReason.STOP))

    queued, step, finished = front.events()
    assert isinstance(queued, Queued)
    assert isinstance(finished, Finished)
    assert queued.stamp == pytest.approx(clock.engine - 2)
    assert queued.prompt_tokens == 7
    assert step.outputs[0].requests == [queued.request]
    assert front.failures == ["a request has no event of its queueing"]


def test_latencies_of_a_request_without_events_are_an_error(clock: Clock) -> None:
    """Where the core sends all else, its time to the first token is unknown: that is counted."""
    front = HookedFrontEnd(clock, tapped=True)
    front.add("a")
    front.receive(output("a", reason=FinishReason.STOP))
    (step,) = front.items()

    assert len(step.front_end.e2e_latencies) == 1
    assert front.failures == ["a request has no event of its queueing"]


def asynchronous(name: str) -> Callable[[AsyncLLM], None]:
    """Return a function that makes a method of the output processor asynchronous."""

    def change(llm: AsyncLLM) -> None:
        original = getattr(llm.output_processor, name)
        code = inspect.signature(original)

        async def method(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        method.__signature__ = code  # type: ignore[attr-defined]
        setattr(llm.output_processor, name, method)

    return change


@pytest.mark.parametrize("name", ["process_outputs", "add_request", "abort_requests"])
def test_asynchronous_methods_are_not_wrapped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM builds its statistics, and the reason is said."""
    fake_vllm.install(monkeypatch)
    llm = AsyncLLM(Client(), [0], lambda **_: SimpleNamespace())
    asynchronous(name)(llm)
    with pytest.raises(AttributeError, match=f"{name} is asynchronous"):
        hook_installation._check_release(llm)


class OtherScheduler(fake_vllm.Scheduler):
    """A scheduler whose methods have more parameters and results."""

    def add_request(self, request: Request, *, tenant: str = "") -> str:  # type: ignore[override]
        """Queue a request."""
        super().add_request(request)
        return tenant

    def schedule(self, step: Any = None) -> Any:
        """Return the next batch."""
        return super().schedule(), step

    def update_from_output(self, *, batch: Any, result: Any) -> Any:  # type: ignore[override]
        """Return the outputs."""
        return super().update_from_output(batch, result)

    def _preempt_request(self, request: Request) -> str:
        return request.request_id

    def _free_request(self, request: Request, *, delay: bool = False) -> str:  # type: ignore[override]
        super()._free_request(request)
        return f"freed {delay}"

    def shutdown(self, timeout: float = 0.0) -> float:  # type: ignore[override]
        """End."""
        return timeout


class Undecided:
    """An argument that is neither true nor false, as an array is."""

    def __bool__(self) -> bool:
        raise ValueError


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a scheduler of another release, with the tap."""
    monkeypatch.setattr(fake_vllm, "Scheduler", OtherScheduler)
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        yield ours.scheduler(config())


def test_a_scheduler_takes_other_arguments_and_returns_its_own_results(other: Any) -> None:
    """Nothing that the tap does not know is lost on the way, and its end is recorded."""
    first, second = Request("a"), Request("b")
    assert other.add_request(first, tenant="t") == "t"
    assert other.add_request(request=second, tenant="u") == "u"
    argument = Undecided()
    batch, step = other.schedule(step=argument)
    assert step is argument
    core = other._core
    before = core.publisher.errors
    assert other.update_from_output(result=None, batch=batch)[0].outputs
    assert core.publisher.errors == before
    assert other._preempt_request(request=first) == "a"
    assert other._free_request(first, delay=True) == "freed True"
    recorded = [make.__name__ for make, _ in core.requests._deferred_events]
    assert other.shutdown(timeout=3.0) == 3.0

    assert recorded == ["preempted", "finished"]


def test_what_cannot_be_read_of_a_call_reaches_no_engine(other: Any) -> None:
    """Errors are counted where the scheduler's attributes have moved."""
    core = other._core
    other.add_request(Request("a"))
    before = core.publisher.errors
    requests = other.requests
    other.waiting, other.running = [], [requests["a"]]
    del other.requests
    assert core.note(type(core).adding, core, other, requests["a"]) is False
    batch, _ = OtherScheduler.schedule(other)
    core.note(type(core).scheduled, core, 1.0, batch, other)
    errors = core.publisher.errors - before
    other.shutdown()

    assert errors == 2


def test_a_scheduler_without_a_needed_method_has_no_tap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The front end, which sees the same, reports all itself."""
    monkeypatch.delattr(fake_vllm.Scheduler, "_free_request")
    found = config()
    found.scheduler_config.scheduler_cls = "sidestep_adapters.vllm.scheduler.SidestepScheduler"
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        scheduler = ours.scheduler(found)
        is_seen = is_tapped(found)

    assert (scheduler._core, is_seen) == (None, False)
    assert [m for m in caplog.messages if "tap is off" in m and "_free_request" in m]


class Elsewhere:
    """Configuration of a release that has moved the asynchronous scheduler."""

    async_scheduling = True
    scheduler_cls: str | None = "sidestep_adapters.vllm.scheduler.SidestepScheduler"

    def get_scheduler_cls(self) -> Any:
        """Return the scheduler, unless another one is named."""
        assert self.scheduler_cls is None
        return OtherScheduler


def test_a_scheduler_that_has_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The configuration says which one it would take."""
    found = config()
    found.scheduler_config = Elsewhere()
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        scheduler = ours.scheduler(found)
        scheduler.shutdown()

    assert isinstance(scheduler, OtherScheduler)


class WithGroup(KVCacheMetricsCollector):
    """A collector that is told more."""

    def on_block_allocated(self, block: Any, group: int) -> None:  # type: ignore[override]
        """Note a block."""


class WithName(KVCacheMetricsCollector):
    """A collector whose block has another name, by which it may be passed."""

    def on_block_allocated(self, kv_block: Any) -> None:
        """Note a block."""


class WithMore(KVCacheMetricsCollector):
    """A collector that is told of more."""

    def on_block_moved(self, block: Any) -> None:
        """Note a block."""


class Derived(WithMore):
    """A collector whose base is told of more."""


@pytest.mark.parametrize("kind", [WithGroup, WithName, WithMore, Derived, None])
def test_a_block_pool_that_calls_otherwise_keeps_its_collector(
    kind: type | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only a collector with the same methods is replaced; the stream counts an error."""
    monkeypatch.setattr(fake_vllm, "KVCacheMetricsCollector", kind)
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        scheduler = ours.scheduler(config())
        scheduler.shutdown()

    assert scheduler.kv_cache_manager.block_pool.metrics_collector is None
    assert scheduler._core.publisher.errors == 1


def test_a_release_reads_more_of_its_collector(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tap has what a collector of the release's own class has, as vLLM 0.32 reads its rate."""
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        scheduler = ours.scheduler(config())
        collector = scheduler.kv_cache_manager.block_pool.metrics_collector
        scheduler.shutdown()

    assert isinstance(collector, BlockTap)
    assert (collector.sample_rate, collector.drain_events()) == (0.01, [])
    assert scheduler._core.publisher.errors == 0


def test_a_prefix_cache_that_cannot_be_read_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its lookups are not sent; all else is."""
    found = config()
    del found.cache_config.enable_prefix_caching
    with importable(monkeypatch, f"ipc://{tmp_path}/none") as ours:
        scheduler = ours.scheduler(found)
        scheduler.shutdown()

    assert (scheduler._core.requests.events.lookups, scheduler._core.publisher.errors) == (None, 1)


class Reason(enum.Enum):
    """Reasons of another release."""

    LENGTH = "length"


class Raising:
    """An object of an iteration with a property that raises."""

    num_prompt_tokens = 7

    @property
    def num_generation_tokens(self) -> int:
        """Raise an exception."""
        raise RuntimeError


def finished(reason: object) -> SimpleNamespace:
    """Return a finished request's statistics."""
    return SimpleNamespace(finish_reason=reason, num_generation_tokens=3)


def recorded(iteration: Any) -> tuple[list[Any], dict[str, str]]:
    """Return the items of a record, and the fields that are reported missing."""
    found: dict[str, str] = {}
    pushed: list[Any] = []
    tap = VllmTap(
        pushed.append,
        lambda _: None,
        [0],
        missing=lambda info: found.update(info["missing_fields"]),
    )
    tap.record(None, iteration)
    return [item for make in pushed for item in make()], found


@pytest.mark.parametrize(
    ("iteration", "path"),
    [
        (
            SimpleNamespace(finished_requests=[finished("length")]),
            "finished_requests.finish_reason",
        ),
        (
            SimpleNamespace(finished_requests=(finished(Reason.LENGTH),)),
            "finished_requests.finish_reason",
        ),
        (
            SimpleNamespace(inter_token_latencies_iter=collections.deque([0.5])),
            "inter_token_latencies_iter",
        ),
        (SimpleNamespace(inter_token_latencies_iter=iter([0.5])), "inter_token_latencies_iter"),
        (Raising(), "num_generation_tokens"),
    ],
)
def test_a_field_of_another_type_is_missing(iteration: Any, path: str) -> None:
    """Its metrics have no samples, instead of those of a default such as another finish reason."""
    _, found = recorded(iteration)

    assert f"iteration__{path.replace('.', '__')}" in found
    if isinstance(iteration, SimpleNamespace):
        assert "iteration__finished_requests__num_generation_tokens" not in found


def test_a_tuple_of_structs_has_their_fields() -> None:
    """A list that has become a tuple is none of a field of another type."""
    (step,), found = recorded(SimpleNamespace(finished_requests=(finished(1),)))

    assert step.iteration.finished_requests[0].num_generation_tokens == 3
    assert "iteration__finished_requests__finish_reason" not in found


def test_a_request_may_have_a_number_for_its_id() -> None:
    """It is queued as any other."""
    bench = Bench()
    bench.ask(7)  # type: ignore[arg-type]

    assert ([type(event) for event in bench.events()], bench.failures) == ([Queued], [])
