"""What a step costs the engine: ``bench_engine_cost``, against prometheus_client and against vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from benchmarks.bench_engine_cost import PEERS, TARGETS, Case, Found, figures, results
from benchmarks.steps import TOKENS_A_REQUEST
from benchmarks.summary.rows import Figure, Row, Topic

SIZES = (1, 256, 1024)
ASKED = (
    *((peer, "step", size) for peer in PEERS for size in SIZES),
    *((peer, "hot", 256) for peer in PEERS),
    *((PEERS[0], "process", size) for size in (1, 256)),
)
"""Peer, what, and requests of a step of each row."""
KINDS = {"client": "prometheus_client", "vllm": "vLLM's logger"}


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
        return statistics.median(result.process for result in found[case, role]) / 1e3
    return figures(found[case, role], hot=what == "hot")[0] / 1e3


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
