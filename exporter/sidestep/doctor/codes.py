"""All codes, in the sections of docs/doctor.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidestep.diagnosis import own_codes
from sidestep.diagnosis.finding import Code
from sidestep.doctor import exporter
from sidestep.doctor.manifests import check as manifests


class Section(NamedTuple):
    """Codes of one source of findings.

    Attributes:
        title: Heading.
        usage: How the source is checked; Markdown.
    """

    title: str
    usage: str
    codes: Sequence[Code]


SECTIONS = (
    Section(
        "An exporter, by itself",
        "`sidestep doctor URL`, `/api/v1/doctor`, or the live page. Counters are findings if they"
        " have increased within the last hour.",
        own_codes.CODES,
    ),
    Section(
        "An exporter, from outside",
        "`sidestep doctor URL`: the address of an exporter's page.",
        exporter.CODES,
    ),
    Section(
        "Kubernetes manifests",
        "`sidestep doctor --manifest FILE|DIR|-`: rendered manifests, or those of a cluster. Other resources than"
        " pods and what scrapes them are ignored.",
        manifests.CODES,
    ),
)
