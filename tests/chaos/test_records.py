"""A short chaos run of an exporter that writes records of requests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from chaos.records import Records
from chaos.stage import ROOT


@pytest.mark.parametrize("transport", [pytest.param("ipc", marks=pytest.mark.long), "tcp"])
def test_a_killed_exporter_loses_no_record(transport: str) -> None:
    """Each request has a record, doubles are equal, and tenants' counters are what was pushed."""
    command = [sys.executable, "-m", "chaos.records", "--transport", transport]
    command += ["--engines", "2", "--rate", "50", "--kills", "3"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed 3 times" in done.stdout
    assert "records missing 0, counted as lost 0" in done.stdout


def test_a_missing_record_and_a_wrong_count_are_found(tmp_path: Path) -> None:
    """A request without a record, a record of none, and a tenant's count that is too low."""
    with Records(tmp_path, "ipc", engines=1, rate=50.0, seed=3) as records:
        records.kill()
        records.settle()
        core = records.cores[0]

        assert (records.missing, records.unequal, records.differences()) == (set(), [], [])
        assert not records.watch.unequal
        known = core.keys.pop()
        core.keys.add("none")
        series = next(iter(core.expected))
        core.expected[series] += 1

        assert records.missing == {"none"}
        assert set(records.unequal) == {known}
        assert [one.partition(":")[0] for one in records.differences()] == [
            series.partition(":")[0]
        ]
