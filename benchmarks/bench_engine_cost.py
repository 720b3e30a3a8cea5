"""What metrics cost the engine: sidestep's plugin against vLLM's Prometheus logger.

Every logger gets the same steps, made freshly before each call, in turns: each
lives in a process of its own, and one at a time is measured. The peer is vLLM's
real PrometheusStatLogger where vLLM is installed, else (or with ``--peer client``)
prometheus_client metrics of the same catalogue; once with values in memory, once in multiprocess mode.

"step" is the CPU time of the thread that calls ``record``, measured around the
call, less the clock's own. "process" is the CPU time of the whole process per
call (sidestep's publisher and ZMQ threads included), less that of the same loop
without a logger, mean of all calls. Between two calls the thread sleeps as
between two engine steps ("5 ms"), or does not ("hot").
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.client import ClientMetrics
from benchmarks.process import ExporterProcess
from benchmarks.steps import MODEL, TOKENS_A_REQUEST, Steps, engine_info, has_vllm
from benchmarks.table import percentile, show
from benchmarks.worker import Result, Worker, cases, own_output
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.sender import RING_BYTES
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.queue import QUEUE_ITEMS
from sidestep_adapters.vllm.description import describe
from sidestep_adapters.vllm.stats import VllmTap

GAP = 0.005
PEERS = ("single process", "multiprocess")
ROLES = ("sidestep", *PEERS)
PEER_KINDS = ("vllm", "client")
TARGETS = {
    ("step", 256, "single process"): 25,
    ("step", 256, "multiprocess"): 50,
    ("step", 1024, "single process"): 60,
    ("step", 1024, "multiprocess"): 120,
    ("process", 256, "single process"): 4,
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
"""Enough of a model for vLLM to make a configuration of; no weights are read."""

Record = Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One size of step, and how often to record it."""

    latencies: int
    turnover: int
    calls: int


