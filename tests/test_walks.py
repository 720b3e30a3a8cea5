"""How much code a value passes on its way, as ``python -m tools.walks`` prints it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = {
    "A frame to its series": (35, 16),
    "A scrape to its bytes": (59, 14),
    "An ended request to its record and span": (45, 15),
}
"""Functions and files."""


def test_walks_stay_short() -> None:
    """A reader who follows a value passes at most so many functions and files."""
    run = [sys.executable, "-m", "tools.walks"]
    done = subprocess.run(run, cwd=ROOT, text=True, capture_output=True, check=True, timeout=100)
    found = {
        title: (int(functions), int(files))
        for title, functions, files in re.findall(
            r"^(.+): (\d+) functions in (\d+) files$", done.stdout, re.MULTILINE
        )
    }

    assert found.keys() == MOST.keys()
    for title, counts in found.items():
        assert all(a > 0 for a in counts), title
        assert counts <= MOST[title], f"{title}: {counts}"
        assert counts[1] <= MOST[title][1], f"{title}: {counts}"
