"""How costs grow: with engines, families, and values a step, sidestep's beside prometheus_client's."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from prometheus_client import disable_created_metrics, generate_latest

from benchmarks.bench_engine_cost import ROLES, Case, figures, results
from benchmarks.bench_ingest import CLIENT as INSIDE
from benchmarks.bench_ingest import PEERS, Feed
from benchmarks.bench_scrape import client_registry
from benchmarks.process import SERVE
from benchmarks.steps import TOKENS_A_REQUEST
from benchmarks.summary.memory import MIB, held
from benchmarks.summary.multiprocess import merged
from benchmarks.summary.pages import STATES, costs, fleet, renderer
from sidestep.metrics.registry import Registry

OURS = "sidestep"
CLIENT = "prometheus_client"
HALF_A_CORE = 0.5
CLIENT_STEP, CLIENT_VALUE = 60e-6, 1.2e-6
"""Seconds that prometheus_client takes for a step and for each value of it, about."""
Line = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Curve:
    """One question, and its answers by what was measured, ours first.

    Attributes:
        straight: Whether it is drawn with plain axes, from 0; else both are logarithmic.
    """

    title: str
    over: str
    unit: str
    lines: Mapping[str, Line]
    straight: bool = False


def curves(quick: bool) -> Iterator[Curve]:
    """All of them, as they are measured."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    for make in (steps, ingest, engines, families_shown, processes, memory):
        started = time.monotonic()
        yield make(quick)
        print(f"{make.__name__}: {time.monotonic() - started:.0f} s", file=sys.stderr)


def steps(quick: bool) -> Curve:
    """What a step costs the thread that serves requests."""
    sizes = (1, 16, 256) if quick else (1, 4, 16, 64, 256, 1024)
    cases = [Case(size, size // TOKENS_A_REQUEST, 60 if quick else 200) for size in sizes]
    found = results(cases, 1 if quick else 2, "client")
    names = (OURS, CLIENT, f"{CLIENT}, multiprocess mode")
    return Curve(
        "A step, on the engine's thread",
        "requests in the step",
        "µs of CPU",
        {
            name: [
                (case.latencies, figures(found[case, role], hot=False)[0] / 1e3) for case in cases
            ]
            for name, role in zip(names, ROLES, strict=True)
        },
    )


def ingest(quick: bool) -> Curve:
    """What a step costs the exporter, with latencies as recorded and with none alike.

    The peer is fed at half of what it may well take: what is ready when a saturating feed ends
    would keep it busy for a minute.
    """
    sizes = (1, 64, 1024) if quick else (1, 4, 16, 64, 256, 1024)
    kinds = {OURS: (OURS, "recorded"), f"{OURS}, all unlike": (OURS, "mixed")}
    kinds[f"{CLIENT} in the exporter"] = ("client inside", "recorded")
    lines: dict[str, Line] = {name: [] for name in kinds}
    for size in sizes:
        for name, (peer, spread) in kinds.items():
            rate = 0.0 if peer == OURS else HALF_A_CORE / (CLIENT_STEP + size * CLIENT_VALUE)
            run = Feed(size, 0, spread).run(PEERS[peer], 1, rate, 1.0 if quick else 2.0, 0.0)
            lines[name].append((size, run.cpu / run.steps * 1e6))
    return Curve("A step, in the exporter", "values in the step", "µs of CPU", lines)


def engines(quick: bool) -> Curve:
    """What a page costs."""
    sizes = (1, 16, 64) if quick else (1, 4, 16, 64, 256, 512)
    return Curve(
        "A page of all families",
        "engines",
        "ms of CPU",
        _pages(quick, ((size, fleet(size)) for size in sizes)),
    )


def families_shown(quick: bool) -> Curve:
    """What a page of 64 engines costs where it has only some of their families."""
    registry = fleet(64)
    lines = b"".join(renderer(registry)()).decode().splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    parts = (8, len(names)) if quick else (4, 8, 16, 32, len(names))

    def fewer() -> Iterator[tuple[int, Registry]]:
        for count in parts:
            shown = frozenset(islice(names, count))
            registry.shows = shown.__contains__
            yield count, registry

    return Curve("A page of 64 engines", "families", "ms of CPU", _pages(quick, fewer()))


def _pages(quick: bool, registries: Iterator[tuple[int, Registry]]) -> dict[str, Line]:
    names = {state: f"{OURS}, {state}" for state in STATES} | {"peer": "generate_latest"}
    lines: dict[str, Line] = {name: [] for name in names.values()}
    for size, registry in registries:
        client = client_registry(registry)
        spent = costs(registry, 3 if quick else 7, partial(generate_latest, client))
        for state, name in names.items():
            lines[name].append((size, spent[state]))
    return lines


def processes(quick: bool) -> Curve:
    """What a page costs where each process counts by itself, in multiprocess mode."""
    counts: Sequence[int] = (2, 8) if quick else (2, 8, 32, 64, 128, 256)
    rounds = 1 if quick else 3
    ours: Line = [(count, costs(fleet(count), rounds)["all dirty"]) for count in counts]
    theirs: Line = [(count, merged(count, rounds)[1]) for count in counts]
    return Curve(
        "A page of many processes' engines",
        "processes",
        "ms of CPU",
        {f"{OURS}, all dirty": ours, f"{CLIENT}, multiprocess mode": theirs},
    )


def memory(quick: bool) -> Curve:
    """What the exporter's process holds, when it has been scraped."""
    sizes = (1, 16) if quick else (1, 16, 64, 128, 256)
    lines: dict[str, Line] = {
        name: [(size, held(command, size, 1.0 if quick else 3.0)[0] / MIB) for size in sizes]
        for name, command in ((OURS, SERVE), (f"{CLIENT} in the exporter", INSIDE))
    }
    return Curve("The exporter's process", "engines", "MiB resident", lines, straight=True)
