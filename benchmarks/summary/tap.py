"""Cost of the tap for the core of a real vLLM, against vLLM's own statistics of the same step.

The peer is the work of vLLM's front end for a step's metrics, with its real classes:
IterationStats from the core's outputs, request by request, and PrometheusStatLogger.record.
The tap's work is the request events, the scheduler's statistics, and the calls of the block
pool at the given sampling rate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.counters import since, spent
from benchmarks.process import (
    FLUSHED,
    GAP,
    ExporterProcess,
    Result,
    Worker,
    cases,
    clock_overhead,
    effort,
    mean,
    own_output,
    process,
    wait,
)
from benchmarks.steps import TOKENS_A_REQUEST
from benchmarks.summary.engine import vllm_config
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep_adapters.publisher.cache_lookups import LookupEvents
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.request_identity import FULL, NONE, IdentityMaker
from sidestep_adapters.vllm.description import describe
from sidestep_adapters.vllm.kv_cache import BlockTap
from sidestep_adapters.vllm.scheduler_events import SchedulerEvents
from sidestep_adapters.vllm.scheduler_tap import SchedulerTap
from sidestep_adapters.vllm.stats import VllmTap

ROLES = ("tap", "vLLM")
MORE_ROLES = ("tap", "identity", "lookups")
TARGET = 10
BLOCK_TOKENS = 16
"""Steps after which a request needs a new block."""
RATE = 0.01
PEER = "vLLM's own statistics of it"
SIZES = (1, 256)
PROCESS = "step of 256 requests, whole process"
IDENTITY, IDENTITY_PROCESS = (
    "full identity of a request, more than without",
    "full identity of a request, whole process",
)
LOOKUP, LOOKUP_PROCESS = (
    "lookup of 18 blocks in the prefix cache, more than without",
    "lookup of 18 blocks in the prefix cache, whole process",
)
TURNING_REQUESTS = 64
"""Requests that begin and end with each step, enough to measure the cost of one."""
IDENTITY_LIMIT, LOOKUP_LIMIT = 1.5, 1.0
LOOKED_UP = 18
"""Blocks of a request that are looked up."""
CACHE_BLOCKS = 50_000

Perform = Callable[["Step"], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A number of running requests, of which ``turnover`` end with each step."""

    requests: int
    turnover: int
    calls: int


