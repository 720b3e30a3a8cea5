"""Rate-limited log lines, with a count of the suppressed ones."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from sidestep.telemetry.logs import RateLimitedLog

log = logging.getLogger("sidestep.test")


class Clock:
    """Seconds that pass when told to."""

    now = 5.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def test_one_line_of_a_kind_in_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The next one says how many there were; other kinds are not kept back by it."""
    clock = Clock()
    limited = RateLimitedLog(log, clock=clock)
    for number in range(10):
        limited.warning("a", "first %d", number)
    limited.error("b", "second")
    clock.now += 60
    limited.warning("a", "first again")
    clock.now += 60
    limited.warning("a", "and again")

    assert [record.getMessage() for record in caplog.records] == [
        "first 0",
        "second",
        "first again (9 more like this since the last)",
        "and again",
    ]


def test_kinds_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Those over the bound are one; what they left out is counted with it, none is lost."""
    clock = Clock()
    limited = RateLimitedLog(log, kinds=4, clock=clock)
    for number in range(1000):
        limited.warning(str(number), "x")
    assert len(limited._known) == 5
    assert len(caplog.records) == 5
    for _ in range(5):
        clock.now += 61
        for number in range(1000, 1010):
            limited.warning(str(number), "x")
    clock.now += 61
    for number in range(2000, 2005):
        limited.warning(str(number), "x")
    said = [record.getMessage() for record in caplog.records]
    counted = sum(int(line.split("(")[1].split()[0]) for line in said if "(" in line)

    assert len(limited._known) <= 5
    still = sum(count for _, count in limited._known.values())
    assert len(said) + counted + still == 1000 + 50 + 5
    assert still < 5


def test_a_line_below_the_level_is_none(caplog: pytest.LogCaptureFixture) -> None:
    """It does not take the place of one that would be shown."""
    limited = RateLimitedLog(log)
    with caplog.at_level(logging.WARNING, "sidestep.test"):
        limited.info("a", "quiet")
        limited.warning("a", "loud")

    assert [record.getMessage() for record in caplog.records] == ["loud"]


def test_a_traceback_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Of a bug; the exception need not be the one being handled."""
    RateLimitedLog(log).error("bug", "a bug: %s", "x", trace=ValueError("y"))

    assert "ValueError: y" in caplog.text


def test_what_runs_in_the_exporter_logs_as_the_exporter_does() -> None:
    """In its form and at its level, whichever package it is from."""
    program = (
        "import logging; from sidestep.telemetry.logs import set_up; set_up('info', 'json');"
        "[logging.getLogger(f'{name}.part').info(name) for name in ('sidestep', 'sidestep_adapters')]"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert [json.loads(line)["msg"] for line in done.stderr.splitlines()] == [
        "sidestep",
        "sidestep_adapters",
    ]
