"""What SGLang's items cost the exporter: decoding and applying each kind, one core, no sockets.

The items are made by the plugin's own sources of what SGLang's processes tell. vLLM's
step, with as many latencies, stands beside them.
"""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace

from benchmarks.bench_sglang_cost import RANK
from benchmarks.steps import Steps, engine_info
from benchmarks.table import show
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item, VllmStep, decode_item, encode_item
from sidestep.engines.sglang.wire import SchedulerStats
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.translate import to_wire
from sidestep_adapters.sglang.collectors import StatsSource
from sidestep_adapters.sglang.deferred_metrics import Notes
from sidestep_adapters.sglang.metric_stubs import Meter

LATENCIES = 256
ROUNDS, REPEATS = 15, 400
TOKENIZER = {name: str(RANK[name]) for name in ("model_name", "engine_type")}


def main() -> None:
    """Measure and print the table."""
    registry = Registry({name: compile_layout(dialect) for name, dialect in DIALECTS.items()}, {})
    applier = Applier(registry)
    labels = {name: str(value) for name, value in RANK.items()}
    scheduler = registry.register(EngineInfo("scheduler", "sglang", labels))
    tokenizer = registry.register(EngineInfo("tokenizer", "sglang", TOKENIZER))
    vllm = registry.register(engine_info(0))
    rows = []
    for title, engine, items in (
        ("scheduler's report", scheduler, report()),
        ("a counter's growth", scheduler, counter()),
        (f"{LATENCIES} latencies", tokenizer, latencies(1)),
        (f"{LATENCIES} latencies of several tokens", tokenizer, latencies(3)),
        (f"vLLM's step, {LATENCIES} latencies", vllm, [step()]),
    ):
        raws = [encode_item(item) for item in items]
        spent = cost(applier, engine, raws)
        rows.append([title, str(sum(map(len, raws))), f"{spent:.1f}", f"{1e6 / spent:.0f}"])
    show("Exporter's CPU an item", ("item", "bytes", "us", "items/s a core"), rows)


def report() -> list[Item]:
    """All gauges of a scheduler."""
    notes = Notes()
    known = {
        name: SimpleNamespace(total=3, by_priority=None) if name.endswith("_reqs") else 0.5
        for name in SchedulerStats.__struct_fields__
        if not name.endswith("_counts")
    }
    StatsSource(notes, 0).note(SimpleNamespace(**known))
    return notes.items()


def counter() -> list[Item]:
    """Of a flush's iterations."""
    notes = Notes()
    name = "sglang:realtime_tokens_total"
    Meter(notes, name, "counter", engine=0, own=["mode"]).labels(mode="decode").inc(32)
    return notes.items()


def latencies(tokens: int) -> list[Item]:
    """A step's."""
    notes = Notes()
    meter = Meter(notes, "sglang:inter_token_latency_seconds", "histogram", engine=0)
    for number in range(LATENCIES):
        meter.note((), 0.012 + number * 1e-6, tokens)
    return notes.items()


def step() -> VllmStep:
    """As vLLM's plugin sends it."""
    steps = Steps(spread="mixed")
    source = SimpleNamespace(
        engine=0, stamp=1.0, wall=1.0, mm_cache=None,
        scheduler=steps.schedulers[20], iteration=steps.iteration(LATENCIES, 0),
    )  # fmt: skip
    return to_wire(source, VllmStep)[0]


def cost(applier: Applier, engine: Engine, raws: list[bytes]) -> float:
    """Microseconds; the median round's."""
    clock = time.thread_time_ns
    rounds = []
    for _ in range(ROUNDS):
        begin = clock()
        for _ in range(REPEATS):
            for raw in raws:
                applier.apply(engine, decode_item(raw))
        rounds.append((clock() - begin) / REPEATS / 1e3)
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
