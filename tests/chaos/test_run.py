"""Whole runs, short: a run without a fault is clean, and a loss is seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import table
from chaos.run import run
from chaos.stage import ROOT, Options, Stage
from chaos.verdict import compare

QUICK = Options(rate=1000.0, rounds=1, quick=True)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_without_a_fault_the_page_shows_what_was_pushed(tmp_path: Path, transport: str) -> None:
    """Every series, to the last digit of the sums."""
    options = Options(transport=transport, rate=1000.0)
    with Stage(tmp_path, options) as stage:
        assert stage.wait_for(lambda: stage.engine.pushed > 2000)
        stage.engine.ask("pause")
        assert stage.wait_for(stage.drained)
        report = stage.engine.report()
        page = stage.settled()

        assert report["pushed"] == stage.engine.pushed
        assert not compare(report["totals"], page, derived_apart=False).worst
        assert stage.watch.monotony.decreases == 0
        assert report["phases"]["up"]["push"]["count"] == report["pushed"]
        assert report["phases"]["up"]["big"]["count"] > 0


def test_a_killed_exporter_without_a_state_is_seen_as_loss_and_decrease(tmp_path: Path) -> None:
    """The test of the test: what the promise excludes must show, and nothing comes twice."""
    result = run("kill", QUICK)

    assert result.reset
    assert result.comparison.lost > 0
    assert result.decreases > 0
    assert result.comparison.doubled == 0
    assert result.recovery is not None
    assert result.broken == ()

    shown = table.text([result], ["clock: not here"], QUICK)
    table.write(tmp_path / "out.json", [result], shown)
    table.write(tmp_path / "out.md", [result], shown)

    assert "| reset " in shown
    assert "went back" in shown
    assert "not run: clock" in (tmp_path / "out.md").read_text()
    assert json.loads((tmp_path / "out.json").read_text())[0]["decreases"] == result.decreases


def test_what_cannot_be_run_is_no_success() -> None:
    """A run of nothing exits with 1, and says why."""
    command = [sys.executable, "-m", "chaos", "--fault", "clock", "--transport", "ipc"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "nothing was run: clock, ipc: " in done.stderr


def test_a_killed_engine_leaves_a_beginning_of_its_stream() -> None:
    """And its successor goes on; what died with it is told."""
    result = run("engine-kill", QUICK)

    assert (result.comparison.lost, result.comparison.doubled, result.decreases) == (0, 0, 0)
    assert "died with an engine" in " ".join(result.notes)
    assert result.comparison.derived == 0


def test_an_exporter_that_dies_by_itself_breaks_the_promise(tmp_path: Path) -> None:
    """Its last words are told, and another takes its place, as an orchestrator would see to."""
    with Stage(tmp_path, QUICK) as stage:
        os.kill(stage.exporter.pid, signal.SIGABRT)
        assert stage.wait_for(lambda: not stage.exporter.running)
        stage.revive()

        assert stage.broken == [f"the exporter died: {stage.broken[0].partition(': ')[2]}"]
        assert "engines connect to" in stage.broken[0]
        assert stage.exporter.running
        assert len(stage.recoveries) == 1
