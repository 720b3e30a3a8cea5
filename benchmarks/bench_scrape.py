"""Making a page: sidestep's renderer against prometheus_client's generate_latest.

Both hold the same families, labels and values; at the smaller size their pages
are parsed and compared. "all dirty" means that every series has changed since
the page before, so that nothing kept from it can be used again; "10 % dirty"
that every tenth engine has. prometheus_client keeps nothing between pages.
Our page is parts of some 100 KB, as they are sent; the times are CPU time of the
thread, median of the rounds, all kinds of page in turns. Memory is what a process of
its own has more resident when all engines have been made, and pages after all of them
have changed: every series with what is kept of its text.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import new_metric
from benchmarks.steps import Steps, engine_info
from benchmarks.table import percentile, show
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import VllmStep
from sidestep.exposition.aggregate import merged_histograms
from sidestep.exposition.families import Family, families, is_shared, labels_with
from sidestep.exposition.family_snapshot import combined_of, copies
from sidestep.exposition.text_page import Texts, render
from sidestep.metrics.engine import Engine
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.translate import to_wire

TARGETS = {"all dirty": "23x", "10 % dirty": "45x", "nothing changed": "500x"}
LARGE = 50_000
"""Samples from which on the targets hold."""
MOST_BYTES = 250
STEPS = 3
"""Applied to each engine, so that every family that a step feeds has values."""

CACHE_CONFIG = {"block_size": "16", "cache_dtype": "auto", "num_gpu_blocks": "27443"}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    disable_created_metrics()  # type: ignore[no-untyped-call]
    rows: list[list[str]] = []
    for number, samples in enumerate(sorted(args.samples)):
        registry = fleet(samples)
        client = client_registry(registry)
        if number == 0:
            compare(render(registry), generate_latest(client))
        rows += measure(registry, client, args.rounds)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = [
            [str(count), str(engines), f"{size / count:.0f}", str(MOST_BYTES)]
            for count, engines, size in pool.map(resident, [max(args.samples)])
        ]
    show(
        "Resident memory, texts that are kept included",
        ("samples", "engines", "bytes a sample", "target"),
        memory,
    )
    show(
        "CPU time of one page; pages of the first size were parsed and found equal",
        (
            "samples, state",
            "engines",
            "KiB",
            "client ms",
            "sidestep ms",
            "p99 ms",
            "ratio",
            "target",
        ),
        rows,
    )


def resident(samples: int) -> tuple[int, int, int]:
    """Samples and engines of a fleet, and the bytes that they take with a page of them."""
    # What the first engine brings along is the catalogue's.
    first = fleet(1)
    render(first)
    gc.collect()
    before = _resident()
    registry = fleet(samples)
    engines = list(registry.engines.values())
    texts = Texts(registry)
    page: list[bytes] = []
    for change in (engines, engines[::10], engines):
        # Numbers of a day, each of which is an object.
        dirty(registry, change, by=10_000)
        # As the exporter does, which has no two pages.
        page.clear()
        page += [text for piece in texts.pieces() for text in piece]
    gc.collect()
    size = _resident() - before
    return len(_samples_of(b"".join(page))), len(engines), size


def _resident() -> int:
    with Path("/proc/self/statm").open() as told:
        return int(told.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def measure(registry: Registry, client: CollectorRegistry, rounds: int) -> list[list[str]]:
    """The rows of one size."""
    engines = list(registry.engines.values())
    states: dict[str, Callable[[], object]] = {
        "all dirty": lambda: dirty(registry, engines),
        "10 % dirty": lambda: dirty(registry, engines[::10]),
        "nothing changed": lambda: None,
    }
    spent: dict[str, list[float]] = {name: [] for name in ("client", *states)}
    texts = Texts(registry)

    def page() -> list[bytes]:
        return [text for piece in texts.pieces() for text in piece]

    body = b"".join(page())
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        spent["client"].append(_milliseconds(lambda: generate_latest(client)))
        for name, change in states.items():
            change()
            spent[name].append(_milliseconds(page))
    gc.unfreeze()
    samples = len(_samples_of(body))
    theirs = statistics.median(spent["client"])
    return [
        [
            f"{samples}, {name}",
            str(len(engines)),
            f"{len(body) / 1024:.0f}",
            f"{theirs:.1f}",
            f"{(ours := statistics.median(spent[name])):.2f}",
            f"{percentile(spent[name], 0.99):.2f}",
            f"{theirs / ours:.1f}x",
            TARGETS[name] if samples >= LARGE else "",
        ]
        for name in states
    ]


def _samples_of(body: bytes) -> list[bytes]:
    return [line for line in body.splitlines() if not line.startswith(b"#")]


def fleet(samples: int) -> Registry:
    """Engines that have all seen steps, as many as make about ``samples`` samples."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])}, {})
    applier, steps = Applier(registry), Steps()
    add_engine(registry, applier, steps)
    one = len(_samples_of(render(registry)))
    while len(registry.engines) < max(samples // one, 1):
        add_engine(registry, applier, steps)
    return registry


def add_engine(registry: Registry, applier: Applier, steps: Steps) -> None:
    """One more engine, which has seen steps."""
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


def dirty(registry: Registry, engines: Iterable[Engine], by: int = 1) -> None:
    """Change every series, and with it whatever its text was kept in."""
    for engine in engines:
        engine.values = [None if value is None else value + by for value in engine.values]
        for histogram in engine.histograms:
            if histogram is not None:
                histogram.counts = [count + by for count in histogram.counts]
                histogram.sum += 0.123
                histogram.mark = None
        registry.touch(engine)


def client_registry(registry: Registry) -> CollectorRegistry:
    """The same families, labels and values, held by prometheus_client."""
    client = CollectorRegistry()
    for family in families(registry):
        metric: Any = None
        for labels, value in _samples(registry, family):
            if metric is None:
                bounds = value.bounds if isinstance(value, Histogram) else ()
                metric = new_metric(
                    family.name, family.kind, family.help, labels, bounds, registry=client
                )
            _fill(metric.labels(**labels) if labels else metric, value)
    return client


def _samples(
    registry: Registry, family: Family
) -> Iterable[tuple[dict[str, str], float | Histogram]]:
    found = copies(registry, family, Histogram.copy)
    if is_shared(family):
        told = combined_of(family, found, merged_histograms)
        return [(dict(one[0]), one[1]) for one in told if one is not None]
    return [
        (labels_with(engine, family, names, key), value)
        for engine, _, names, children in found
        for key, value in children
    ]


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
    """Stop unless both pages hold the same samples."""
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
                # One number, written as 1000000.0 or as 1e+06.
                labels["le"] = repr(float(labels["le"]))
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def _milliseconds(make: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    make()
    return (time.thread_time_ns() - started) / 1e6


if __name__ == "__main__":
    main()
