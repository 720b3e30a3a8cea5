"""Installations as users may have them: the oldest dependencies that are declared, and the newest."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from command_line import ENVIRON
from installations import ROOT, made, pip


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "choice"), [("3.10", "--lowest"), ("3.13", "--newest")])
def test_an_installation(version: str, choice: str, tmp_path: Path) -> None:
    """Every module loads, every command starts, and what an engine sends is on the page."""
    python = made(version, choice)
    pip(python, "--no-deps", "--no-build-isolation", "--force-reinstall", ROOT)
    subprocess.run(
        [python, "-I", ROOT / "tools" / "smoke.py"], check=True, cwd=tmp_path, env=ENVIRON
    )
