"""All codes, in the sections of docs/doctor.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sidestep.diagnosis import own_codes
from sidestep.diagnosis.finding import Code
from sidestep_tools.doctor import endpoint, engine_page, exporter, prometheus
from sidestep_tools.doctor.environment import check as environment
from sidestep_tools.doctor.manifests import autoscaling
from sidestep_tools.doctor.manifests import checks as manifests
from sidestep_tools.doctor.queries import codes as queries


class Section(NamedTuple):
    """Codes of one source of findings.

    Attributes:
        title: Heading.
        usage: How the source is checked; Markdown.
    """

    title: str
    codes: Sequence[Code]
    usage: str


# fmt: off
SECTIONS = (
    Section("An engine's environment", environment.CODES,
        "`python -m sidestep doctor --environment`, with the engine's Python, where the engine runs: in its container. If engines run there, their processes are checked, otherwise what a process started there would have. The endpoint of `SIDESTEP_ENDPOINT` is checked as below."),
    Section("An exporter, by itself", own_codes.CODES,
        "`sidestep doctor URL`, `/api/v1/doctor`, or the live page. Counters are findings if they have increased within the last hour."),
    Section("An exporter, from outside", exporter.CODES,
        "`sidestep doctor URL`: the address of an exporter's page."),
    Section("An ingest endpoint", endpoint.CODES,
        "`sidestep doctor --endpoint ENDPOINT`: by a connection as an engine makes it, with the keys of `SIDESTEP_SERVER_KEY` and `SIDESTEP_CLIENT_KEY`."),
    Section("A metrics page", engine_page.CODES,
        "`sidestep doctor --engine-page URL|FILE`: the page of an engine, or of an exporter, as Prometheus scrapes it. With several, also whether an engine is on two of them."),
    Section("Kubernetes manifests", (*manifests.CODES, *autoscaling.CODES),
        "`sidestep doctor --manifest FILE|DIR|-`: rendered manifests, or those of a cluster. Other resources than pods, what scrapes them and autoscalers are ignored. Variables and options of engines have the codes of an engine's environment. The queries of KEDA's triggers and of prometheus-adapter's rules, and the metrics of HPAs, are checked as those of dashboards are."),
    Section("A Prometheus", prometheus.CODES,
        "`sidestep doctor --prometheus URL`: what it scrapes and which rules it evaluates. Only targets and rules of exporters and engines are checked."),
    Section("Dashboards and rule files", queries.CODES,
        "`sidestep doctor --dashboard FILE --rules FILE`: files of Grafana, Perses or Prometheus, also in ConfigMaps and operators' objects. Metrics are compared with the catalogue; with `--engine-page URL|FILE` with a metrics page, too; with `--prometheus URL` every query is run there."),
)
# fmt: on
