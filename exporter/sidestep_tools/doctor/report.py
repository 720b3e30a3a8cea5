"""The findings of one run of ``sidestep doctor``, as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from sidestep.diagnosis.finding import SEVERITIES, Finding, Severity


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
