"""Cost for SGLang's scheduler and tokenizer: SGLang's own collectors, or sidestep instead.

Each runs SGLang's real classes in a process of its own, and gets SGLang's calls in their real
order; they are measured in turns. SGLang's own collectors count in multiprocess mode, which
SGLang always uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from benchmarks.process import (
    GAP,
    ExporterProcess,
    Result,
    Worker,
    cases,
    effort,
    mean,
    own_output,
    wait,
)
from benchmarks.summary.rows import Figure, Row, Topic
from benchmarks.summary.topics import ROOT
from sidestep_adapters.sglang import plugin as sglang_plugin
from sidestep_adapters.sglang import taps as sglang_taps

PEER = "SGLang's own collectors"
ROLES = ("native", "instead")
ENVIRON = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "PYTHONWARNINGS": "ignore",
}
STAND_INS = ROOT / "tests" / "support" / "real_engines" / "sglang_stand_ins"
RANK = {
    "model_name": "meta-llama/Llama-3.1-8B-Instruct",
    "engine_type": "unified",
    "tp_rank": 0,
    "pp_rank": 0,
    "moe_ep_rank": 0,
}
COUNTED = (
    "sglang:cuda_graph_passes_total",
    "sglang:e2e_request_latency_seconds_count",
    "sglang:inter_token_latency_seconds_count",
    "sglang:time_to_first_token_seconds_count",
)
"""Samples whose sum is compared with the number of calls."""

Call = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A group of SGLang's calls that is measured as one.

    Attributes:
        name: A method of ``Calls``.
        size: Requests of a step.
        counts: Increase of ``COUNTED`` by the calls.
        target: Least ratio of the native cost to sidestep's.
    """

    name: str
    size: int = 1
    counts: int = 0
    target: int = 0

    @property
    def title(self) -> str:
        """Name of its row."""
        return self.name.replace("_", " ") + (f", {self.size} requests" if self.size > 1 else "")


Found = dict[tuple[Case, str], list[Result]]
"""Results of the rounds by case and role."""
CASES = (
    Case("log_stats", target=20),
    Case("decode_iteration", counts=1),
    Case("prefill_batch", counts=1),
    Case("inter_token_latencies", 256, counts=256, target=10),
    Case("inter_token_latencies_and_labels", 256, counts=256, target=10),
    Case("finished_request", counts=1),
)


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return microseconds of the calling thread with sidestep and with SGLang's own collectors."""
    calls, rounds = effort(quick)
    found = results(rounds, calls)
    return {
        case.title: Figure(mean(found[case, "instead"]), mean(found[case, "native"]))
        for case in CASES
    }


def results(rounds: int, calls: int) -> Found:
    """Measure all cases with all roles in turns."""
    found: Found = {}
    with ExporterProcess() as exporter, contextlib.ExitStack() as stack:
        workers = {role: start(role, exporter, stack) for role in ROLES}
        for _ in range(rounds):
            for case in CASES:
                for role, worker in workers.items():
                    result = worker.run(Request(case, calls))
                    found.setdefault((case, role), []).append(result)
        totals = exporter.totals
    arrived = sum(totals.get(name, 0.0) for name in COUNTED)
    if arrived != recorded(found):
        raise SystemExit(f"{recorded(found)} were recorded, {arrived:.0f} arrived")
    return found


def recorded(found: Found) -> int:
    """Return how many observations sidestep was given."""
    return sum(r.recorded for (_, role), rs in found.items() for r in rs if role != "native")


@dataclasses.dataclass(frozen=True)
class Request:
    """A case for a worker, and how often to call it."""

    case: Case
    calls: int


