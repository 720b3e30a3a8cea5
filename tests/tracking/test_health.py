"""States and reasons of an engine's health, and thresholds, case by case."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from health_cases import CASES, Engine


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_state_follows_from_what_processes_report(case: Callable[[Engine], None]) -> None:
    """Each case says what processes report, and which state follows when."""
    case(Engine())
