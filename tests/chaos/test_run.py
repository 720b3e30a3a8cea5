"""Short chaos runs: one without a fault is clean, and a loss is found."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from chaos import table
from chaos.engine import STEP, Longest
from chaos.run import run
from chaos.stage import ROOT, Options, Stage
from chaos.verdict import compare

QUICK = Options(rate=1000.0, rounds=1, quick=True)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_without_a_fault_every_series_is_exact(tmp_path: Path, transport: str) -> None:
    """Without a fault every series is exact, sums included."""
    options = Options(transport=transport, rate=1000.0)
    with Stage(tmp_path, options) as stage:
        assert stage.wait_for(lambda: stage.engine.pushed > 2000)
        stage.engine.ask("pause")
        assert stage.wait_for(stage.drained)
        report = stage.engine.report()
        page = stage.fresh_page()

        assert report["pushed"] == stage.engine.pushed
        assert not compare(report["totals"], page, derived_apart=False).worst
        assert stage.watch.monotony.decreases == 0
        assert report["phases"]["up"]["push"]["count"] == report["pushed"]
        assert report["phases"]["up"]["big"]["count"] > 0


def test_a_page_is_requested_after_the_acknowledgement(tmp_path: Path) -> None:
    """A page to compare with was requested after all was acknowledged, also of a stopped exporter."""
    with Stage(tmp_path, QUICK) as stage:
        assert stage.wait_for(lambda: stage.engine.pushed > 100)
        stage.engine.ask("pause")
        assert stage.wait_for(stage.drained)
        stage.exporter.halt()
        acknowledged = time.monotonic()
        threading.Timer(1.0, stage.exporter.go_on).start()
        page = stage.fresh_page()

        assert stage.watch.requested > acknowledged
        assert not compare(stage.engine.report()["totals"], page, derived_apart=False).worst


def test_an_engine_records_when_it_pushed(tmp_path: Path) -> None:
    """Items that a killed engine took along are measured in seconds between their pushes."""
    with Stage(tmp_path, QUICK) as stage:
        assert stage.wait_for(lambda: stage.engine.pushed > 1000)
        engine = stage.engine
        engine.kill()
        pushed = engine.pushed

        assert engine.unsent(pushed) == 0.0
        assert engine.unsent(pushed - 1) == 0.0
        # 1,000 items a second; those of at most 0.25 s are made up for at once.
        assert engine.unsent(pushed - 600) > 0.3


def test_the_longest_push_says_what_its_threads_did() -> None:
    """The longest push has the time of both threads on a core and waiting for one."""
    stop, longest = threading.Event(), Longest()
    step = threading.Thread(target=stop.wait, name=STEP)
    step.start()
    longest.note(0.1)
    longest.look()
    longest.note(0.3)
    longest.note(0.2)
    stop.set()
    step.join()

    assert longest.figures.keys() == {"seconds", f"{STEP} ran", f"{STEP} waited"}
    assert longest.figures["seconds"] == 0.3


def test_a_killed_exporter_without_state_loses_counts(tmp_path: Path) -> None:
    """A killed exporter without a state directory shows as loss and decrease, never as doubling."""
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

    assert "| reset" in shown
    assert "went back" in shown
    assert "not run: clock" in (tmp_path / "out.md").read_text()
    assert json.loads((tmp_path / "out.json").read_text())[0]["decreases"] == result.decreases


def test_a_fault_that_cannot_be_run_is_an_error() -> None:
    """A fault that cannot be run here gives exit code 1 and the reason."""
    command = [sys.executable, "-m", "chaos", "--fault", "clock", "--transport", "ipc"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "nothing was run: clock, ipc: " in done.stderr


def test_a_killed_engine_is_succeeded() -> None:
    """After an engine is killed, its successor continues, and lost items are reported."""
    result = run("engine-kill", QUICK)

    assert (result.comparison.lost, result.comparison.doubled, result.decreases) == (0, 0, 0)
    assert "died with an engine" in " ".join(result.notes)
    assert result.comparison.derived == 0


def test_a_crash_of_the_exporter_breaks_a_promise(tmp_path: Path) -> None:
    """An exporter that crashes breaks a promise; its last log line is reported, and it is replaced."""
    with Stage(tmp_path, QUICK) as stage:
        os.kill(stage.exporter.pid, signal.SIGABRT)
        assert stage.wait_for(lambda: not stage.exporter.running)
        stage.revive()

        assert stage.broken == [f"the exporter died: {stage.broken[0].partition(': ')[2]}"]
        assert "engines connect to" in stage.broken[0]
        assert stage.exporter.running
        assert len(stage.recoveries) == 1
