"""A short form of ``python -m fuzz.soak``."""

from __future__ import annotations

import pytest
from fuzz.soak import soak


@pytest.mark.timeout(300)
def test_hostile_peers_of_all_kinds_change_no_count_and_fill_no_log() -> None:
    """All at once, beside an honest engine."""
    report = soak(minutes=0.1)

    assert report.faults == []
    assert report.lines
