"""All codes, in the sections of docs/doctor.md."""

from __future__ import annotations

from collections.abc import Sequence

from sidestep.diagnosis import own_codes
from sidestep.diagnosis.finding import Code
from sidestep_tools.doctor import endpoint, engine_page, environment, exporter
from sidestep_tools.doctor.manifests import checks as manifests
from sidestep_tools.doctor.queries import codes as queries

# fmt: off
SECTIONS: Sequence[tuple[str, Sequence[Code], str]] = (
    ("An engine's environment", environment.CODES,
        "`python -m sidestep doctor --environment`, with the engine's Python and variables. Its endpoint is checked as below. Options of command lines (SD021 to SD026) are checked in manifests."),
    ("An exporter, by itself", own_codes.CODES,
        "`sidestep doctor URL`, `/api/v1/doctor`, or the live page. Counters are findings if they have increased within the last hour."),
    ("An exporter, from outside", exporter.CODES,
        "`sidestep doctor URL`: the address of an exporter's page."),
    ("An ingest endpoint", endpoint.CODES,
        "`sidestep doctor --endpoint ENDPOINT`: by a connection as an engine makes it, with the keys of `SIDESTEP_SERVER_KEY` and `SIDESTEP_CLIENT_KEY`."),
    ("A metrics page", engine_page.CODES,
        "`sidestep doctor --engine-page URL|FILE`: the page of an engine, or of an exporter, as Prometheus scrapes it. With several, also whether an engine is on two of them."),
    ("Kubernetes manifests", manifests.CODES,
        "`sidestep doctor --manifest FILE|DIR|-`: rendered manifests, or those of a cluster. Variables and options of engines have the codes of an engine's environment."),
    ("Dashboards and rule files", queries.CODES,
        "`sidestep doctor --dashboard FILE --rules FILE`: files of Grafana, Perses or Prometheus, also in ConfigMaps and operators' objects. Metrics are compared with the catalogue, or with the metrics pages of `--engine-page URL|FILE`."),
)
"""Headings, codes, and the commands that look for them, in Markdown."""
# fmt: on
