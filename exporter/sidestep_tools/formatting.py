"""Text at the terminal: numbers have three digits and a unit, and ``--`` is an unknown number."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable
from typing import TypeGuard

import click
import msgspec

from sidestep.protocol.limits import escape

UNKNOWN = "--"
UNITS = "kMGT"
LEAST_SHARE = 0.0005
MINUTE, HOUR, DAY = 60, 3600, 86400


def show(lines: Iterable[str]) -> None:
    """Print lines, in which text of servers and files is escaped."""
    for line in lines:
        click.echo(escape(line))


def show_json(value: msgspec.Struct) -> None:
    """Print a value as indented JSON."""
    show(msgspec.json.format(msgspec.json.encode(value)).decode().split("\n"))


def count(value: float | None) -> str:
    """Return requests or events: ``0``, ``812``, ``12.3k``."""
    return _scaled(value, f"{value:.0f}") if _known(value) else UNKNOWN


def rate(value: float | None) -> str:
    """Return something per second: ``0``, ``0.44``, ``812``, ``12.3k``."""
    return _scaled(value, _three_digits(value) if value else "0") if _known(value) else UNKNOWN


def share(value: float | None) -> str:
    """Return a share of 1 in percent: ``0%``, ``0.4%``, ``97%``."""
    if not _known(value):
        return UNKNOWN
    text = f"{value:.0%}"
    return f"{value:.1%}" if text == "0%" and value >= LEAST_SHARE else text


def duration(seconds: float | None) -> str:
    """Return a duration: ``0s``, ``0.84ms``, ``84.0ms``, ``1.20s``, ``2m05s``."""
    if not _known(seconds):
        return UNKNOWN
    whole = round(seconds)
    if whole >= MINUTE:
        return _minutes(whole)
    if seconds == 0:
        return "0s"
    text = _three_digits(1000 * seconds)
    return f"{_three_digits(seconds)}s" if text == "1000" or seconds >= 1 else f"{text}ms"


def age(seconds: float | None) -> str:
    """Return an age, from one second on in whole seconds: ``31s``, ``2m05s``."""
    if not _known(seconds) or seconds < 1:
        return duration(seconds)
    whole = round(seconds)
    return _minutes(whole) if whole >= MINUTE else f"{whole}s"


def cells_of(text: str) -> int:
    """Return the cells that a text takes at the terminal: a wide character two, an accent none."""
    return sum(
        0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF")
        for each in text
    )


def _known(value: float | None) -> TypeGuard[float]:
    """Return whether there is a finite number: a page may also have NaN or an infinity."""
    return value is not None and math.isfinite(value)


def _minutes(seconds: int) -> str:
    if seconds < HOUR:
        return f"{seconds // MINUTE}m{seconds % MINUTE:02d}s"
    if seconds < DAY:
        return f"{seconds // HOUR}h{seconds // MINUTE % 60:02d}m"
    return f"{seconds // DAY}d{seconds // HOUR % 24:02d}h"


def _scaled(value: float, small: str) -> str:
    """Return the number with the letter of its size, or ``small`` if it needs no letter."""
    text = small
    for unit in UNITS:
        if len(f"{abs(value):.0f}") <= len("999"):
            break
        value /= 1000
        text = f"{_three_digits(value)}{unit}"
    return text


def _three_digits(value: float) -> str:
    """Return three significant digits, and never more than two decimals."""
    if abs(value) < 1:
        return f"{value:.2f}"
    whole = f"{value:.0f}"
    return whole if len(whole) >= len("100") else f"{value:#.3g}".rstrip(".")
