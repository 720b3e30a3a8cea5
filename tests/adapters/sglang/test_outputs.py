"""What SGLang does with each output of a request, and its replacements: pages and messages are equal."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from collectors import TOKENIZER, Shown, TokenizerMetricsCollector, Unpublished, same
from sidestep_adapters.sglang import outputs as module
from sidestep_adapters.sglang import plugin as sglang_plugin
from sidestep_adapters.sglang import taps as sglang_taps
from sidestep_adapters.sglang.outputs import MESSAGES, TIME_STATS, Times, replace_decode

FAMILY = "sglang:inter_token_latency_seconds"


@dataclasses.dataclass
class APIServerReqTimeStats:
    """SGLang's times of a request in the tokenizer, as far as an output changes them."""

    last_time: float = 0.0

    def get_interval(self) -> float:
        """Return the seconds since the last output."""
        return time.perf_counter() - self.last_time

    def set_last_time(self) -> None:
        """Set the time of the last output."""
        self.last_time = time.perf_counter()


@dataclasses.dataclass
class SchedulerReqTimeStats:
    """SGLang's times of a request in the scheduler, as far as they are sent."""

    enable_metrics: bool = False
    queue_duration_s: float = 0.0
    prefill_finished_time: float = 0.0
    completion_time: float = 0.0
    has_timing_data: bool = False
    metrics_collector: Any = None
    last_decode_finish_time: float = 0.0
    decode_ct: int = 0
    trace_ctx: Any = dataclasses.field(
        default_factory=lambda: SimpleNamespace(tracing_enable=False)
    )

    def __getstate__(self) -> dict[str, Any]:
        if not self.enable_metrics:
            return {}
        sent = {name: vars(self)[name] for name in ("queue_duration_s", "prefill_finished_time")}
        return {"has_timing_data": True, **sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def set_last_decode_finish_time(self, ts: float | None = None) -> None:
        """Note the time of a token, and count it for traces."""
        self.last_decode_finish_time = ts or time.perf_counter()
        self.decode_ct += 1

    def convert_to_output_meta_info(self) -> dict[str, float]:
        """Return what a response tells of them."""
        return {"queue_time": self.queue_duration_s, "prefilled": self.prefill_finished_time}


class Manager:
    """SGLang's tokenizer manager, as far as it counts outputs and completes responses."""

    enable_metrics = True

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.responses: list[dict[str, float]] = []
        self.last_receive_tstamp = 0.0
        self.metrics_collector = self.collector()

    @staticmethod
    def collector() -> Any:
        """Return its collector, as the plugin makes SGLang create it."""
        return sglang_taps.tapped(TokenizerMetricsCollector, "tokenizer")(dict(TOKENIZER))

    async def generate_request(self) -> None:
        """Identify the manager to the plugin."""

    def _handle_abort_req(self, aborted: Any) -> None:
        """Stand for the function that the plugin wraps."""

    def _release_req_states_on_failure(self, states: Any) -> None:
        """Stand for the function that the plugin wraps."""

    def handle(self, output: Any) -> None:
        """Complete the responses of an output."""
        self.responses += [times.convert_to_output_meta_info() for times in output.time_stats]

    def collect_metrics(self, state: Any, recv_obj: Any, i: int) -> None:
        """Count an output, as SGLang 0.5.23 does."""
        tokens = recv_obj.completion_tokens[i]
        labels = {**self.metrics_collector.labels, **getattr(state.obj, "custom_labels", {})}
        if not state.ttft_observed:
            state.ttft_observed = True
            state.last_completion_tokens = tokens
            self.metrics_collector.observe_time_to_first_token(labels, 0.25, stream=True)
        else:
            new = tokens - state.last_completion_tokens
            interval = state.time_stats.get_interval()
            self.metrics_collector.observe_inter_token_latency(labels, interval, new)
            if new != 0:
                state.time_stats.set_last_time()
                state.last_completion_tokens = tokens
        if state.finished:
            self.metrics_collector.observe_one_finished_request(labels, 5, tokens, 0)


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide the modules of SGLang that are tried."""
    content: dict[str, dict[str, Any]] = {
        TIME_STATS: {
            "APIServerReqTimeStats": APIServerReqTimeStats,
            "SchedulerReqTimeStats": SchedulerReqTimeStats,
        },
        MESSAGES: {
            "unwrap_from_pickle": lambda sent: (
                pickle.loads(sent) if isinstance(sent, bytes) else sent
            )
        },
    }
    for name, attributes in content.items():
        made = ModuleType(name)
        vars(made).update(attributes)
        monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Unpublished:
    """Return the records of this process, which tapped collectors use."""
    caplog.set_level(logging.INFO)
    made = Unpublished()
    monkeypatch.setattr(sglang_taps, "_process", made)
    return made


class Clock:
    """A clock that stands still between two outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def state_of(**more: Any) -> Any:
    """Return the state of a request without any output."""
    return SimpleNamespace(
        obj=SimpleNamespace(**more),
        finished=False,
        ttft_observed=False,
        last_completion_tokens=1,
        time_stats=APIServerReqTimeStats(time.perf_counter()),
    )


def output(manager: Manager, state: Any, tokens: int, *, ends: bool = False) -> None:
    """Count an output of a request, which may be its last."""
    state.finished = ends
    reason = {"type": "stop"} if ends else None
    received = SimpleNamespace(completion_tokens=[0, tokens], finished_reasons=[None, reason])
    manager.collect_metrics(state, received, 1)


class Plain(Manager):
    """A tokenizer manager without the plugin."""

    @staticmethod
    def collector() -> Any:
        """Return SGLang's own collector."""
        return TokenizerMetricsCollector()


def counts_of(process: Unpublished) -> list[float]:
    """Return the numbers of latencies on the exporter's page."""
    samples = Shown(process).page[FAMILY].samples.items()
    return [number for (name, _), number in samples if name.endswith("_count")]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the plugin's lines about functions of SGLang, which are removed."""
    found = [each.getMessage() for each in caplog.records if each.name == module.__name__]
    caplog.clear()
    return found


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.lists(st.tuples(st.integers(-2, 4), st.floats(0.001, 9)), min_size=1, max_size=9),
        min_size=1,
        max_size=4,
    )
)
def test_pages_are_equal_for_any_outputs(
    requests: list[list[tuple[int, float]]],
    process: Unpublished,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Counts, sums and buckets are those of SGLang, whose function runs for a request's ends only."""
    process.deferred.clear()
    process._infos.clear()
    sglang_taps._classes.clear()
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        plain, ours = Plain(), Manager()
        taken = ours.collect_metrics
        assert taken.__func__ is not Manager.collect_metrics if hasattr(taken, "__func__") else True
        for given_outputs in requests:
            states = state_of(), state_of()
            tokens = 1
            for number, (more, seconds) in enumerate([(0, 0.5), *given_outputs]):
                clock.now += seconds
                tokens = max(tokens + more, 0)
                for manager, state in zip((plain, ours), states, strict=True):
                    output(manager, state, tokens, ends=number == len(given_outputs))
    page = Shown(process).page
    page.pop("sglang:num_aborted_requests", None)
    theirs = plain.metrics_collector.page
    theirs.pop("sglang:num_aborted_requests", None)

    same(theirs, page)
    assert lines(caplog) == ["sidestep: latencies are recorded without SGLang's collect_metrics"]


def _adds_a_metric(self: Any, state: Any, *_: Any) -> None:
    self.metrics_collector.observe_another(state)


def _counts_steps(self: Any, state: Any, recv_obj: Any, i: int) -> None:
    tokens = recv_obj.completion_tokens[i]
    self.metrics_collector.observe_inter_token_latency({}, state.time_stats.get_interval(), 1)
    state.last_completion_tokens = tokens


def _takes_more(self: Any, state: Any, recv_obj: Any, i: int, **_: Any) -> None:
    Plain.collect_metrics(self, state, recv_obj, i)


def _is_hooked(*_: Any) -> None:
    """Do what another plugin does."""


_is_hooked.__wrapped__ = Manager.collect_metrics  # type: ignore[attr-defined]


@pytest.mark.parametrize("other", [None, _adds_a_metric, _counts_steps, _takes_more, _is_hooked])
def test_another_release_counts_in_its_own_way(
    other: Any,
    process: Unpublished,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A function that is gone, or does something else, is not replaced, and one line says so."""
    if other is None:
        monkeypatch.delattr(Manager, "collect_metrics")
    else:
        monkeypatch.setattr(Manager, "collect_metrics", other)
    manager = Manager()
    (line,) = lines(caplog)

    assert "SGLang's own functions count each output from now on" in line
    assert "collect_metrics" not in vars(manager)
    assert process.deferred.lists != []


class Slotted(SimpleNamespace):
    """A state that takes no attributes of others."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("sidestep"):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize(
    ("kind", "error"), [(SimpleNamespace, "ZeroDivisionError"), (Slotted, "AttributeError")]
)
def test_an_output_that_cannot_be_read_is_counted_by_sglang(
    kind: type, error: str, process: Unpublished, caplog: pytest.LogCaptureFixture
) -> None:
    """So are all later ones: nothing is lost, requests go on, and one line says so."""
    manager = Manager()
    state = kind(**vars(state_of()))
    lines(caplog)
    for tokens in range(1, 7):
        with pytest.MonkeyPatch.context() as patch:
            if tokens == 4:
                patch.setattr(module, "add_latency", lambda *_: 1 / 0)
            output(manager, state, tokens)

    (line,) = lines(caplog)
    assert error in line
    assert manager.collect_metrics == Manager.collect_metrics.__get__(manager)
    assert [5] == counts_of(process)


def test_an_observer_has_lists_up_to_a_number_of_children(process: Unpublished) -> None:
    """Others are recorded with all calls; none is lost, and a child that lacks a label is a failure."""
    made = sglang_taps.tapped(TokenizerMetricsCollector, "tokenizer")({**TOKENIZER, "team": ""})
    for turn in range(2):
        for number in range(80):
            labels = {**TOKENIZER, "team": f"t{number}"}
            made.observe_inter_token_latency(labels, 0.5, 1 + turn)
    made.observe_inter_token_latency({}, 0.5, 1)
    waiting = len(process.deferred.lists)

    assert waiting == 64
    assert sum(counts_of(process)) == 80 * 3
    assert process.failures == ["a latency could not be recorded"]


class Wire:
    """The way of the times of requests from a scheduler to a tokenizer, each with the plugin."""

    def __init__(self, tokenizers: int = 1) -> None:
        self.scheduler = Times(lambda: tokenizers == 1)
        self.tokenizer = Times(lambda: False)
        self.manager = Plain()
        self.sizes: list[int] = []
        self.sent: list[Any] = []

    def step(self, **times: SchedulerReqTimeStats) -> list[dict[str, float]]:
        """Send an output of each request, and return what the responses tell of their times."""
        for rid in times:
            self.manager.rid_to_state.setdefault(rid, SimpleNamespace())
        accumulator = SimpleNamespace(time_stats=list(times.values()))
        self.sent = self.scheduler.send(lambda made: made.time_stats, accumulator)
        message = pickle.dumps(self.sent)
        self.sizes.append(len(message))
        self.manager.responses.clear()
        received = SimpleNamespace(rids=list(times), time_stats=pickle.loads(message))
        self.tokenizer.receive(Plain.handle, self.manager, received)
        return self.manager.responses


def times_of(queued: float) -> SchedulerReqTimeStats:
    """Return the times of a request that a scheduler runs."""
    return SchedulerReqTimeStats(enable_metrics=True, queue_duration_s=queued)


def test_times_are_sent_when_they_change() -> None:
    """Responses tell the same as without the plugin, and messages in between are short."""
    wire = Wire()
    a, b = times_of(0.5), times_of(0.25)
    first = list(wire.step(a=a, b=b))
    second = list(wire.step(a=a, b=b))
    a.queue_duration_s += 1.0
    retracted = list(wire.step(a=a, b=b))
    b.completion_time = 9.0
    last = list(wire.step(b=b))

    assert first == second == [{"queue_time": q, "prefilled": 0.0} for q in (0.5, 0.25)]
    assert [each["queue_time"] for each in retracted] == [1.5, 0.25]
    assert wire.sizes[1] < wire.sizes[0] / 2
    assert [each["queue_time"] for each in last] == [0.25]
    assert wire.sent == [b]


def test_times_of_unknown_requests_are_left_as_they_are() -> None:
    """A request may have ended in the tokenizer, and what follows it in the message is completed."""
    wire = Wire()
    a, b = times_of(0.5), times_of(0.25)
    wire.step(a=a, b=b)
    del wire.manager.rid_to_state["a"]
    wire.manager.rid_to_state = {"b": wire.manager.rid_to_state["b"]}
    accumulator = SimpleNamespace(time_stats=[a, b])
    sent = pickle.dumps(wire.scheduler.send(lambda made: made.time_stats, accumulator))
    received = SimpleNamespace(rids=["a", "b"], time_stats=sent)
    wire.manager.responses.clear()
    wire.tokenizer.receive(Plain.handle, wire.manager, received)

    assert [each["queue_time"] for each in wire.manager.responses] == [0.0, 0.25]


def test_several_tokenizers_get_all_times() -> None:
    """They load no plugins."""
    wire = Wire(tokenizers=2)
    a = times_of(0.5)
    for _ in range(2):
        wire.step(a=a)
        assert wire.sent == [a]


def test_messages_go_on_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's own functions handle them, and one line of each process says so."""
    wire = Wire()
    a = times_of(0.5)
    strange = SimpleNamespace(convert_to_output_meta_info=dict)
    found = []
    for _ in range(2):
        found.append(wire.step(a=a, b=strange))  # type: ignore[arg-type]
        assert wire.sent == [a, strange]
    told = lines(caplog)

    assert [2, 2] == [len(responses) for responses in found]
    assert [line.split(" from now on")[0] for line in told] == [
        "sidestep: SGLang's own functions send the times of requests",
        "sidestep: SGLang's own functions receive the times of requests",
    ]


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return SGLang's own function of the times of tokens, which is in place again after a test."""
    original = SchedulerReqTimeStats.set_last_decode_finish_time
    monkeypatch.setattr(SchedulerReqTimeStats, "set_last_decode_finish_time", original)
    return original


def test_the_time_of_a_token_is_noted(undone: Any) -> None:
    """Traces still get the stage that ends with it."""
    replace_decode()
    plain, traced = times_of(0.5), times_of(0.5)
    traced.trace_ctx.tracing_enable = True
    for times in (plain, traced):
        times.set_last_decode_finish_time(ts=7.0)
        times.set_last_decode_finish_time()

    assert SchedulerReqTimeStats.set_last_decode_finish_time is not undone
    assert (plain.decode_ct, traced.decode_ct) == (0, 2)
    assert min(plain.last_decode_finish_time, traced.last_decode_finish_time) > 7.0


def test_a_function_that_takes_more_is_not_replaced(
    undone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with an argument that is unknown would end SGLang's loop."""

    def more(times: Any, ts: float | None = None, **_: Any) -> None:
        undone(times, ts)

    monkeypatch.setattr(SchedulerReqTimeStats, "set_last_decode_finish_time", more)
    with pytest.raises(TypeError, match="takes times, ts, _"):
        replace_decode()


def test_tokens_go_on_after_an_error(undone: Any, caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's own function notes their times, and one line says so."""
    replace_decode()
    strange = times_of(0.5)
    del strange.trace_ctx
    for _ in range(2):
        strange.set_last_decode_finish_time(7.0)
    (line,) = lines(caplog)

    assert (strange.last_decode_finish_time, strange.decode_ct) == (7.0, 2)
    assert SchedulerReqTimeStats.set_last_decode_finish_time is undone
    assert "SGLang's own functions note the time of each token from now on" in line


def test_a_release_that_sends_other_times_has_no_hooks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is hooked if the times, or one of the two functions, are not as expected."""
    hooked: list[str] = []

    def register(target: str, *_: Any) -> None:
        hooked.append(target)

    sglang_plugin._register_times(register, SimpleNamespace(AROUND="around"))
    monkeypatch.setattr(SchedulerReqTimeStats, "__getstate__", lambda self: vars(self).copy())
    sglang_plugin._register_times(register, SimpleNamespace(AROUND="around"))
    told = lines(caplog)

    assert hooked == []
    assert ["ModuleNotFoundError", "ValueError"] == [
        line.split("from now on: ")[1].split("(")[0] for line in told
    ]
