"""Prometheus' own check of a page."""

from __future__ import annotations

import shutil
import subprocess

PROMTOOL = shutil.which("promtool")


def complaints(page: str) -> set[str]:
    """What promtool says of ``page``, which it must be able to read."""
    done = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    found = (done.stdout + done.stderr).splitlines()
    assert not [line for line in found if "error while" in line]
    return set(found)
