"""A short chaos run of an exporter that writes records of requests."""

from __future__ import annotations

import subprocess
import sys

import pytest
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
