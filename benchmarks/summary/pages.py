"""Fleets of engines in this process, the cost of rendering them, and the same in prometheus_client."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import new_metric
from benchmarks.steps import Steps, engine_info
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.vllm.wire import VllmStep
from sidestep.exposition.engine_values import EngineCopier
from sidestep.exposition.family_series import family_series
from sidestep.exposition.text_page import TextPage
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep.transport.process import calm_collector
from sidestep_adapters.publisher.translate import to_wire

STEPS = 3
"""Steps applied to each engine, so that all families of a step have values."""
CACHE_CONFIG = {"block_size": "16", "cache_dtype": "auto", "num_gpu_blocks": "27443"}
STATES: Mapping[str, int] = {"all dirty": 1, "10 % dirty": 10, "none dirty": 0}
"""One engine in this many has changed since the last page; 0 means none."""


def fleet(engines: int) -> Registry:
    """Return a registry of engines that have all counted steps."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])})
    applier, steps = Applier(registry), Steps()
    for _ in range(engines):
        add_engine(registry, applier, steps)
    return registry


def renderer(registry: Registry) -> Callable[[], list[bytes]]:
    """Return a function that renders the text page in parts, with its caches."""
    copier, page = EngineCopier(registry), TextPage()
    return lambda: page.write(copier.copy())


def samples(page: bytes) -> int:
    """Return the number of samples of a text page."""
    return sum(not line.startswith(b"#") for line in page.splitlines())


def costs(
    registry: Registry, rounds: int, peer: Callable[[], object] | None = None
) -> dict[str, float]:
    """Return milliseconds of the thread by state, and of ``peer``, measured in turns: medians."""
    engines = list(registry.engines.values())
    make = renderer(registry)
    make()
    spent: dict[str, list[float]] = {}
    # As the exporter does.
    calm_collector()
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
    """Return the CPU time of this thread for ``call``."""
    started = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - started) / 1e6


def add_engine(registry: Registry, applier: Applier, steps: Steps) -> None:
    """Register another engine, and apply steps to it."""
    number = len(registry.engines)
    info: EngineInfo = engine_info(number)
    info.info = {"cache_config": CACHE_CONFIG}
    engine = registry.register(info)
    for step in range(STEPS):
        scheduler = steps.schedulers[(STEPS * number + step) % len(steps.schedulers)]
        source = _Source(0, float(step), float(step), scheduler, steps.iteration(64, 4))
        applier.apply(engine, to_wire(source, VllmStep)[0])


class _Source:
    def __init__(
        self, engine: int, stamp: float, wall: float, scheduler: Any, iteration: Any
    ) -> None:
        self.engine, self.stamp, self.wall = engine, stamp, wall
        self.scheduler, self.iteration = scheduler, iteration


def dirty(registry: Registry, engines: Iterable[Engine]) -> None:
    """Change every series, so that no cached text is valid."""
    for engine in engines:
        engine.values = [None if value is None else value + 1 for value in engine.values]
        for histogram in engine.histograms:
            if histogram is not None:
                histogram.counts = [count + 1 for count in histogram.counts]
                histogram.sum += 0.123
        registry.touch(engine)


def client_registry(registry: Registry) -> CollectorRegistry:
    """Return a prometheus_client registry with the same families, labels and values."""
    client = CollectorRegistry()
    for family, series in family_series(EngineCopier(registry).copy()):
        metric: Any = None
        for labels, value, _ in series:
            if metric is None:
                bounds = value.bounds if isinstance(value, Histogram) else ()
                metric = new_metric(
                    family.name, family.kind, family.help, labels, bounds, registry=client
                )
            _fill(metric.labels(**labels) if labels else metric, value)
    return client


def _fill(child: Any, value: float | Histogram) -> None:
    if isinstance(value, Histogram):
        # prometheus_client has no way to set a histogram but to observe every value.
        for bucket, count in zip(child._buckets, value.counts, strict=True):
            bucket.set(float(count))
        child._sum.set(value.sum)
    elif hasattr(child, "set"):
        child.set(value)
    else:
        child.inc(value)


def compare(ours: bytes, theirs: bytes) -> None:
    """Exit unless both pages have the same samples."""
    mine, other = _parsed(ours), _parsed(theirs)
    if mine != other:
        differing = sorted(mine.items() ^ other.items())
        raise SystemExit(f"the pages differ in {len(differing)} samples, as {differing[:4]}")


def _parsed(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if "le" in labels:
                # Bounds are spelled 1000000.0 or 1e+06.
                labels["le"] = repr(float(labels["le"]))
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found
