"""The command ``sidestep compare``: it measures two inputs, and shows their differences."""

from __future__ import annotations

import aiohttp

from sidestep import __version__
from sidestep.errors import ConfigError
from sidestep_tools.compare import prometheus, records
from sidestep_tools.compare.measurement import Measurement
from sidestep_tools.compare.report import Report, Side, Thresholds, Verdict, judge, lines, rows
from sidestep_tools.compare.source import Source, parse
from sidestep_tools.formatting import show, show_json
from sidestep_tools.web_client import fetch
from sidestep_tools.web_client.access import Access
from sidestep_tools.web_client.fetch import FetchError

STATUS: dict[Verdict, int] = {"worse": 1, "not comparable": 3}
"""Exit codes other than 0; 2 is that of errors."""


async def run(
    sources: tuple[str, str], access: Access, thresholds: Thresholds, *, as_json: bool
) -> int:
    """Compare two inputs, print the report, and return the exit code."""
    first, second = map(parse, sources)
    if first.is_url or second.is_url:
        access = access.with_password()
    async with access.session() as session:
        a, b = [await _measure(session, one) for one in (first, second)]
    found = [*rows(a, b, thresholds)]
    verdict, reason = judge(found)
    report = Report(
        version=__version__,
        a=Side(first.text, a.dialect, a.extent),
        b=Side(second.text, b.dialect, b.extent),
        verdict=verdict,
        reason=reason,
        rows=found,
    )
    if as_json:
        show_json(report)
    else:
        show(lines(report))
    return STATUS.get(verdict, 0)


async def _measure(session: aiohttp.ClientSession, source: Source) -> Measurement:
    if not source.is_url:
        return records.measure(source)
    measure = records.measure_exporter if source.start is None else prometheus.measure
    try:
        # Lists of an answer may differ in length, and numbers be none.
        with fetch.explained():
            return await measure(session, source)
    except FetchError as error:
        raise ConfigError(f"{source.text}: {error}") from None