def start(role: str, exporter: ExporterProcess, stack: contextlib.ExitStack) -> Worker:
    """Start the process of ``role``."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-multiprocess-"))
    environ = {**ENVIRON, "PROMETHEUS_MULTIPROC_DIR": folder}
    paths = [str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    if role != "native":
        environ |= {
            "SIDESTEP_ENDPOINT": exporter.endpoint,
            "SIDESTEP_SGLANG_MODE": role,
            "SIDESTEP_NAMESPACE": f"bench-{role}",
        }
    module = ("benchmarks.summary.sglang", role)
    return stack.enter_context(Worker(module, environ))


class Scheduler:
    """A fake of the scheduler that sidestep reads after an iteration."""

    enable_priority_scheduling = False
    disaggregation_mode = "null"

    def __init__(self) -> None:
        self.running_batch = SimpleNamespace(reqs=[None] * 32)
        self.waiting_queue = [None] * 3


class Calls:
    """SGLang's calls of its collectors; each method returns the function to measure."""

    def __init__(
        self, scheduler: Any, tokenizer: Any, after_iteration: Callable[[Any], Any]
    ) -> None:
        from sglang.srt.observability.metrics_collector import (  # noqa: PLC0415
            QueueCount,
            SchedulerStats,
        )

        self.scheduler, self.tokenizer, self.after_iteration = scheduler, tokenizer, after_iteration
        self.stats = SchedulerStats()
        self.stats.num_running_reqs, self.stats.num_queue_reqs = QueueCount(32), QueueCount(3)
        self.stats.gen_throughput, self.stats.token_usage = 1234.5, 0.42
        self.inner = Scheduler()
        self.reporter = SimpleNamespace(metrics_collector=scheduler, scheduler=self.inner)

    def log_stats(self, _: Case) -> Call:
        """Return a report, as after each prefill and every 40 decodes."""
        scheduler, stats = self.scheduler, self.stats
        return lambda: scheduler.log_stats(stats)

    def decode_iteration(self, _: Case) -> Call:
        """Return the calls of a decode iteration without a report."""
        scheduler, reporter, after_iteration = self.scheduler, self.reporter, self.after_iteration

        def call() -> None:
            scheduler.increment_decode_cuda_graph_pass(value=True)
            scheduler.increment_realtime_tokens(decode_tokens=32, dp_cooperation_info=None)
            after_iteration(reporter)

        return call

    def prefill_batch(self, _: Case) -> Call:
        """Return the calls of a prefill batch, with its report."""
        scheduler, reporter, after_iteration = self.scheduler, self.reporter, self.after_iteration
        stats = self.stats

        def call() -> None:
            scheduler.increment_prefill_cuda_graph_pass(value=True)
            scheduler.increment_realtime_tokens(
                prefill_compute_tokens=700, prefill_cache_tokens=300, dp_cooperation_info=None
            )
            scheduler.increment_effective_prefill_tokens(
                input_tokens=700, device_hit_tokens=300, host_hit_tokens=0, storage_hit_tokens=0
            )
            scheduler.log_stats(stats)
            after_iteration(reporter)

        return call

    def inter_token_latencies(self, case: Case) -> Call:
        """Return the calls of a decode step, one per request, each with labels of its own."""
        tokenizer = self.tokenizer
        all_labels = [dict(tokenizer.labels) for _ in range(case.size)]

        def call() -> None:
            for labels in all_labels:
                tokenizer.observe_inter_token_latency(labels, 0.0123, 1)

        return call

    def inter_token_latencies_and_labels(self, case: Case) -> Call:
        """Return the same calls with SGLang's copy of the labels included in the measurement."""
        tokenizer = self.tokenizer

        def call() -> None:
            for _ in range(case.size):
                labels = dict(tokenizer.labels)
                tokenizer.observe_inter_token_latency(labels, 0.0123, 1)

        return call

    def finished_request(self, _: Case) -> Call:
        """Return the call at a request's end, by a function with the variables of SGLang's."""
        tokenizer = self.tokenizer
        request, output = ended_request()

        def collect_metrics(state: Any, recv_obj: Any, i: int) -> None:
            tokenizer.observe_one_finished_request(
                dict(tokenizer.labels), recv_obj.prompt_tokens[i], recv_obj.completion_tokens[i],
                recv_obj.cached_tokens[i], 3.21, None, recv_obj.cached_tokens_details[i],
                spec_verify_ct=0, is_streaming=state.obj.stream, time_per_output_token=0.0123,
            )  # fmt: skip

        return lambda: collect_metrics(request, output, 1)