Found = dict[tuple[Case, str], list[Result]]
"""Of each case and role, a result a round."""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=300, help="with gap, per case and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--latencies", type=int, nargs="+", default=[1, 32, 256, 1024], help="a step"
    )
    parser.add_argument("--worker", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", default="", help=argparse.SUPPRESS)
    parser.add_argument(
        "--peer",
        choices=PEER_KINDS,
        default="vllm" if has_vllm() else "client",
        help="vLLM's own logger, or prometheus_client metrics of the catalogue",
    )
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.endpoint, real=args.peer == "vllm")
        return
    cases = [
        Case(latencies, turnover, args.calls)
        for latencies in args.latencies
        for turnover in dict.fromkeys((0, latencies // TOKENS_A_REQUEST))
    ]
    found = results(cases, args.rounds, args.peer)
    recorded = sum(r.recorded for (_, role), rs in found.items() if role == "sidestep" for r in rs)
    peer = "vLLM's PrometheusStatLogger" if args.peer == "vllm" else "prometheus_client"
    show(
        f"CPU time of one record() in us; peer: {peer}",
        (
            "latencies, what, pacing, peer",
            *("peer mean", "p50", "p99", "sidestep mean", "p50", "p99"),
            *("mean ratio", "p50 ratio", "p99 ratio", "target"),
        ),
        [row for case in cases for row in rows_of(case, found)],
    )
    print(f"\n{recorded} steps were recorded, and all arrived at the exporter.")


def results(cases: Sequence[Case], rounds: int, peer: str) -> Found:
    """Measure all cases with all roles in turns; ``peer`` is one of ``PEER_KINDS``."""
    found: Found = {}
    with ExporterProcess() as exporter:
        with contextlib.ExitStack() as stack:
            workers = {role: start(role, peer, exporter, stack) for role in ROLES}
            for _ in range(rounds):
                for case in cases:
                    for role, worker in workers.items():
                        found.setdefault((case, role), []).append(worker.run(case))
        recorded = sum(
            r.recorded for (_, role), rs in found.items() if role == "sidestep" for r in rs
        )
        arrived = exporter.totals["sidestep_items_total"]
    if arrived != recorded:
        raise SystemExit(f"{recorded} steps were recorded, {arrived:.0f} arrived")
    return found


def rows_of(case: Case, found: Found) -> Iterator[list[str]]:
    """Step thread with gap and hot, then the process, against each peer."""
    ended = f" + {case.turnover} ended" if case.turnover else ""
    for what, pacing in (("step", "5 ms"), ("step", "hot"), ("process", "5 ms")):
        for peer in PEERS:
            name = f"{case.latencies}{ended}, {what}, {pacing}, {peer}"
            target = TARGETS.get((what, case.latencies, peer), 0) if pacing == "5 ms" else 0
            goal = f"{target}x" if target else ""
            if what == "process":
                theirs, ours = (
                    statistics.median(result.process for result in found[case, role])
                    for role in (peer, "sidestep")
                )
                yield [
                    name,
                    *(us(theirs), "", "", us(ours), "", ""),
                    *(ratio(theirs, ours), "", "", goal),
                ]
                continue
            (their, our) = (
                figures(found[case, role], hot=pacing == "hot") for role in (peer, "sidestep")
            )
            ratios = [ratio(a, b) for a, b in zip(their, our, strict=True)]
            yield [name, *map(us, their), *map(us, our), *ratios, goal]


def figures(results: list[Result], *, hot: bool) -> tuple[float, float, float]:
    """Mean, median and p99; the median round's mean, so that one disturbed round does not count."""
    rounds = [result.hot if hot else result.gap for result in results]
    together = [value for values in rounds for value in values]
    mean = statistics.median(map(statistics.fmean, rounds))
    return mean, percentile(together, 0.5), percentile(together, 0.99)


def us(nanoseconds: float) -> str:
    """Microseconds, to a tenth."""
    return f"{nanoseconds / 1e3:.1f}"


def ratio(theirs: float, ours: float) -> str:
    """How many times theirs is ours."""
    return f"{theirs / ours:.1f}x" if ours > 0 else "-"


def start(role: str, peer: str, exporter: ExporterProcess, stack: contextlib.ExitStack) -> Worker:
    """The process of ``role``."""
    environ = {}
    if role == "multiprocess":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-multiprocess-"))
        environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    module = ("benchmarks.bench_engine_cost", "--worker", role, "--peer", peer)
    return stack.enter_context(Worker((*module, "--endpoint", exporter.endpoint), environ))


def work(role: str, endpoint: str, *, real: bool) -> None:
    """Be a worker: a case a line on standard input, a result a line on standard output."""
    answers = own_output()
    steps = Steps(real=real)
    config = vllm_config() if real else None
    logger = open_sidestep(config, endpoint) if role == "sidestep" else open_peer(config)
    overhead = clock_overhead()
    # vLLM's server does so too when it starts (vllm/utils/gc_utils.py).
    gc.collect()
    gc.freeze()
    for case, answer in cases(answers):
        answer(measure(steps, Case(**case), logger, overhead))


def measure(
    steps: Steps,
    case: Case,
    logger: Callable[[], contextlib.AbstractContextManager[Record]],
    overhead: int,
) -> Result:
    """One case: the loop without a logger, with it, hot, and without it again."""
    half = case.calls // 2
    warm_up = 50
    # As fast as possible is no engine's pace: no more than queue and ring hold.
    fitting = RING_BYTES // 2 // (10 * case.latencies + 2000) - warm_up
    hot = min(5 * case.calls, QUEUE_ITEMS // 2, fitting)
    _, before = loop(steps, case, half, GAP, _nothing)
    with logger() as record:
        loop(steps, case, warm_up, 0.0, record)
        spent, total = loop(steps, case, case.calls, GAP, record)
        hot_spent, _ = loop(steps, case, hot, 0.0, record)
    _, after = loop(steps, case, half, GAP, _nothing)
    idle = (before + after) / (2 * half)
    return Result(
        gap=[max(value - overhead, 0) for value in spent],
        hot=[max(value - overhead, 0) for value in hot_spent],
        process=total / case.calls - idle,
        recorded=warm_up + case.calls + hot,
    )


def loop(steps: Steps, case: Case, calls: int, gap: float, record: Record) -> tuple[list[int], int]:
    """Nanoseconds of the thread for each of ``calls``, and of the process for all."""
    clock = time.thread_time_ns
    schedulers = steps.schedulers
    spent: list[int] = []
    started = time.process_time_ns()
    for call in range(calls):
        scheduler = schedulers[call % len(schedulers)]
        iteration = steps.iteration(case.latencies, case.turnover)
        begin = clock()
        record(scheduler, iteration)
        spent.append(clock() - begin)
        if gap:
            time.sleep(gap)
    return spent, time.process_time_ns() - started


def _nothing(scheduler: Any, iteration: Any) -> None:
    """Where no logger is."""


def clock_overhead() -> int:
    """Nanoseconds that two readings of the thread's clock, and an empty call, take."""
    clock = time.thread_time_ns
    spent = []
    for _ in range(10_000):
        begin = clock()
        _nothing(None, None)
        spent.append(clock() - begin)
    return int(statistics.median(spent))


def open_sidestep(
    config: Any, endpoint: str
) -> Callable[[], contextlib.AbstractContextManager[Record]]:
    """A publisher for each case, so that the loop without a logger has no threads of ours."""
    description = describe(config, [0]) if config is not None else None
    infos: list[EngineInfo] = description.engine_infos if description else [engine_info(0)]
    stream = description.stream if description else "bench"

    @contextlib.contextmanager
    def opened() -> Iterator[Record]:
        publisher = Publisher(endpoint, stream, infos)
        _wait(lambda: publisher.connected)
        tap = VllmTap(publisher.push, publisher.fail, [0])
        try:
            yield tap.record
            _wait(lambda: publisher.drained)
        finally:
            publisher.close()
        if publisher.dropped or publisher.errors:
            raise SystemExit(f"{publisher.dropped} dropped, {publisher.errors} not translated")

    return opened


def open_peer(config: Any) -> Callable[[], contextlib.AbstractContextManager[Record]]:
    """The real logger of vLLM, or the catalogue's metrics in prometheus_client."""
    if config is not None:
        from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415

        logger = PrometheusStatLogger(config, [0])
        logger.log_engine_initialized()
        record: Record = logger.record
    else:
        layout = compile_layout(DIALECTS["vllm"])
        engine = Registry({"vllm": layout}, {}).register(engine_info(0))
        metrics = ClientMetrics(layout)

        def record(scheduler: Any, iteration: Any) -> None:
            metrics.record(engine, _Record(scheduler, iteration))

    return lambda: contextlib.nullcontext(record)


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    scheduler: Any
    iteration: Any
    mm_cache: Any = None


def vllm_config() -> Any:
    """A real configuration of a model that exists as a file of settings only."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        config = EngineArgs(
            model=folder,
            served_model_name=[MODEL],
            load_format="dummy",
            dtype="float32",
            max_model_len=8192,
            block_size=32,
            kv_cache_metrics=True,
            skip_tokenizer_init=True,
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = 1000
    return config


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("the exporter does not answer")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
