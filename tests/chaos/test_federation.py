"""A short chaos run of exporters that forward to each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from chaos.federation import Federation
from chaos.stage import ROOT


def test_killed_exporters_lose_and_double_nothing() -> None:
    """The command reports that the upstream page has every item that was pushed, once."""
    command = [sys.executable, "-m", "chaos.federation", "--downstreams", "2", "--seconds", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "series with losses 0, with doubled counts 0, with decreases 0" in done.stdout


def test_a_missing_item_is_found(tmp_path: Path) -> None:
    """An item that was counted as pushed and is not on the upstream page is a difference."""
    with Federation(tmp_path, downstreams=1, rate=20.0, seed=3) as federation:
        federation.harm(1.0)
        found = federation.settle()
        federation.downstreams[0].tally.count("vllm:generation_tokens_total", 1)

        assert found == []
        assert [one.share > 0 for one in federation.differences()] == [True]
