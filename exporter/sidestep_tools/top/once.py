"""The report as a plain table, for pipes and terminals without the view."""

from __future__ import annotations

from collections.abc import Iterator

from sidestep.exposition.live.rows import EngineRow
from sidestep.exposition.live.verdict import state_text
from sidestep.protocol.limits import escape
from sidestep_tools.top.formatting import count, duration, rate, share
from sidestep_tools.top.report import Report

HEAD = (
    "ENGINE", "MODEL", "STATE", "RUN", "WAIT", "IN/s", "OUT/s",
    "TTFT p95", "ITL p95", "E2E p95", "KV", "PREFIX",
)  # fmt: skip
TEXTS = 3
"""Columns of text, which are aligned left."""


def table(report: Report) -> Iterator[str]:
    """Yield the lines: the verdict, the engines, and the targets that failed."""
    yield f"{report.verdict.level}: {report.verdict.text}"
    rows = [_cells(row) for target in report.targets for row in target.engines]
    if rows:
        yield ""
    widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
    for cells in (HEAD, *rows) if rows else ():
        texts = [
            cell.ljust(width) if index < TEXTS else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        yield "  ".join(texts).rstrip()
    failed = [target for target in report.targets if target.error is not None]
    if failed:
        yield ""
    for target in failed:
        yield f"{target.url}: {target.error}"


def _cells(row: EngineRow) -> tuple[str, ...]:
    return (
        escape(row.engine),
        escape(row.model) or "--",
        escape(state_text(row)) if row.state or row.attention else "--",
        count(row.running),
        count(row.waiting),
        rate(row.prompt_tokens_per_second),
        rate(row.generation_tokens_per_second),
        duration(row.ttft.p95 if row.ttft else None),
        duration(row.inter_token.p95 if row.inter_token else None),
        duration(row.e2e.p95 if row.e2e else None),
        share(row.kv_cache_usage),
        share(row.prefix_hit_rate),
    )
