"""Short chaos runs: one without a fault is clean, and a loss is found."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from chaos import table
from chaos.run import run
from chaos.stage import Options, Stage
from chaos.verdict import compare

QUICK = Options(rate=1000.0, rounds=1, quick=True)


@pytest.mark.parametrize("transport", ["ipc", pytest.param("tcp", marks=pytest.mark.long)])
def test_without_a_fault_every_series_is_exact(tmp_path: Path, transport: str) -> None:
    """Sums are exact, too."""
    options = Options(transport=transport, rate=1000.0)
    with Stage(tmp_path, options) as stage:
        assert stage.wait_for(lambda: stage.engine.pushed > 2000)
        stage.engine.ask("pause")
        assert stage.wait_for(stage.drained)
        report = stage.engine.report()

        assert report["pushed"] == stage.engine.pushed
        assert not compare(report["totals"], stage.fresh_page(), derived_apart=False).worst
        assert stage.watch.monotony.decreases == 0


def test_a_killed_exporter_without_state_loses_counts(tmp_path: Path) -> None:
    """It shows as loss and decrease, never as doubling, and the table says so."""
    result = run("kill", QUICK)

    assert result.reset
    assert result.comparison.lost > 0
    assert result.decreases > 0
    assert result.comparison.doubled == 0
    assert result.broken == ()

    shown = table.text([result], ["clock: not here"], QUICK)
    table.write(tmp_path / "out.json", [result], shown)

    assert "went back" in shown
    assert json.loads((tmp_path / "out.json").read_text())[0]["decreases"] == result.decreases


def test_a_killed_engine_is_succeeded() -> None:
    """Its successor continues, and lost items are reported."""
    result = run("engine-kill", QUICK)

    assert (result.comparison.lost, result.comparison.doubled, result.decreases) == (0, 0, 0)
    assert "died with an engine" in " ".join(result.notes)


def test_a_crash_of_the_exporter_breaks_a_promise(tmp_path: Path) -> None:
    """Its last log line is reported, and it is replaced."""
    with Stage(tmp_path, QUICK) as stage:
        os.kill(stage.exporter.pid, signal.SIGABRT)
        assert stage.wait_for(lambda: not stage.exporter.running)
        stage.revive()

        assert stage.broken == [f"the exporter died: {stage.broken[0].partition(': ')[2]}"]
        # Whether an engine has connected by then is a matter of milliseconds.
        assert re.search("engines connect to|engine .+ has connected", stage.broken[0])
        assert stage.exporter.running
