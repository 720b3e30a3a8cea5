"""The command ``sidestep doctor``: it checks sources and prints the findings."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import aiohttp
import msgspec

from sidestep import __version__
from sidestep.diagnosis.finding import SEVERITIES, Finding, Severity, sort_findings
from sidestep_tools.doctor import bundle, endpoint, engine_page, environment, exporter
from sidestep_tools.doctor.engine_page import Page
from sidestep_tools.doctor.manifests import checks as manifests
from sidestep_tools.doctor.queries import check as queries
from sidestep_tools.formatting import show, show_json
from sidestep_tools.web_client.access import Access


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of ``sidestep doctor --json``: the sources, and the findings with the gravest first."""

    version: str
    checked: list[str]
    findings: list[Finding]


def lines(report: Report) -> Iterator[str]:
    """Yield the report for a terminal."""
    for each in report.findings:
        yield f"{each.code} {each.severity}: {each.subject}: {each.text}"
        yield f"      {each.remedy}"
    counts = Counter(each.severity for each in report.findings)
    found = ", ".join(
        f"{counts[each]} {each}{'' if counts[each] == 1 or each == 'info' else 's'}"
        for each in SEVERITIES
        if counts[each]
    )
    yield f"checked {', '.join(report.checked)}: {found or 'nothing is wrong'}"


def status(report: Report, fail_on: Severity) -> int:
    """Return the exit status: 2 with errors, 1 with findings of ``fail_on`` or above, else 0."""
    found = {each.severity for each in report.findings}
    if "error" in found:
        return 2
    failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return int(not found.isdisjoint(failing))


class Sources(NamedTuple):
    """Sources to check, as the user named them.

    Attributes:
        environment: Name of the engine's environment in the report; empty: it is not checked.
        pages: Metrics pages, with which queries are compared.
    """

    exporters: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    dashboards: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()


async def run(
    sources: Sources, access: Access, *, as_json: bool, fail_on: Severity, archive: str = ""
) -> int:
    """Check the sources, or the exporter on this machine without any, and print the findings.

    Returns the exit status. ``archive`` is the file of a support bundle; empty: none is written.
    """
    if not any(sources):
        sources = Sources(exporters=("http://127.0.0.1:9857",))
    async with access.with_password().session() as session:
        found = await _check(sources, session)
        checked = [str(source) for group in sources for source in group]
        report = Report(version=__version__, checked=checked, findings=sort_findings(found))
        if archive:
            await bundle.write(archive, session, sources.exporters, msgspec.json.encode(report))
    if as_json:
        show_json(report)
    else:
        show(lines(report))
    return status(report, fail_on)


async def _check(sources: Sources, session: aiohttp.ClientSession) -> list[Finding]:
    found = []
    pages = [await engine_page.read(session, name) for name in sources.pages]
    for url in sources.exporters:
        findings = [each async for each in exporter.check(session, url)]
        is_other = [each.code for each in findings] == [exporter.NO_EXPORTER.code]
        page = await engine_page.find(session, url) if is_other else None
        if page is None:
            found += findings
        else:
            pages.append(page)
    return found + await asyncio.to_thread(lambda: [*_check_here(sources, pages)])


def _check_here(sources: Sources, pages: Sequence[Page | Finding]) -> Iterator[Finding]:
    """Check everything but exporters: read files, connect to endpoints, and compare the pages."""
    if sources.environment:
        yield from environment.check()
    for address in sources.endpoints:
        yield from endpoint.check(address)
    if sources.manifests:
        yield from manifests.check(sources.manifests)
    yield from (each for each in pages if isinstance(each, Finding))
    readable = [each for each in pages if isinstance(each, Page)]
    if files := sources.dashboards + sources.rules:
        yield from queries.check(files, readable)
    else:
        yield from engine_page.check(readable)
