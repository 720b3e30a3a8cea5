"""The limit that is noted of SGLang's scheduler, and its backlog; the objects are shaped like SGLang's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sidestep.protocol.request_events import LIMITS
from sidestep.protocol.self_described import Samples
from sidestep_adapters.sglang import limits, plugin
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics
from sidestep_adapters.sglang.limits import SECONDS, STEPS, LimitRecorder


def request(prompt: int = 10, output: int = 0, matched: int = 0, **more: Any) -> Any:
    """Return a request of the scheduler's."""
    return SimpleNamespace(
        origin_input_ids=[0] * prompt,
        output_ids=[0] * output,
        num_matched_prefix_tokens=matched,
        **more,
    )


def prefill(*requests: Any) -> Any:
    """Return a batch of prefills."""
    return SimpleNamespace(
        reqs=[*requests],
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        batch_is_full=False,
    )


def decode(*requests: Any) -> Any:
    """Return a running batch."""
    return SimpleNamespace(
        reqs=[*requests],
        forward_mode=SimpleNamespace(is_extend=lambda: False),
        batch_is_full=False,
    )


class Scheduler(SimpleNamespace):
    """A scheduler, of which a weak reference is kept."""


class Bench:
    """A recorder, and a scheduler whose choices it sees at times of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(limits, "_monotonic", lambda: self.now)
        self.deferred = DeferredMetrics()
        self.failures: list[str] = []
        self.deferred.fail = self.failures.append
        self.recorder = LimitRecorder(self.deferred, 3)
        self.free = 10
        self.scheduler = Scheduler(
            waiting_queue=[],
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            running_batch=decode(),
            chunked_req=None,
            max_running_requests=4,
            enable_hicache_storage=False,
            req_to_token_pool=SimpleNamespace(available_size=lambda: self.free),
        )
        self.totals: dict[tuple[str, str], float] = {}
        self.gauges: dict[str, float] = {}

    def choose(self, batch: Any = None, running: Any = None, after: float = 1.0) -> None:
        """Let the scheduler choose a batch, some seconds later."""
        self.now += after
        self.scheduler.running_batch = running or decode()
        plan = SimpleNamespace(batch_to_run=batch, running_batch=self.scheduler.running_batch)
        self.recorder.chosen(plan, self.scheduler)

    def read(self) -> dict[str, float]:
        """Return the seconds by limit that were sent until now."""
        self.recorder()
        for item in self.deferred.items():
            assert isinstance(item, Samples)
            assert item.engine == 3
            for family in item.families:
                for sample in family.samples:
                    if family.kind == "gauge":
                        self.gauges[family.name] = sample.value
                    else:
                        key = family.name, sample.labels[0]
                        self.totals[key] = self.totals.get(key, 0.0) + sample.value
        return self.of(SECONDS)

    def of(self, name: str) -> dict[str, float]:
        """Return the totals of a counter that are not 0."""
        return {limit: total for (n, limit), total in self.totals.items() if n == name and total}

    def limit(self, batch: Any, running: Any = None) -> str:
        """Return the limit of a choice."""
        self.choose(batch, running)
        return self.recorder._open[0]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A recorder and a scheduler."""
    return Bench(monkeypatch)


def test_nobody_waits(bench: Bench) -> None:
    """Not even while the prompt of a request is divided."""
    bench.scheduler.chunked_req = request(prefix_len=0)

    assert "none" == bench.limit(prefill(request()))
    assert "none" == bench.limit(None, decode(request()))
    assert "" == bench.limit(None)


CASES: dict[str, tuple[str, Callable[[Bench], str]]] = {
    "the batch is full": ("slots", lambda b: b.limit(None, decode(*map(request, range(4))))),
    "with what is prefilled": (
        "slots",
        lambda b: b.limit(prefill(request(), request()), decode(request(), request())),
    ),
    "tokens of a prefill are used up": ("tokens", lambda b: b.limit(prefill(request()))),
    "nothing is prefilled, by a delayer": ("deferred", lambda b: b.limit(None, decode(request()))),
}


@pytest.mark.parametrize("case", CASES)
def test_requests_wait(case: str, bench: Bench) -> None:
    """The scheduler's state says for what."""
    limit, found = CASES[case]
    bench.scheduler.waiting_queue = [request()]

    assert limit == found(bench)