def named(size: int) -> str:
    """Return the name of a row."""
    return f"step of {size} request{'s' if size > 1 else ''}"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return microseconds of CPU: the thread's mean in the median round."""
    calls, rounds = effort(quick)
    cases = {size: Case(size, size // TOKENS_A_REQUEST, calls) for size in SIZES}
    found = results(list(cases.values()), rounds)
    made = {
        named(size): Figure(mean(found[case]["tap"]), mean(found[case]["vLLM"]))
        for size, case in cases.items()
    }
    whole = found[cases[256]]
    made[PROCESS] = Figure(process(whole["tap"]), process(whole["vLLM"]))
    turning = Case(TURNING_REQUESTS, TURNING_REQUESTS, calls)
    (of_turning,) = results([turning], rounds, MORE_ROLES).values()
    for role, thread, whole_process in (
        ("identity", IDENTITY, IDENTITY_PROCESS),
        ("lookups", LOOKUP, LOOKUP_PROCESS),
    ):
        for name, figure in ((thread, mean), (whole_process, process)):
            more = figure(of_turning[role]) - figure(of_turning["tap"])
            made[name] = Figure(more / TURNING_REQUESTS)
    return made


def results(
    sizes: Sequence[Case], rounds: int, roles: Sequence[str] = ROLES
) -> dict[Case, dict[str, list[Result]]]:
    """Measure all sizes with both roles in turns."""
    found: dict[Case, dict[str, list[Result]]] = {}
    with ExporterProcess() as exporter, contextlib.ExitStack() as stack:
        module = "benchmarks.summary.tap"
        workers = {
            role: stack.enter_context(Worker([module, role, exporter.endpoint], {}))
            for role in roles
        }
        for _ in range(rounds):
            for case in sizes:
                for role, worker in workers.items():
                    found.setdefault(case, {}).setdefault(role, []).append(worker.run(case))
    return found


class Step:
    """One step of an engine, in vLLM's own classes."""

    def __init__(self) -> None:
        self.batch: Any = None
        self.outputs: dict[int, Any] = {}
        self.stats: Any = None
        self.queued: list[Any] = []
        self.ended: list[Any] = []
        self.blocks: list[Any] = []
        self.states: dict[str, Any] = {}
        self.requests: dict[str, Any] = {}


class Engine:
    """A source of steady-state steps; every object of a step is new, as in the engine."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ids = itertools.count()
        self.hashes = [os.urandom(32) for _ in range(LOOKED_UP)]
        self.running = [self._request() for _ in range(case.requests)]
        self.blocks = itertools.cycle(SimpleNamespace(block_id=n) for n in range(CACHE_BLOCKS))

    def _request(self) -> Any:
        from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType  # noqa: PLC0415
        from vllm.v1.metrics.stats import PrefillStats, RequestStateStats  # noqa: PLC0415

        now = time.monotonic()
        prefill = PrefillStats()
        prefill.set(300, 100, 0)
        return SimpleNamespace(
            request_id=f"cmpl-{next(self.ids):08x}",
            events=[
                EngineCoreEvent(EngineCoreEventType.QUEUED, now),
                EngineCoreEvent(EngineCoreEventType.SCHEDULED, now),
            ],
            arrival_time=time.time(),
            num_prompt_tokens=300,
            num_tokens=300,
            num_output_tokens=128,
            num_preemptions=0,
            lora_request=None,
            cache_salt="tenant-a",
            trace_headers={"traceparent": f"00-{next(self.ids):032x}-{'b' * 16}-01"},
            priority=0,
            block_hashes=self.hashes,
            sampling_params=SimpleNamespace(max_tokens=128, stop=[]),
            status=SimpleNamespace(name="RUNNING"),
            get_finished_reason=lambda: 1,
            prefill_stats=prefill,
            stats=RequestStateStats(arrival_time=time.time(), last_token_ts=now, scheduled_ts=now),
        )

    def step(self) -> Step:
        """Return the next step."""
        from vllm.v1.core.sched.output import CachedRequestData  # noqa: PLC0415
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason  # noqa: PLC0415
        from vllm.v1.metrics.stats import SchedulerStats  # noqa: PLC0415

        made = Step()
        turnover = self.case.turnover
        made.queued = [self._request() for _ in range(turnover)]
        made.ended = self.running[:turnover]
        self.running = [*self.running[turnover:], *made.queued]
        present = [*made.ended, *self.running[: len(self.running) - turnover], *made.queued]
        fresh = {request.request_id for request in made.queued}
        ended = {request.request_id for request in made.ended}
        made.requests = made.states = {request.request_id: request for request in present}
        cached = [r.request_id for r in present if r.request_id not in fresh]
        made.batch = SimpleNamespace(
            num_scheduled_tokens={
                r.request_id: 200 if r.request_id in fresh else 1 for r in present
            },
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=100) for r in made.queued
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=cached,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[],
                num_computed_tokens=[400] * len(cached),
                num_output_tokens=[100] * len(cached),
            ),
        )
        outputs = [
            EngineCoreOutput(
                request_id=r.request_id,
                new_token_ids=[17],
                finish_reason=FinishReason.LENGTH if r.request_id in ended else None,
                events=list(r.events) if r.request_id in fresh else None,
                prefill_stats=r.prefill_stats if r.request_id in fresh else None,
            )
            for r in present
        ]
        made.outputs = {0: EngineCoreOutputs(outputs=outputs)}
        made.stats = SchedulerStats(num_running_reqs=len(present), kv_cache_usage=0.5)
        made.blocks = list(itertools.islice(self.blocks, len(present) // BLOCK_TOKENS))
        return made


def perform_vllm(config: Any) -> Perform:
    """Return the work of vLLM's front end for a step's metrics."""
    from vllm.v1.engine import FinishReason  # noqa: PLC0415
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415
    from vllm.v1.metrics.stats import IterationStats, LoRARequestStates  # noqa: PLC0415

    logger = PrometheusStatLogger(config, [0])
    logger.log_engine_initialized()
    adapters = LoRARequestStates(log_stats=True)

    def perform(step: Step) -> None:
        outputs = step.outputs[0]
        iteration = IterationStats()
        states = step.states
        for output in outputs.outputs:
            request = states[output.request_id]
            iteration.update_from_output(
                output,
                outputs.timestamp,
                output.prefill_stats is not None,
                request.stats,
                adapters,
                None,
            )
            if output.finish_reason is not None:
                iteration.update_from_finished_request(
                    FinishReason.LENGTH, request.request_id, 300, 128, request.stats
                )
                adapters.request_finished(request.request_id, None)
                iteration.max_num_generation_tokens_iter.append(128)
                iteration.n_params_iter.append(1)
        adapters.update_scheduler_stats(step.stats)
        logger.record(step.stats, iteration, None, 0)

    return perform


@contextlib.contextmanager
def perform_tap(config: Any, endpoint: str, role: str) -> Iterator[Perform]:
    """Yield the work that the tap adds to a step."""
    description = describe(config, [0])
    publisher = Publisher(endpoint, description.core_stream, description.engine_infos)
    wait(lambda: publisher.connected)
    lookups = LookupEvents(BLOCK_TOKENS, CACHE_BLOCKS, 0, lambda: (publisher.lookup_key, RATE))
    events = SchedulerEvents(
        publisher.fail,
        identities=IdentityMaker(FULL if role == "identity" else NONE),
        lookups=lookups if role == "lookups" else None,
    )
    tap = SchedulerTap(publisher.push, publisher.fail, events)
    stats = VllmTap(publisher.push, publisher.fail, [0], role="core")
    blocks = BlockTap(publisher.push)
    blocks.flush(RATE)

    def perform(step: Step) -> None:
        for request in step.queued:
            tap.queued(request)
        blocks.flush(publisher.kv_sample_rate or RATE)
        for block in step.blocks:
            blocks.on_block_evicted(block)
            blocks.on_block_allocated(block)
        tap.scheduled(step.batch, step.requests, 1.0)
        tap.update_started()
        for request in step.ended:
            tap.freed(request)
        tap.update_finished(step.batch, step.outputs)
        stats.record(step.stats, None, None, 0)
        blocks.flush(publisher.kv_sample_rate or RATE)

    try:
        yield perform
        wait(lambda: publisher.drained)
    finally:
        publisher.close()
    if publisher.dropped or publisher.errors:
        raise SystemExit(f"{publisher.dropped} dropped, {publisher.errors} not translated")


def loop(engine: Engine, calls: int, gap: float, perform: Perform) -> list[int]:
    """Return nanoseconds of the thread for each of ``calls``."""
    clock = time.thread_time_ns
    of_thread: list[int] = []
    for _ in range(calls):
        step = engine.step()
        begin = clock()
        perform(step)
        of_thread.append(clock() - begin)
        if gap:
            time.sleep(gap)
    return of_thread


def _nothing(_: Step) -> None:
    """Do nothing."""


def main() -> None:
    """Run a worker: a case a line on standard input, a result a line on standard output."""
    role, endpoint = sys.argv[1:]
    answers = own_output()
    config = vllm_config()
    overhead = clock_overhead()
    peer = perform_vllm(config) if role == "vLLM" else None
    for given, answer in cases(answers):
        case = Case(**given)
        engine = Engine(case)
        started = spent()
        loop(engine, case.calls, GAP, _nothing)
        idle = since(started).cpu
        opened = contextlib.nullcontext(peer) if peer else perform_tap(config, endpoint, role)
        with opened as perform:
            loop(engine, 30, 0.0, perform)
            time.sleep(FLUSHED)
            started = spent()
            of_thread = loop(engine, case.calls, GAP, perform)
            time.sleep(FLUSHED)
            others = since(started).cpu - idle
        gap = [max(value - overhead, 0) for value in of_thread]
        answer(Result(gap=gap, process=statistics.fmean(gap) + others / case.calls))


TAP = Topic(
    "The tap on the core's thread of a real vLLM",
    (
        *(Row(named(size), "us", PEER, TARGET if size == 256 else None) for size in SIZES),
        Row(PROCESS, "us", PEER),
        Row(IDENTITY, "us", limit=IDENTITY_LIMIT),
        Row(IDENTITY_PROCESS, "us"),
        Row(LOOKUP, "us", limit=LOOKUP_LIMIT),
        Row(LOOKUP_PROCESS, "us"),
    ),
    measure,
    venv="vllm-venv",
    needs=("vllm", "tools/setup_vllm.sh"),
)

if __name__ == "__main__":
    main()
