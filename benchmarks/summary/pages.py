"""Pages to measure: fleets of engines in this process, and what rendering them costs."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks.bench_scrape import add_engine, dirty
from benchmarks.steps import Steps
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition.text_page import Texts
from sidestep.metrics.registry import Registry

STATES: Mapping[str, int] = {"all dirty": 1, "10 % dirty": 10, "none dirty": 0}
"""One engine in so many has changed since the page before; 0 is none."""


def fleet(engines: int) -> Registry:
    """Engines that have all seen steps."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])}, {})
    applier, steps = Applier(registry), Steps()
    for _ in range(engines):
        add_engine(registry, applier, steps)
    return registry


def renderer(registry: Registry) -> Callable[[], list[bytes]]:
    """Makes the text page in parts, as it is sent, anew where something has changed."""
    texts = Texts(registry)
    return lambda: [text for piece in texts.pieces() for text in piece]


def samples(page: bytes) -> int:
    """Lines of a text page that are samples."""
    return sum(not line.startswith(b"#") for line in page.splitlines())


def costs(
    registry: Registry, rounds: int, peer: Callable[[], object] | None = None
) -> dict[str, float]:
    """Milliseconds of the thread by state, and of ``peer``, in turns: medians."""
    engines = list(registry.engines.values())
    make = renderer(registry)
    make()
    spent: dict[str, list[float]] = {}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        if peer is not None:
            spent.setdefault("peer", []).append(milliseconds(peer))
        for state, every in STATES.items():
            if every:
                dirty(registry, engines[::every])
            spent.setdefault(state, []).append(milliseconds(make))
    gc.unfreeze()
    return {state: statistics.median(found) for state, found in spent.items()}


def milliseconds(call: Callable[[], object]) -> float:
    """CPU time of this thread."""
    started = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started) / 1e6
