"""Cost of a step for the engine, compared with prometheus_client and with vLLM's logger.

Every logger gets the same steps, created before each call. Each runs in a process of its
own, and they are measured in turns. The peer is vLLM's real PrometheusStatLogger, or
prometheus_client metrics of the same catalogue, each with values in memory and in
multiprocess mode.

The cost of a step is the CPU time of the thread that calls ``record``, without the clock's
own. The cost for the whole process adds the CPU time of all other threads, such as sidestep's
publisher, until everything recorded has been sent. Between two calls the thread sleeps as
between two steps of an engine, except in a tight loop ("hot").
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.client import ClientMetrics
from benchmarks.counters import Spent, since, spent
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
from benchmarks.steps import MODEL, TOKENS_A_REQUEST, Steps, engine_info
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.vllm.wire import VllmStep
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
    ("process", 1, "single process"): 2,
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
"""Model configuration for vLLM, which reads no weights for it."""
SIZES = (1, 256, 1024)
ASKED = (
    *((peer, "step", size) for peer in PEERS for size in SIZES),
    *((peer, "hot", 256) for peer in PEERS),
    *((PEERS[0], "process", size) for size in (1, 256)),
    (PEERS[0], "instructions", 1),
    (PEERS[0], "switches", 1),
)
"""Peer, measurement, and requests of a step for each row."""
SWITCHES = 0.25
"""Limit of context switches a step: the publisher wakes seldom, and the peer has no thread."""
UNITS = {"instructions": "thousands"}
KINDS = {"client": "prometheus_client", "vllm": "vLLM's logger"}

Record = Callable[[Any, Any], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """A size of step, and how many to record."""

    latencies: int
    turnover: int
    calls: int


Found = dict[tuple[Case, str], list[Result]]
"""Results of the rounds by case and role."""


def rows(kind: str) -> Iterator[Row]:
    """Yield the rows against one kind of peer, which runs in the mode that the row names."""
    for peer, what, size in ASKED:
        # A tight loop is no engine's pace, so it has no target.
        target = TARGETS.get((what, size, peer)) if what != "hot" else None
        name = named(peer, what, size)
        if what == "switches":
            yield Row(name, "a step", limit=SWITCHES)
        else:
            yield Row(name, UNITS.get(what, "us"), KINDS[kind], target)


def named(peer: str, what: str, size: int) -> str:
    """Return the name of a row."""
    of = f"step of {size:,} request{'s' if size > 1 else ''}"
    name = {
        "step": of,
        "hot": f"{of}, in a tight loop",
        "process": f"{of}, whole process",
        "instructions": f"{of}, whole process: instructions",
        "switches": f"{of}, whole process: context switches",
    }[what]
    return name if peer == PEERS[0] else f"{name}, multiprocess mode"


def measure(kind: str, *, quick: bool) -> Mapping[str, Figure]:
    """Return microseconds of CPU: the thread's mean in the median round."""
    calls, rounds = effort(quick)
    cases = {size: Case(size, size // TOKENS_A_REQUEST, calls) for size in SIZES}
    found = results(list(cases.values()), rounds, kind)
    return {
        named(peer, what, size): figure(found, cases[size], peer, what)
        for peer, what, size in ASKED
    }


def figure(found: Found, case: Case, peer: str, what: str) -> Figure:
    """Return the figure of a row."""
    ours = cost(found, case, "sidestep", what)
    if what == "instructions" and not ours:
        return Figure(why="absent: this machine counts no instructions")
    return Figure(ours, None if what == "switches" else cost(found, case, peer, what))


def cost(found: Found, case: Case, role: str, what: str) -> float:
    """Return the cost of a step for ``role``, in the unit of the row."""
    if what == "switches":
        return statistics.median(result.switches for result in found[case, role])
    if what == "instructions":
        return statistics.median(result.instructions for result in found[case, role]) / 1e3
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
    """Start the process of ``role``."""
    environ = {}
    if role == "multiprocess":
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-multiprocess-"))
        environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    module = ("benchmarks.summary.engine", role, peer)
    return stack.enter_context(Worker((*module, exporter.endpoint), environ))


def main() -> None:
    """Run a worker: a case a line on standard input, a result a line on standard output."""
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
    """Measure one case: the loop without a logger, with it, with it and no gap, and without it again."""
    half = case.calls // 2
    warm_up = 50
    # In a tight loop, no more steps than queue and ring hold.
    fitting = RING_BYTES // 2 // (10 * case.latencies + 2000) - warm_up
    hot = min(5 * case.calls, QUEUE_ITEMS // 2, fitting)
    started = spent()
    loop(steps, case, half, GAP, _nothing)
    idle = since(started)
    with logger() as record:
        loop(steps, case, warm_up, 0.0, record)
        time.sleep(FLUSHED)
        started = spent()
        gap_spent = loop(steps, case, case.calls, GAP, record)
        time.sleep(FLUSHED)
        total = since(started)
        hot_spent = loop(steps, case, hot, 0.0, record)
    started = spent()
    loop(steps, case, half, GAP, _nothing)
    idle = Spent(*map(sum, zip(idle, since(started), strict=True)))
    used = Spent(
        *(own / case.calls - other / (2 * half) for own, other in zip(total, idle, strict=True))
    )
    gap = [max(value - overhead, 0) for value in gap_spent]
    return Result(
        gap=gap,
        hot=[max(value - overhead, 0) for value in hot_spent],
        process=statistics.fmean(gap) + used.cpu,
        switches=used.switches,
        instructions=used.instructions,
        recorded=warm_up + case.calls + hot,
    )


def loop(steps: Steps, case: Case, calls: int, gap: float, record: Record) -> list[int]:
    """Return nanoseconds of the thread for each of ``calls``."""
    clock = time.thread_time_ns
    schedulers = steps.schedulers
    of_thread: list[int] = []
    for call in range(calls):
        scheduler = schedulers[call % len(schedulers)]
        iteration = steps.iteration(case.latencies, case.turnover)
        begin = clock()
        record(scheduler, iteration)
        of_thread.append(clock() - begin)
        if gap:
            time.sleep(gap)
    return of_thread


def _nothing(scheduler: Any, iteration: Any) -> None:
    """Record nothing."""


def open_sidestep(
    config: Any, endpoint: str
) -> Callable[[], contextlib.AbstractContextManager[Record]]:
    """Return a function that opens a publisher per case, so that the bare loop has no extra threads."""
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
    """Return a function that opens vLLM's logger, or the catalogue's metrics in prometheus_client."""
    if config is not None:
        from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415

        logger = PrometheusStatLogger(config, [0])
        logger.log_engine_initialized()
        record: Record = logger.record
    else:
        layout = compile_layout(DIALECTS["vllm"])
        engine = Registry({"vllm": layout}).register(engine_info(0))
        metrics = ClientMetrics(layout)

        def record(scheduler: Any, iteration: Any) -> None:
            metrics.record(engine, VllmStep(0, 0.0, 0.0, scheduler, iteration))

    return lambda: contextlib.nullcontext(record)


def vllm_config() -> Any:
    """Return a real configuration of a model without weights and without a tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        return vllm_config_in(Path(folder), skip_tokenizer_init=True)


def vllm_config_in(folder: Path, **options: Any) -> Any:
    """Return a real configuration of a model without weights, whose files are in ``folder``."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    config = EngineArgs(
        model=str(folder),
        served_model_name=[MODEL],
        load_format="dummy",
        dtype="float32",
        max_model_len=8192,
        block_size=32,
        kv_cache_metrics=True,
        **options,
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
