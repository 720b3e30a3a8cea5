"""Environments of other Pythons, with what sidestep needs and nothing of this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def interpreter(version: str) -> str:
    """Return the path of this Python, of the PATH or of pyenv."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for found in (*pyenv.glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")):
        if found and not subprocess.run([found, "-c", "import ensurepip"], check=False).returncode:
            return str(found)
    pytest.skip(f"there is no Python {version} with its venv module")


def made(version: str, choice: str) -> Path:
    """Return the Python of an environment in build/ with what sidestep needs; it is kept for the next run."""
    folder = ROOT / "build" / f"python-{version}"
    python = folder / "bin" / "python"
    wanted = subprocess.check_output(
        [sys.executable, ROOT / "tools" / "lower_bounds.py", choice], text=True
    )
    kept = folder / "requirements.txt"
    if not kept.exists() or kept.read_text() != wanted:
        subprocess.run([interpreter(version), "-m", "venv", "--clear", folder], check=True)
        new = folder / "requirements.new"
        new.write_text(wanted)
        # Nothing is compiled: a version without a wheel is no use to users either.
        pip(python, "--only-binary", ":all:", "-r", new)
        new.rename(kept)
    return python


def pip(python: Path, *arguments: object) -> None:
    """Install packages."""
    subprocess.run([python, "-m", "pip", "install", "-qq", *map(str, arguments)], check=True)
