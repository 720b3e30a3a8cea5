"""Results as a table and as files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.table import machine

from chaos.faults import FAULTS
from chaos.stage import Options
from chaos.verdict import Result

HEAD = (
    *("fault", "transport", "rounds", "items", "lost", "counted", "doubled", "decreases"),
    *(
        "push p50 us",
        "p99",
        "p99.9",
        "ring peak MB",
        "recovery s",
        "engine +MB",
        "waited s",
        "promise",
    ),
)
PHASE_HEAD = (
    *("fault", "transport", "exporter", "pushes", "push p50 us", "p99", "p99.9", "max"),
    *("256 values p50", "p99", "p99.9", "woke late p50", "p99", "p99.9"),
)
Rows = list[Sequence[str]]


def row(result: Result) -> Sequence[str]:
    """Return a line of the table; the latencies of pushes are those during the fault."""
    phases = result.phases
    push = phases.get(FAULTS[result.fault].phase, phases["up"])["push"]
    return (
        result.fault,
        result.transport,
        str(result.rounds),
        str(result.items),
        str(result.comparison.lost),
        str(result.counted),
        str(result.comparison.doubled),
        f"{result.decreases} on {result.reset_pages} pages" if result.decreases else "0",
        *(f"{push[share]:.1f}" for share in ("p50", "p99", "p999")),
        f"{result.ring_peak / 1e6:.2f}",
        "-" if result.recovery is None else f"{result.recovery:.2f}",
        f"{result.growth / 1e6:.1f}",
        f"{result.waited:.1f}",
        ("broken" if result.broken else "reset" if result.reset else "kept")
        + (", starved" if result.starved else ""),
    )


def phase_rows(results: Sequence[Result]) -> Rows:
    """Return the cost of pushing by phase."""
    rows: Rows = []
    for result in results:
        for name, kinds in result.phases.items():
            push, big, late = (kinds[kind] for kind in ("push", "big", "late"))
            if push["count"]:
                rows.append(
                    (
                        *(result.fault, result.transport, name, f"{push['count']:.0f}"),
                        *(f"{push[share]:.1f}" for share in ("p50", "p99", "p999", "max")),
                        *(f"{big[share]:.1f}" for share in ("p50", "p99", "p999")),
                        *(f"{late[share]:.0f}" for share in ("p50", "p99", "p999")),
                    )
                )
    return rows


def remarks(results: Sequence[Result]) -> Iterator[str]:
    """Return remarks that have no column in the table."""
    for result in results:
        where = f"{result.fault}, {result.transport}: "
        yield from (f"{where}BROKEN: {line}" for line in result.broken)
        yield from (where + note for note in result.notes)


def markdown(head: Sequence[str], rows: Rows) -> str:
    """Return a table in Markdown."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def text(results: Sequence[Result], skipped: Sequence[str], options: Options) -> str:
    """Return tables and remarks."""
    head = (
        f"{options.rate:.0f} items a second, seed {options.seed}, {options.work:.0f} us of work"
        f" an item, {'with' if options.state else 'without'} a state directory; {machine()}"
    )
    parts = [head, markdown(HEAD, [row(result) for result in results])]
    parts.append(markdown(PHASE_HEAD, phase_rows(results)))
    parts += [f"- {line}" for line in remarks(results)]
    parts += [f"- not run: {line}" for line in skipped]
    return "\n\n".join(parts[:3]) + "\n\n" + "\n".join(parts[3:]) + "\n"


def write(path: Path, results: Sequence[Result], shown: str) -> None:
    """Write JSON, or text if the name does not end with ``.json``."""
    if path.suffix == ".json":
        shown = json.dumps([result.json for result in results], indent=1) + "\n"
    path.write_text(shown, encoding="utf-8")