def test_results_of_a_pass(bench: Bench) -> None:
    """A shortage of memory is remembered until a request has left; other results are of one pass."""
    bench.scheduler.waiting_queue = [request()]
    bench.recorder.considered(SimpleNamespace(name="NO_TOKEN"))
    assert "kv_blocks" == bench.limit(prefill(request()))
    assert "tokens" == bench.limit(prefill(request()))
    full = decode(request())
    full.batch_is_full = True
    assert "kv_blocks" == bench.limit(None, full)
    bench.recorder.considered_adapter(True)
    bench.recorder.considered_adapter(False)
    assert "lora" == bench.limit(None, decode(request()))
    assert "deferred" == bench.limit(None, decode(request()))
    bench.free = 0
    assert "slots" == bench.limit(None, decode(request()))


def test_conditions_of_single_requests(bench: Bench) -> None:
    """A compiled grammar, and KV from a storage."""
    bench.scheduler.grammar_manager.grammar_queue = [request()]
    assert "grammar" == bench.limit(None)
    bench.scheduler.waiting_queue = [request()]
    bench.scheduler.enable_hicache_storage = True
    assert "kv_transfer" == bench.limit(None)
    bench.recorder.considered(SimpleNamespace(name="OTHER"))
    assert "tokens" == bench.limit(prefill(request()))


def test_time_is_counted_until_the_reading(bench: Bench) -> None:
    """That of an open step, too, but no idle time; the sums never exceed what has passed."""
    bench.scheduler.waiting_queue = [request()]
    bench.choose(prefill(request()))
    bench.now += 2.0
    assert {"tokens": 2.0} == bench.read()
    bench.scheduler.waiting_queue = []
    bench.choose(None, decode(request()), after=3.0)
    assert {"tokens": 5.0} == bench.read()
    bench.choose(None, after=1.0)
    bench.choose(None, after=60.0)
    bench.choose(prefill(request()), after=60.0)
    bench.choose(None, after=0.5)

    assert {"tokens": 5.0, "none": 1.5} == bench.read()
    assert {"tokens": 1.0, "none": 1.0} == bench.of(STEPS)
    assert {limit for _, limit in bench.totals} == {*LIMITS}
    assert [] == bench.failures


def test_a_pause(bench: Bench) -> None:
    """It counts while requests wait or run, although the loop chooses nothing."""
    bench.choose(None, decode(request()))
    bench.now += 1.0
    bench.recorder.paused(True)
    bench.now += 4.0
    assert {"none": 1.0, "paused": 4.0} == bench.read()
    bench.scheduler.running_batch = decode()
    bench.now += 50.0
    assert {"none": 1.0, "paused": 4.0} == bench.read()
    bench.recorder.paused(False)
    bench.choose(None)
    assert {"none": 1.0, "paused": 4.0} == bench.read()


def test_the_backlog(bench: Bench) -> None:
    """Of waiting requests, also those without their grammar, and of the prompt that is divided."""
    bench.scheduler.waiting_queue = [request(30, matched=20), request(10, output=5)]
    bench.scheduler.grammar_manager.grammar_queue = [request(2)]
    bench.scheduler.chunked_req = request(100, prefix_len=60)
    bench.choose(prefill(request()))
    bench.read()

    assert {
        "sidestep_waiting_prompt_tokens": 42,
        "sidestep_unfinished_prefill_tokens": 47 + 40,
        "sidestep_waiting_uncached_tokens": 27,
    } == bench.gauges


def test_what_a_release_lacks_is_reported(bench: Bench) -> None:
    """The reader does not raise."""
    bench.choose(prefill(request()))
    del bench.scheduler.waiting_queue
    bench.read()

    assert 1 == len(bench.failures)


def test_a_hook_that_fails_is_the_last(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang does not catch what a hook raises."""
    process = SimpleNamespace(limits=bench.recorder, deferred=bench.deferred)
    monkeypatch.setattr(plugin, "process", lambda: process)
    recording: dict[str, Any] = plugin.RECORDING
    hooks = {name.rpartition(".")[2]: hook for name, hook in recording.items()}
    hooks["add_one_req"](SimpleNamespace(name="NO_TOKEN"), "adder", "request")
    hooks["can_schedule_lora_req"](False, "scheduler", "request", set())
    hooks["pause_generation"](None, "scheduler", "request")
    assert ("NO_TOKEN", True, "paused") == (
        bench.recorder._result,
        bench.recorder._has_refused_adapter,
        bench.recorder._open[0],
    )
    hooks["continue_generation"](None, "scheduler", "request")
    bench.scheduler.waiting_queue.append(request())
    bench.choose(decode())
    hooks["get_next_batch_to_run"](None, SimpleNamespace(), running_batch=None)
    bench.now += 100.0

    assert process.limits is None
    assert 1 == len(bench.failures)
    assert bench.read() == {}
