"""Releases of SGLang that call its collectors and functions otherwise: nothing is raised or counted wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from collectors import TOKENIZER, SchedulerMetricsCollector, Shown, TokenizerMetricsCollector
from sglang_managers import Manager
from sidestep_adapters.sglang import taps as sglang_taps
from sidestep_adapters.sglang.outputs import Times
from sidestep_adapters.sglang.process import Process

LATENCIES = "sglang:inter_token_latency_seconds"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """Return the records of this process, which tapped collectors use."""
    made = Process("ipc://nowhere", "pod", beside=False)
    monkeypatch.setattr(made, "start", lambda *_: None)
    monkeypatch.setattr(made.deferred, "fail", pytest.fail)
    monkeypatch.setattr(sglang_taps, "_process", made)
    return made


class Renamed(TokenizerMetricsCollector):
    """A collector whose method has another name for an argument, and one argument more."""

    def observe_inter_token_latency(  # type: ignore[override]
        self, labels: Any, interval: float, num_new_tokens: int, **_: Any
    ) -> None:
        """Observe the latency of new tokens."""
        super().observe_inter_token_latency(labels, interval, num_new_tokens)


def test_latencies_have_other_names(process: Process) -> None:
    """The order of the method's parameters counts."""
    collector = sglang_taps.tapped(Renamed, "tokenizer")(dict(TOKENIZER))
    observe = collector.observe_inter_token_latency
    observe(dict(TOKENIZER), 0.3, 3)
    observe(dict(TOKENIZER), 0.3, 3, is_draft=True)
    observe(num_new_tokens=3, interval=0.3, labels=dict(TOKENIZER), is_draft=True)
    counts = {
        name: value
        for (name, _), value in Shown(process).page[LATENCIES].samples.items()
        if name.endswith(("_count", "_sum"))
    }

    assert counts == {f"{LATENCIES}_count": 9, f"{LATENCIES}_sum": pytest.approx(0.9)}


def test_reports_have_more_arguments_and_another_type(process: Process) -> None:
    """An object without a dictionary has attributes all the same."""
    collector = sglang_taps.tapped(SchedulerMetricsCollector, "scheduler")()
    stats = msgspec.defstruct("Stats", ["num_running_reqs", "gen_throughput"])
    collector.log_stats(stats(3, 7.5), phase="decode")
    page = Shown(process).page

    assert [*page["sglang:num_running_reqs"].samples.values()] == [3]
    assert [*page["sglang:gen_throughput"].samples.values()] == [7.5]


@pytest.mark.parametrize("beside", [False, True])
def test_metrics_get_exemplars(beside: bool, process: Process) -> None:
    """The stubs have the parameters of prometheus_client's objects."""
    process.beside = beside
    collector = sglang_taps.tapped(TokenizerMetricsCollector, "tokenizer")(dict(TOKENIZER))
    labels = {**TOKENIZER, "is_streaming": "true"}
    collector.num_requests_total.labels(**labels).inc(amount=2, exemplar={"a": "b"})
    prompts = collector.prompt_tokens_histogram.labels(**TOKENIZER)
    prompts.observe(amount=7.0, exemplar={"a": "b"})
    page = Shown(process).page

    assert [*page["sglang:num_requests"].samples.values()] == [2]
    assert 7.0 in page["sglang:prompt_tokens_histogram"].samples.values()


def test_a_collector_with_its_metrics_elsewhere_is_not_tapped(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang counts alone; the log says so, and the stream that another collector starts counts errors."""
    own = Process(f"ipc://{tmp_path}/none", "pod", beside=False)
    monkeypatch.setattr(sglang_taps, "_process", own)

    class Moved(SchedulerMetricsCollector):
        def __init__(self) -> None:
            super().__init__()
            kept = vars(self).copy()
            self.metrics = SimpleNamespace(**kept)
            vars(self).clear()
            vars(self).update(metrics=SimpleNamespace(**kept), labels=kept["labels"])

    tapped = sglang_taps.tapped(Moved, "scheduler")
    collector = tapped()
    own.start("sglang/scheduler", "m")
    again = tapped()
    assert own.publisher is not None
    own.publisher.close()

    assert (collector.sidestep, again.sidestep, own.publisher.errors) == (None, None, 2)
    assert ["could not be tapped" in each for each in caplog.messages] == [True, True]


def test_functions_of_a_manager_take_more_arguments(process: Process) -> None:
    """Hooks of a request's end pass on what they do not know."""
    manager: Any = Manager()
    hooks = vars(manager)["_handle_abort_req"].__self__
    hooks._handle_abort = hooks._release = lambda *given, **named: (given, named)
    aborted = SimpleNamespace(rid="x")
    manager.rid_to_state["x"] = SimpleNamespace()

    assert manager._handle_abort_req(aborted, at=1.0) == ((aborted,), {"at": 1.0})
    assert manager._handle_abort_req(recv_obj=aborted) == ((), {"recv_obj": aborted})
    assert manager._release_req_states_on_failure({}, "why") == (({}, "why"), {})
    assert process.deferred.queue is not None


def test_messages_are_received_with_more_arguments() -> None:
    """The hook passes them on."""
    times: Any = object.__new__(Times)
    times._is_on = False
    manager = SimpleNamespace(enable_metrics=True)

    assert times.receive(lambda *a, **k: (a, k), manager, recv_obj=1, at=2.0) == (
        (manager,),
        {"recv_obj": 1, "at": 2.0},
    )
