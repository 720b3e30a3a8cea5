"""The command ``sidestep top``: polls targets, and shows a table, JSON or the terminal view."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from sidestep.errors import ConfigError
from sidestep.exposition.live.answers import EngineRow
from sidestep.exposition.live.verdict import state_text
from sidestep.protocol.limits import escape
from sidestep_tools.formatting import cells_of, count, duration, rate, share, show, show_json
from sidestep_tools.top.columns import Order, entries, limit, ordered
from sidestep_tools.top.report import Report
from sidestep_tools.top.targets import DISCOVERED, EXPORTER, Targets, discover
from sidestep_tools.web_client.access import Access

HEAD = (
    "ENGINE", "MODEL", "STATE", "RUN", "WAIT", "IN/s", "OUT/s",
    "TTFT p95", "ITL p95", "E2E p95", "KV", "PREFIX", "LIMIT",
)  # fmt: skip
MOST = 80
"""Cells that a cell may have."""
TEXTS = 3
"""Columns of text, which are aligned left."""


def table(report: Report) -> Iterator[str]:
    """Yield the lines: the verdict, the engines, and the targets that failed."""
    yield f"{report.verdict.level or 'unknown'}: {report.verdict.text}"
    engines = ordered(entries(report), Order())
    rows = [_cells(entry.row) for entry in engines if entry.row is not None]
    if rows:
        yield ""
    widths = [max(map(cells_of, column)) for column in zip(HEAD, *rows, strict=True)]
    for cells in (HEAD, *rows) if rows else ():
        blanks = [" " * (width - cells_of(cell)) for cell, width in zip(cells, widths, strict=True)]
        texts = [
            cell + blank if index < TEXTS else blank + cell
            for index, (cell, blank) in enumerate(zip(cells, blanks, strict=True))
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
        limit(row, MOST),
    )


async def run(
    urls: Sequence[str], access: Access, *, finds: bool, interval: float, once: bool, as_json: bool
) -> int:
    """Ask the targets and show the answers; return 1 if a target did not answer, else 0.

    Raises:
        ConfigError: An address, a header or a file of certificates cannot be used.
    """
    urls = [*urls, *(await discover() if finds else [])]
    if finds and not urls:
        ports = sorted({url.rpartition(":")[2].partition("/")[0] for url in DISCOVERED}, key=int)
        raise ConfigError(f"--discover: nothing on 127.0.0.1 at the ports {', '.join(ports)}")
    targets = Targets(urls or [EXPORTER], access.with_password())
    async with targets.connected():
        if not (once or as_json):
            await _view(targets, interval)
            return 0
        report = await targets.poll()
        if any(target.error is None for target in report.targets):
            # Rates and percentiles are differences.
            await asyncio.sleep(interval)
            report = await targets.poll()
    if as_json:
        show_json(report)
    else:
        show(table(report))
    return int(any(target.error is not None for target in report.targets))


async def _view(targets: Targets, interval: float) -> None:
    try:
        # Only the view needs textual, which is an extra.
        from sidestep_tools.top.app import view  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            "the terminal view needs textual, which is not here: use --once or --json, or run the view with"
            " this address where textual is, by pip install '.[top]' in a clone of sidestep's repository"
        ) from None
    await view(targets, interval)
