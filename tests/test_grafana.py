"""The dashboards: every metric exists, every query parses and answers, nothing overlaps."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from conftest import MAIN_RUN, SPEC_RUN, Start
from pages import get
from sidestep.catalogue import rows_of
from sidestep.catalogue.self_metrics import BY_NAME
from sidestep_adapters.replay import Replay

DASHBOARDS = sorted((Path(__file__).parents[1] / "grafana").glob("*.json"))


def panels(path: Path) -> list[dict[str, Any]]:
    """Of a dashboard."""
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def queries(path: Path) -> list[str]:
    """Every expression, its variables replaced by what Grafana would put there."""
    found = [target["expr"] for panel in panels(path) for target in panel.get("targets", ())]
    found = [expr.replace("$__rate_interval", "1m") for expr in found]
    return [re.sub(r"\$\w+", ".*", expr) for expr in found]


def test_there_are_dashboards() -> None:
    """Otherwise the tests below test nothing."""
    assert [path.name for path in DASHBOARDS] == ["vllm.json"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
async def test_every_metric_is_on_the_page(path: Path, start: Start) -> None:
    """Of the catalogue, and there after the recorded runs."""
    names = {
        name
        for expr in queries(path)
        for name in re.findall(r"\b(?:vllm:|sidestep_)[a-z0-9_]+", expr)
    }
    async with start() as exporter:
        for run in (MAIN_RUN, SPEC_RUN):
            player = Replay(run, exporter.endpoints[0], realtime=False, namespace="grafana")
            await asyncio.to_thread(player.run)
        page = ""
        # A page tells how long the one before took, and may answer twice.
        async with asyncio.timeout(10):
            while "sidestep_scrape_duration_seconds" not in page:
                page = await get(exporter.url)
    shown = set(re.findall(r"^([a-z0-9_:]+)[{ ]", page, re.MULTILINE))
    families = {row.name for row in rows_of("vllm")} | BY_NAME.keys()

    assert {name.removesuffix("_bucket") for name in names} - families == set()
    # It has a sample once there is something to report.
    assert names - shown - {"sidestep_rejected_total"} == set()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_query_parses(path: Path, tmp_path: Path) -> None:
    """As Prometheus reads it."""
    rules = [{"record": f"q{n}", "expr": expr} for n, expr in enumerate(queries(path))]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [str(shutil.which("promtool")), "check", "rules", file],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_have_their_own_place(path: Path) -> None:
    """Ids are unique, and no two panels overlap."""
    taken: set[tuple[int, int]] = set()
    for panel in panels(path):
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells
    ids = [panel["id"] for panel in panels(path)]

    assert len(ids) == len(set(ids))
