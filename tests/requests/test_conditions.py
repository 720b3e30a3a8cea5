"""The grammar of --requests.log.if."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from command_line import one_line, sidestep
from sidestep.requests.conditions import NUMBERS, SECONDS, TEXTS, parse
from sidestep.requests.record import RequestRecord


def record(**more: Any) -> RequestRecord:
    """Return a record with these fields; others are unknown, 0 or empty."""
    empty = {"str": "", "int": 0, "float": 0.0, "dict[str, bool]": {}}
    fields = {
        field.name: empty.get(str(RequestRecord.__annotations__[field.name]))
        for field in msgspec.structs.fields(RequestRecord)
    }
    return RequestRecord(**{**fields, **more})


def test_every_field_is_one_of_the_record() -> None:
    """A name that a record lacks would fail when the first request ends."""
    names = {field.name for field in msgspec.structs.fields(RequestRecord)}
    assert {*SECONDS.values(), *NUMBERS, *TEXTS} <= names


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("ttft > 2s", True),
        ("ttft>2.5s", False),
        ("ttft >= 2500ms", True),
        ("e2e > 1m", False),
        ("e2e < 100m", False),
        ("reason = abort", True),
        ("reason != abort", False),
        ("output_tokens >= 10", True),
        ("output_tokens > 10", False),
        ("ttft > 9s or reason = abort", True),
        ("ttft > 9s and reason = abort", False),
        ("ttft > 9s and reason = abort or model = m", True),
        ("model = m or ttft > 9s and reason = stop", True),
        ("reason = stop and model = m or adapter = x", False),
    ],
)
def test_conditions(condition: str, holds: bool) -> None:
    """``and`` binds closer than ``or``; a comparison with an unknown value does not hold."""
    found = record(ttft_seconds=2.5, e2e_seconds=None, reason="abort", output_tokens=10, model="m")
    assert parse(condition).matches(found) is holds


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("", "must be TERM"),
        ("ttft", "must be TERM"),
        ("ttft > fast", "is a time"),
        ("ttfb > 2s", "is no field; known are e2e"),
        ("reason > abort", "compare it by = or !="),
        ("preemptions > few", "is a number"),
        ("ttft > 2s or", "must be TERM"),
    ],
)
def test_mistakes_complete_an_error_line(condition: str, says: str) -> None:
    """The error names the known values."""
    with pytest.raises(ValueError, match=says):
        parse(condition)


def test_a_wrong_condition_is_a_usage_error() -> None:
    """The exporter does not start."""
    done = sidestep("serve", "--requests.log", "-", "--requests.log.if", "ttft > soon")
    one_line(done, 2, "--requests.log.if: ttft is a time")
