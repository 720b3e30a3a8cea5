"""What the tap costs the core of a real vLLM: ``bench_core_tap``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.bench_core_tap import TARGET, Case, results
from benchmarks.bench_engine_cost import figures
from benchmarks.steps import TOKENS_A_REQUEST
from benchmarks.summary.rows import Figure, Row, Topic

PEER = "vLLM's own statistics of it"
SIZES = (1, 256)
PROCESS = "step of 256 requests, whole process"


def named(size: int) -> str:
    """The row's name."""
    return f"step of {size} request{'s' if size > 1 else ''}"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Microseconds of CPU: means of the thread, in the median round."""
    cases = {size: Case(size, size // TOKENS_A_REQUEST, 60 if quick else 200) for size in SIZES}
    found = results(list(cases.values()), 1 if quick else 3)
    made = {
        named(size): Figure(
            figures(found[case]["tap"], hot=False)[0] / 1e3,
            figures(found[case]["vLLM"], hot=False)[0] / 1e3,
        )
        for size, case in cases.items()
    }
    ours, theirs = (
        statistics.median(each.process for each in found[cases[256]][role]) / 1e3
        for role in ("tap", "vLLM")
    )
    return {**made, PROCESS: Figure(ours, theirs)}


TAP = Topic(
    "The tap on the core's thread of a real vLLM",
    (
        *(Row(named(size), "us", PEER, TARGET if size == 256 else None) for size in SIZES),
        Row(PROCESS, "us", PEER),
    ),
    measure,
    venv="vllm-venv",
    needs=("vllm", "tools/setup_vllm.sh"),
)
