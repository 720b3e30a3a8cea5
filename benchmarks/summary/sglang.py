"""What SGLang's scheduler and tokenizer pay: ``bench_sglang_cost``."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench_engine_cost import figures
from benchmarks.bench_sglang_cost import CASES, results
from benchmarks.summary.rows import Figure, Row, Topic

PEER = "SGLang's own collectors"
ROLES = ("native", "instead")
ASKED = tuple(
    case
    for case in CASES
    if case.target or case.name in {"decode_iteration", "prefill_batch", "finished_request"}
)


def measure(quick: bool) -> Mapping[str, Figure]:
    """Microseconds of the thread that calls, where sidestep stands in for SGLang's own."""
    found = results(ASKED, 1 if quick else 3, 50 if quick else 200, ROLES)
    return {
        case.title: Figure(
            figures(found[case, "instead"], hot=False)[0] / 1e3,
            figures(found[case, "native"], hot=False)[0] / 1e3,
        )
        for case in ASKED
    }


SGLANG = Topic(
    "A real SGLang's threads: what its calls cost",
    tuple(Row(case.title, "us", PEER, case.target or None) for case in ASKED),
    measure,
    venv="sglang-venv",
    needs=("sglang", "tools/setup_sglang.sh"),
)
