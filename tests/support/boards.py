"""Readers of the dashboards' JSON files: panels, queries and variables."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from sidestep.engines.dialects import DIALECTS
from trtllm_page import made_families

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "grafana").glob("*.json"))
FAMILY = re.compile(
    r"(?<![\w:$\"])((?:vllm|sglang|llamacpp):\w+|(?:sidestep|trtllm|nv|process|gen_ai|DCGM)_\w+|up)(?=[{\[])"
)
NAMED = re.compile(r'__name__=~"([^"]+)"')
HISTOGRAMS = {
    row.name for dialect in DIALECTS.values() for row in dialect.rows if row.kind == "histogram"
} | {name for name, each in made_families().items() if each.kind == "histogram"}
SUFFIX = re.compile(r"_(bucket|sum|count)$")


@dataclasses.dataclass(frozen=True)
class PanelQuery:
    """A query of a panel or an annotation."""

    board: str
    panel: str
    expr: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel}: {self.expr}"


def dashboard(path: Path) -> dict[str, Any]:
    """Read a dashboard from its file."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard that have queries, those of collapsed rows included."""
    return [panel for panel in everything(board) if "targets" in panel]


def everything(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return row headings and panels of a dashboard, with all rows open."""
    return [each for panel in board["panels"] for each in (panel, *panel.get("panels", ()))]


def data_links(board: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the links from values to other dashboards, each with its panel."""
    return [
        (panel, link)
        for panel in panels(board)
        for links in (
            panel["fieldConfig"]["defaults"].get("links", []),
            *(
                each["value"]
                for override in panel["fieldConfig"]["overrides"]
                for each in override["properties"]
                if each["id"] == "links"
            ),
        )
        for link in links
    ]


def queries(path: Path) -> list[PanelQuery]:
    """Return the queries of all panels and annotations of a file, variables included."""
    board = dashboard(path)
    found = [(panel["title"], t["expr"]) for panel in panels(board) for t in panel["targets"]]
    found += [(each["name"], each["expr"]) for each in board["annotations"]["list"]]
    return [PanelQuery(path.stem, *each) for each in found]


def variables(board: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the template variables of a dashboard by name."""
    return {each["name"]: each for each in board["templating"]["list"]}


def filled(expr: str, **values: str) -> str:
    """Replace each variable as Grafana does; a variable without a value here stands for all."""
    given = {"__rate_interval": "1m", "ttft": "1.0", "itl": "0.1", "e2e": "10.0", **values}
    return re.sub(r"\$(\w+)", lambda found: given.get(found[1], ".*"), expr)


def families(expr: str) -> set[str]:
    """Return the names of the families that ``expr`` selects."""
    several = [name for found in NAMED.findall(expr) for name in found.split("|")]
    return {family(name) for name in (*FAMILY.findall(expr), *several)}


def family(sample: str) -> str:
    """Return the family of a sample name; a family's own name can end as a histogram's samples do."""
    name = SUFFIX.sub("", sample)
    return name if name in HISTOGRAMS else sample
