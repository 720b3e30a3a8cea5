"""Exporters in this process that forward to one another, and items to feed them."""

from __future__ import annotations

from nodes import Node, samples
from sidestep.engines.items import Item, encode_item
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo

TOKENS = "vllm:generation_tokens_total"


RUNNING = "vllm:num_requests_running"


def info(engine: str = "0", **labels: str) -> EngineInfo:
    """Return the description of a vLLM engine."""
    return EngineInfo(f"ns/m/{engine}", "vllm", {"engine": engine, "model_name": "m", **labels})


def step(tokens: int, running: int | None = None, stamp: float = 1.0) -> VllmStep:
    """Return a step with latencies, and with a gauge if ``running`` is given."""
    stats = None if running is None else SchedulerStats(num_running_reqs=running)
    iteration = IterationStats(tokens, inter_token_latencies_iter=[0.001 * tokens] * tokens)
    return VllmStep(0, stamp, 1.0, stats, iteration)


def push(node: Node, *items: Item, stream: str = "s") -> None:
    """Send items of an open stream."""
    node.items(stream, [encode_item(item) for item in items])


def downstream(name: str = "downstream", boot: int = 1, *items: Item, **options: object) -> Node:
    """Return an exporter with one engine, to which ``items`` have been sent."""
    node = Node(name, boot, **options)  # type: ignore[arg-type]
    node.send_hello("s", [info()])
    push(node, *items)
    return node


def value(node: Node, name: str) -> float:
    """Return the sum of a family's series on the page."""
    found = samples(node.page)
    return sum(number for key, number in found.items() if key.partition("{")[0] == name)


def up(node: Node) -> list[float]:
    """Return ``sidestep_engine_up`` of all engines."""
    found = (m for m in node.intake.metrics.collect() if m.name == "sidestep_engine_up")
    return [sample.value for family in found for sample in family.samples]
