"""A short form of ``make soak``."""

from __future__ import annotations

import pytest
from fuzz.soak import soak


@pytest.mark.timeout(600)
def test_engines_come_and_go_beside_hostile_peers_and_all_counts_are_exact() -> None:
    """Replaced engines, restarts, reloads and attacks at once change no count and fill no log."""
    report = soak(seconds=16.0, engines=6, minute=4.0)

    assert report.faults == []
    assert report.lines
