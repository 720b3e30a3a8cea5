"""Findings, and the codes that they have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from sidestep import __version__

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""The gravest first."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, or worth knowing.

    Attributes:
        code: Stable; docs/doctor.md describes it.
        subject: What it is about: a file, an address, an engine.
    """

    code: str
    severity: Severity
    subject: str
    text: str
    remedy: str


class Code(NamedTuple):
    """One kind of finding, as docs/doctor.md describes it.

    Attributes:
        code: ``SD`` and three digits; a code that is no longer used is not given to another kind.
        cause: What leads to it, and what its effect is.
    """

    code: str
    severity: Severity
    title: str
    cause: str
    remedy: str

    def on(self, subject: str, text: str, remedy: str = "") -> Finding:
        """Return a finding of this kind; ``remedy`` replaces the general one."""
        return Finding(
            code=self.code,
            severity=self.severity,
            subject=subject,
            text=" ".join(text.split()),
            remedy=remedy or self.remedy,
        )


class OwnReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/api/v1/doctor``."""

    version: str
    findings: list[Finding]


def own_report(findings: Iterable[Finding]) -> OwnReport:
    """Return the exporter's answer."""
    return OwnReport(version=__version__, findings=sort_findings(findings))


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings, the gravest first, without repetitions."""
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda each: (SEVERITIES.index(each.severity), each.code))
