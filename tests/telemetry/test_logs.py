"""Rate-limited log lines, with a count of the suppressed ones."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from sidestep.telemetry.logs import RateLimitedLog, recent

log = logging.getLogger("sidestep.test")


class Clock:
    """A clock that tests advance."""

    now = 5.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_one_line_of_a_kind_per_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The next line has the number of suppressed ones; other kinds have their own minute."""
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
    """Kinds above the bound count as one; every suppressed line is counted."""
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
    messages = [record.getMessage() for record in caplog.records]
    counted = sum(int(line.split("(")[1].split()[0]) for line in messages if "(" in line)

    assert len(limited._known) <= 5
    still = sum(count for _, count in limited._known.values())
    assert len(messages) + counted + still == 1000 + 50 + 5
    assert still < 5


def test_fields_do_not_replace_members_of_the_line() -> None:
    """A reader can rely on the level of every line."""
    program = (
        "import logging; from sidestep.telemetry.logs import set_up; set_up('info', 'json');"
        "logging.getLogger('sidestep').info('x', extra={'fields': {'level': 'ok', 'more': 1}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    line = json.loads(done.stderr)

    assert (line["level"], line["msg"], line["more"]) == ("info", "x", 1)


def test_a_line_that_cannot_be_formatted_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The last lines that are kept have the next one."""
    record = logging.LogRecord("sidestep", logging.INFO, "f", 1, "%d", ("no number",), None)
    recent.handle(record)
    recent.handle(logging.LogRecord("sidestep", logging.INFO, "f", 1, "kept", (), None))

    assert recent.lines[-1].endswith("INFO kept")
    assert "Logging error" in capsys.readouterr().err
