"""What fuzzing has found, again: see ``fuzz``."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.targets import BY_NAME, turn

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.parent.name in BY_NAME)


@pytest.fixture(autouse=True)
def thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check for every input: there are few."""
    monkeypatch.setattr(turn, "thorough", True)


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_inputs_that_once_did_harm_do_none(path: Path) -> None:
    """Each as the fuzzer kept it."""
    BY_NAME[path.parent.name].run(path.read_bytes())


@pytest.mark.parametrize("name", BY_NAME)
def test_every_target_has_seeds_that_do_no_harm(name: str) -> None:
    """From recorded runs: the fuzzer begins behind the first checks."""
    seeds = list(BY_NAME[name].seeds())

    assert seeds
    BY_NAME[name].run(max(seeds, key=len))
