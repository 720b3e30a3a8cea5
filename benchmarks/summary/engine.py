"""What a step costs the engine, against prometheus_client and against vLLM's logger.

Every logger gets the same steps, made freshly before each call, in turns: each
lives in a process of its own, and one at a time is measured. The peer is vLLM's
real PrometheusStatLogger, or prometheus_client metrics of the same catalogue; once with
values in memory, once in multiprocess mode.

A step's cost is the CPU time of the thread that calls ``record``, measured around the
call, less the clock's own. That of the whole process includes sidestep's publisher and ZMQ
threads, less that of the same loop without a logger, mean of all calls. Between two calls the
thread sleeps as between two engine steps, or does not ("hot").
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.client import ClientMetrics
from benchmarks.process import (
    GAP,
    ExporterProcess,
    Result,
    Worker,
    cases,
    clock_overhead,
    mean,
    own_output,
    process,
    wait,
)
from benchmarks.steps import MODEL, TOKENS_A_REQUEST, Steps, engine_info
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.sender import RING_BYTES
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.queue import QUEUE_ITEMS
from sidestep_adapters.vllm.description import describe
from sidestep_adapters.vllm.stats import VllmTap

PEERS = ("single process", "multiprocess")
ROLES = ("sidestep", *PEERS)
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
SIZES = (1, 256, 1024)
ASKED = (
    *((peer, "step", size) for peer in PEERS for size in SIZES),
    *((peer, "hot", 256) for peer in PEERS),
    *((PEERS[0], "process", size) for size in (1, 256)),
)
"""Peer, what, and requests of a step of each row."""
KINDS = {"client": "prometheus_client", "vllm": "vLLM's logger"}

Record = Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One size of step, and how often to record it."""

    latencies: int
    turnover: int
    calls: int


Found = dict[tuple[Case, str], list[Result]]
"""Of each case and role, a result a round."""


def rows(kind: str) -> Iterator[Row]:
    """Against one kind of peer, in one process and in multiprocess mode."""
    for peer, what, size in ASKED:
        # As fast as possible is no engine's pace: nothing is asked of it.
        target = TARGETS.get((what, size, peer)) if what != "hot" else None
        mode = ", multiprocess mode" if peer == "multiprocess" else ""
        yield Row(named(peer, what, size), "us", KINDS[kind] + mode, target)


def named(peer: str, what: str, size: int) -> str:
    """The row's name."""
    of = f"step of {size:,} request{'s' if size > 1 else ''}"
    told = {"step": of, "hot": f"{of}, in a tight loop", "process": f"{of}, whole process"}[what]
    return told if peer == PEERS[0] else f"{told}, multiprocess mode"


def measure(kind: str, *, quick: bool) -> Mapping[str, Figure]:
    """Microseconds of CPU: means of the thread, in the median round."""
    cases = {size: Case(size, size // TOKENS_A_REQUEST, 60 if quick else 200) for size in SIZES}
    found = results(list(cases.values()), 1 if quick else 3, kind)
    return {
        named(peer, what, size): Figure(
            cost(found, cases[size], "sidestep", what), cost(found, cases[size], peer, what)
        )
        for peer, what, size in ASKED
    }


def cost(found: Found, case: Case, role: str, what: str) -> float:
    """Microseconds a step of ``role``."""
    if what == "process":
        return process(found[case, role])
    return mean(found[case, role], hot=what == "hot")


def results(cases: Sequence[Case], rounds: int, peer: str) -> Found:
    """Measure all cases with all roles in turns; ``peer`` is one of ``KINDS``."""
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


def start(role: str, peer: str, exporter: ExporterProcess, stack: contextlib.ExitStack) -> Worker:
    """The process of ``role``."""
    environ = {}
    if role == "multiprocess":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-multiprocess-"))
        environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    module = ("benchmarks.summary.engine", role, peer)
    return stack.enter_context(Worker((*module, exporter.endpoint), environ))


def main() -> None:
    """Be a worker: a case a line on standard input, a result a line on standard output."""
    role, peer, endpoint = sys.argv[1:]
    real = peer == "vllm"
    answers = own_output()
    steps = Steps(real=real)
    config = vllm_config() if real else None
    logger = open_sidestep(config, endpoint) if role == "sidestep" else open_peer(config)
    overhead = clock_overhead()
    # vLLM's server does so too when it starts (vllm/utils/gc_utils.py).
    gc.collect()
    gc.freeze()
    for case, answer in cases(answers):
        answer(recorded(steps, Case(**case), logger, overhead))


def recorded(
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
        wait(lambda: publisher.connected)
        tap = VllmTap(publisher.push, publisher.fail, [0])
        try:
            yield tap.record
            wait(lambda: publisher.drained)
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


CLIENT = Topic(
    "The engine's thread: what recording a step costs",
    tuple(rows("client")),
    lambda quick: measure("client", quick=quick),
)
VLLM = Topic(
    "The same with a real vLLM's objects",
    tuple(rows("vllm")),
    lambda quick: measure("vllm", quick=quick),
    venv="vllm-venv",
    needs=("vllm", "tools/setup_vllm.sh"),
)

if __name__ == "__main__":
    main()
