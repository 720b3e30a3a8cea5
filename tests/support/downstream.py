"""Exporters that forward to one another, in the test's own process."""

from __future__ import annotations

from sidestep.engines.items import Item, VllmStep, encode_item
from sidestep.engines.vllm.wire import SchedulerStats
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from trees import Node, samples

TOKENS = "vllm:generation_tokens_total"


RUNNING = "vllm:num_requests_running"


def info(engine: str = "0", **labels: str) -> EngineInfo:
    """Of vLLM."""
    return EngineInfo(f"ns/m/{engine}", "vllm", {"engine": engine, "model_name": "m", **labels})


def step(tokens: int, running: int | None = None, stamp: float = 1.0) -> VllmStep:
    """A step with latencies, and a gauge where it is given."""
    stats = None if running is None else SchedulerStats(num_running_reqs=running)
    iteration = IterationStats(tokens, inter_token_latencies_iter=[0.001 * tokens] * tokens)
    return VllmStep(0, stamp, 1.0, stats, iteration)


def push(node: Node, *items: Item, stream: str = "s") -> None:
    """Items of a stream that has greeted."""
    node.items(stream, [encode_item(item) for item in items])


def leaf(name: str = "leaf", boot: int = 1, *items: Item, **options: object) -> Node:
    """An exporter with one engine."""
    node = Node(name, boot, **options)  # type: ignore[arg-type]
    node.greet("s", [info()])
    push(node, *items)
    return node


def value(node: Node, name: str) -> float:
    """Of all series of a family on the page together."""
    found = samples(node.page)
    return sum(number for key, number in found.items() if key.partition("{")[0] == name)


def up(node: Node) -> list[float]:
    """``sidestep_engine_up`` of all engines."""
    found = (m for m in node.intake.metrics.collect() if m.name == "sidestep_engine_up")
    return [sample.value for family in found for sample in family.samples]
