"""The dashboard "Why is it slow": shares of limits and parts, and the table of what to change."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tools.boards import colors
from tools.boards.__main__ import GRAFANA

from boards import DASHBOARDS, ROOT, dashboard, everything, families, filled, panels, queries
from promtool import assert_query, needs_promtool
from sidestep.catalog.tuning import CAUSES
from sidestep.protocol.request_events import LIMITS
from sidestep.tracking.health.states import EngineState
from sidestep.tracking.requests.parts import KEYS
from sidestep_adapters.polling.state import STATES

PATH = GRAFANA / "why.json"
TUNING = (ROOT / "docs" / "tuning.md").read_text()
PLACE = 'job="j",instance="i:9857",model_name="m"'
TWO_RANKS = 'engine_type="unified",pp_rank="0",moe_ep_rank="0"'
LIMIT = "sidestep_step_limit_seconds_total"
PART = "sidestep_request_part_seconds_total"
SERIES = {
    f'{LIMIT}{{{PLACE},engine="0",limit="none"}}': "0+6x10",
    f'{LIMIT}{{{PLACE},engine="0",limit="slots"}}': "0+6x10",
    f'{LIMIT}{{{PLACE},engine="0",limit="kv_blocks"}}': "0+48x10",
    # Both ranks of a replica report the same.
    f'{LIMIT}{{{PLACE},{TWO_RANKS},tp_rank="0",limit="none"}}': "0+40x10",
    f'{LIMIT}{{{PLACE},{TWO_RANKS},tp_rank="1",limit="none"}}': "0+40x10",
    f'{PART}{{{PLACE},engine="0",part="front_end_in"}}': "0+5x10",
    f'{PART}{{{PLACE},engine="0",part="queue",limit="kv_blocks"}}': "0+30x10",
    f'{PART}{{{PLACE},engine="0",part="queue",limit="none"}}': "0+5x10",
    f'{PART}{{{PLACE},engine="0",part="prefill"}}': "0+10x10",
    f'{PART}{{{PLACE},engine="0",part="decode"}}': "0+50x10",
}


@needs_promtool
@pytest.mark.parametrize(
    ("panel", "number", "wanted"),
    [
        (
            "Time by limit",
            0,
            {'{limit="none"}': 0.46, '{limit="slots"}': 0.06, '{limit="kv_blocks"}': 0.48},
        ),
        (
            "Limit that binds most, by engine",
            0,
            {'{instance="i:9857",model_name="m",engine="0",limit="kv_blocks"}': 0.8},
        ),
        (
            "E2E latency by part",
            0,
            {'{part="front_end_in"}': 0.05, '{part="prefill"}': 0.1, '{part="decode"}': 0.5},
        ),
        ("E2E latency by part", 1, {'{limit="kv_blocks"}': 0.3, '{limit="none"}': 0.05}),
        ("TTFT by part", 0, {'{part="front_end_in"}': 0.1, '{part="prefill"}': 0.2}),
        ("TTFT by part", 1, {'{limit="kv_blocks"}': 0.6, '{limit="none"}': 0.1}),
    ],
)
def test_shares(tmp_path: Path, panel: str, number: int, wanted: dict[str, float]) -> None:
    """Limits have shares of the busy time and parts of the latency; the ranks of a replica count once."""
    expr = [filled(asked.expr) for asked in queries(PATH) if asked.panel == panel][number]

    assert_query(tmp_path, SERIES, expr.replace("[1m]", "[5m]"), wanted, interval="1m", at="10m")


def test_the_board_has_the_table_of_docs_tuning() -> None:
    """Parts, changes and exceptions of every cause are those of docs/tuning.md."""
    (panel,) = (each for each in everything(dashboard(PATH)) if each["type"] == "text")
    _, _, *rows = (
        line for line in panel["options"]["content"].splitlines() if line.startswith("|")
    )
    for cause, row in zip(CAUSES, rows, strict=True):
        keys, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        section = re.split(rf"^## {cause.name}$", TUNING, flags=re.MULTILINE)[1]
        section = section.partition("\n## ")[0]
        assert set(re.findall(r"`([\w.]+)`", keys)) == {*cause.parts}
        for text in (text for cell in cells for text in cell.split("<br>")):
            assert text in section


def colored(panel: dict[str, Any]) -> dict[str, str]:
    """Return the colors of a panel's series by legend."""
    return {
        override["matcher"]["options"]: each["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
        for each in override["properties"]
        if each["id"] == "color"
    }


def test_states_limits_and_parts_have_colors() -> None:
    """Each state, limit and part has a color of its own."""
    assert colors.STATES.keys() == {state.value for state in EngineState}
    assert colors.SERVERS.keys() == {*STATES}
    assert colors.LIMITS.keys() == {*LIMITS}
    assert colors.PARTS.keys() == {*KEYS, "queue"}
    for found in (colors.STATES, colors.SERVERS, colors.LIMITS, colors.PARTS):
        assert len(set(found.values())) == len(found)


def test_colors_are_those_of_the_live_page() -> None:
    """Limits, and parts that the live page shows, have its colors on light ground."""
    style = (ROOT / "exporter/sidestep/http/live_page/style.css").read_text()
    page = dict(re.findall(r"--(\w+): light-dark\((#\w+),", style))
    same = ("prefill", "decode", "interference", "preempted")

    assert {limit: page[limit] for limit in LIMITS} == colors.LIMITS
    assert {part: page[part] for part in same} == {part: colors.PARTS[part] for part in same}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_colors_are_the_same_everywhere(path: Path) -> None:
    """Every panel whose series are states, limits or parts has their colors."""
    by_legend = {"{{limit}}": colors.LIMITS, "{{part}}": colors.PARTS}
    by_family = {
        "sidestep_engine_state": colors.STATES,
        "sidestep_triton_state": colors.SERVERS,
        "sidestep_scrape_state": colors.SERVERS,
    }
    for panel in panels(dashboard(path)):
        first = panel["targets"][0]
        if panel["type"] == "state-timeline":
            (mapping,) = panel["fieldConfig"]["defaults"]["mappings"]
            found = {each["text"]: each["color"] for each in mapping["options"].values()}
            assert found == colors.STATES
            continue
        wanted = by_legend.get(first["legendFormat"], {})
        if first["legendFormat"] == "{{state}}":
            (family,) = families(first["expr"])
            wanted = by_family.get(family, {})
        assert colored(panel) == wanted, panel["title"]
