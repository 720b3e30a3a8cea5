"""Inputs that fuzzing found: see ``fuzz``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.targets import BY_NAME, turn

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.parent.name in BY_NAME)


@pytest.fixture(autouse=True)
def thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every check for every input, since there are few."""
    monkeypatch.setattr(turn, "thorough", True)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_past_findings_do_no_harm(path: Path) -> None:
    """Each input is as the fuzzer saved it."""
    BY_NAME[path.parent.name].run(path.read_bytes())


@pytest.mark.parametrize("name", BY_NAME)
def test_every_target_has_seeds_that_do_no_harm(name: str) -> None:
    """The fuzzer starts from recorded runs, behind the first checks."""
    seeds = list(BY_NAME[name].seeds())

    assert seeds
    BY_NAME[name].run(max(seeds, key=len))


def test_the_fuzzer_starts_without_a_path_of_its_own() -> None:
    """``python -m fuzz`` finds the tests' helpers by itself, as ``make fuzz`` calls it."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "fuzz", "--help"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in BY_NAME)


def test_without_the_fuzzer_one_line_says_what_to_install() -> None:
    """No target runs, so there is no table of findings."""
    absent = "import runpy, sys; sys.modules['atheris'] = None; sys.argv[1:] = ['--seconds', '1']"
    command = [sys.executable, "-c", f"{absent}; runpy.run_module('fuzz', run_name='__main__')"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fuzz: atheris is missing: pip install -e '.[fuzz]' with Python < 3.14\n"
    )