def ended_request() -> tuple[Any, Any]:
    """Return the state of a request of SGLang's tokenizer, and an output whose second request it is."""
    now = time.perf_counter()
    asked = SimpleNamespace(
        rid="request", sampling_params={"max_new_tokens": 128}, text="prompt", stream=True
    )
    times = SimpleNamespace(created_time=now - 4, first_token_time=now - 3, finished_time=now)
    scheduler = SimpleNamespace(wait_queue_entry_time=now - 3.9, forward_entry_time=now - 3.5)
    output = SimpleNamespace(
        finished_reasons=[None, {"type": "length", "length": 128}],
        prompt_tokens=[0, 300],
        completion_tokens=[0, 128],
        cached_tokens=[0, 100],
        cached_tokens_details=[None, {"device": 100}],
        retraction_counts=[0, 0],
        time_stats=[None, scheduler],
    )
    return SimpleNamespace(obj=asked, time_stats=times), output


def main() -> None:
    """Run a worker: a case a line on standard input, a result a line on standard output."""
    role = sys.argv[1]
    answers = own_output()
    calls = Calls(*collectors(native=role == "native"))
    gc.collect()
    gc.freeze()
    overhead = int(statistics.median(loop(_nothing_at_all, 200, GAP)))
    for asked, answer in cases(answers):
        answer(called(calls, Case(**asked["case"]), asked["calls"], overhead))
    own = sglang_taps.process()
    if own is not None and own.publisher is not None:
        own.publisher.close()
    # At a regular exit SGLang's libraries print pages about leaks.
    os._exit(0)


def collectors(*, native: bool) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return a scheduler's and a tokenizer's collector, and the hook after an iteration."""
    from sglang.srt.observability import metrics_collector  # noqa: PLC0415
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn  # noqa: PLC0415
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    arguments = ServerArgs(model_path="none")
    get_context().set_server_args(arguments)
    classes = {
        role: getattr(metrics_collector, sglang_taps.CLASSES[role])
        for role in ("scheduler", "tokenizer")
    }
    after_iteration: Callable[[Any], Any] = _nothing
    if not native:
        classes = {role: sglang_taps.tapped(cls, role) for role, cls in classes.items()}
        after_iteration = _wrap_fn(_nothing, sglang_plugin._after_iteration, HookType.AFTER)
    labels = {name: RANK[name] for name in ("model_name", "engine_type")}
    scheduler = classes["scheduler"](labels=dict(RANK), server_args=arguments)
    return scheduler, classes["tokenizer"](server_args=arguments, labels=labels), after_iteration


def _nothing(_: Any) -> None:
    """Do nothing, instead of SGLang's iteration."""


def _nothing_at_all() -> None:
    """Do nothing, to measure the cost of a call."""


def called(calls: Calls, case: Case, count: int, overhead: int) -> Result:
    """Measure one case after a warm-up, without the ``overhead`` of an empty call."""
    call = getattr(calls, case.name)(case)
    warm_up = 20
    loop(call, warm_up, 0.0)
    settle()
    spent = loop(call, count, GAP)
    settle()
    return Result(
        gap=[max(value - overhead, 0) for value in spent],
        recorded=(warm_up + count) * case.counts,
    )


def loop(call: Call, count: int, gap: float) -> list[int]:
    """Return nanoseconds of the thread for each of ``count`` calls."""
    clock = time.thread_time_ns
    spent: list[int] = []
    for _ in range(count):
        begin = clock()
        call()
        spent.append(clock() - begin)
        if gap:
            time.sleep(gap)
    return spent


def settle() -> None:
    """Wait until everything recorded has arrived."""
    own = sglang_taps.process()
    if own is None or own.publisher is None:
        return
    publisher = own.publisher
    wait(lambda: not own.deferred and publisher.drained)
    if own.deferred.dropped or publisher.dropped or publisher.errors:
        raise SystemExit(f"{own.deferred.dropped} lost, {publisher.dropped} dropped")


SGLANG = Topic(
    "A real SGLang's threads: what its calls cost",
    tuple(Row(case.title, "us", PEER, case.target or None) for case in CASES),
    measure,
    venv="sglang-venv",
    needs=("sglang", "tools/setup_sglang.sh"),
)

if __name__ == "__main__":
    main()
