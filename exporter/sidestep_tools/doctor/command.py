"""The command ``sidestep doctor``: which sources it checks, and how it prints the findings."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NamedTuple

import aiohttp
import msgspec

from sidestep import __version__
from sidestep.diagnosis.finding import SEVERITIES, Finding, Severity, sort_findings
from sidestep_tools.doctor import endpoint, engine_page, exporter, prometheus
from sidestep_tools.doctor.environment import check as environment
from sidestep_tools.doctor.manifests import autoscaling
from sidestep_tools.doctor.manifests.checks import check as check_manifests
from sidestep_tools.doctor.manifests.reading import Resource, read_all
from sidestep_tools.doctor.queries import check as queries
from sidestep_tools.web_client.access import Access
from sidestep_tools.web_client.output import show, show_json


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of ``sidestep doctor --json``.

    Attributes:
        checked: What was checked, in order: sources as the user named them.
        findings: The gravest first.
    """

    version: str
    checked: list[str]
    findings: list[Finding]


def lines(report: Report) -> Iterator[str]:
    """Yield the report for a terminal."""
    for each in report.findings:
        yield f"{each.code} {each.severity}: {each.subject}: {each.text}"
        yield f"      {each.remedy}"
    counts = Counter(each.severity for each in report.findings)
    found = ", ".join(_counted(one, counts[one]) for one in SEVERITIES if counts[one])
    yield f"checked {', '.join(report.checked)}: {found or 'nothing is wrong'}"


def _counted(severity: Severity, count: int) -> str:
    return f"{count} {severity}{'' if count == 1 or severity == 'info' else 's'}"


def status(report: Report, fail_on: Severity) -> int:
    """Return the exit status: 2 with errors, 1 with others from ``fail_on`` on, else 0."""
    found = {each.severity for each in report.findings}
    if "error" in found:
        return 2
    failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return int(not found.isdisjoint(failing))


LOCAL_EXPORTER = "http://127.0.0.1:9857"
PASSWORD = "SIDESTEP_DOCTOR_PASSWORD"  # noqa: S105 - the name of a variable


class Sources(NamedTuple):
    """Sources to check; the exporter on this machine if all are empty.

    Attributes:
        exporters: Addresses of exporters.
        environment: Whether the engine's environment is checked; if so, what the report calls it.
        endpoints: Ingest endpoints of exporters.
        manifests: Files and directories of Kubernetes manifests; ``-`` is standard input.
        dashboards: Files of dashboards.
        rules: Files of rules.
        pages: Addresses or files of metrics pages.
        prometheus: Addresses of Prometheus servers.
    """

    exporters: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    dashboards: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    prometheus: tuple[str, ...] = ()


async def run(sources: Sources, access: Access, *, as_json: bool, fail_on: Severity) -> int:
    """Check the sources, print the findings and return the exit status.

    Raises:
        ConfigError: An address, a file or a header cannot be used.
    """
    if not any(sources):
        sources = Sources(exporters=(LOCAL_EXPORTER,))
    async with access.with_password(os.environ.get(PASSWORD)).session() as session:
        found = [each async for each in _check(sources, session)]
    checked = [str(source) for group in sources for source in group]
    report = Report(version=__version__, checked=checked, findings=sort_findings(found))
    if as_json:
        show_json(report)
    else:
        show(lines(report))
    return status(report, fail_on)


async def _check(sources: Sources, session: aiohttp.ClientSession) -> AsyncIterator[Finding]:
    read = await asyncio.to_thread(read_all, sources.manifests)
    for each in await asyncio.to_thread(lambda: list(_check_here(sources, read))):
        yield each
    for url in sources.exporters:
        async for each in exporter.check(session, url):
            yield each
    for url in sources.prometheus:
        async for each in prometheus.check(session, url):
            yield each
    files = sources.dashboards + sources.rules
    scalers = autoscaling.queries([each for each in read if isinstance(each, Resource)])
    if files or scalers:
        async for each in queries.check(session, files, scalers, sources.pages, sources.prometheus):
            yield each
    if not files:
        async for each in engine_page.check(session, sources.pages):
            yield each


def _check_here(sources: Sources, read: Sequence[Resource | Finding]) -> Iterator[Finding]:
    """Check what needs no HTTP; endpoints are waited for."""
    if sources.environment:
        yield from environment.check()
    for address in sources.endpoints:
        yield from endpoint.check(address)
    if sources.manifests:
        yield from check_manifests(sources.manifests, read)
