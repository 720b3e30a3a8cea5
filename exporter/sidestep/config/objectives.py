"""Parser of ``--slo``: service level objectives."""

from __future__ import annotations

import math
import re
from operator import attrgetter

from sidestep.catalog.slo import AVAILABILITY, LATENCIES, Objective
from sidestep.config import options

FORM = "NAME=THRESHOLD[,family=FAMILY]"
MAX_OBJECTIVES = 16
LONGEST = 86_400.0
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|)")
_UNITS = {"ms": (1, 1000), "s": (1, 1), "": (1, 1), "m": (60, 1)}
"""Factor and divisor of a unit. A divisor is exact: 350 divided by 1,000 is the float 0.35."""
_FAMILY = "family"
_THRESHOLD = "threshold"
_THRESHOLD_ERROR = (
    f"must be a time above 0 and of a day at most, such as 350ms, 0.35 or 2s, as {FORM}"
)


def parse(value: object) -> Objective:
    """Return the objective of one ``--slo``, or of a key and its value in the file's table."""
    if isinstance(value, tuple):
        return _from_table(*value)
    if not isinstance(value, str):
        raise ValueError(f"must be {FORM}, or {AVAILABILITY}")  # noqa: TRY004 - read() turns it into one line
    first, *rest = (part.strip() for part in value.split(","))
    if first == AVAILABILITY and not rest:
        return Objective(AVAILABILITY)
    name, _, threshold = first.partition("=")
    return _checked(name, threshold, options.parse(rest, (_FAMILY,), {}).get(_FAMILY, ""))


def shown(value: object) -> str:
    """Format ``value`` for an error line."""
    return "=".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _from_table(name: str, value: object) -> Objective:
    if name == AVAILABILITY:
        if value is not True:
            raise ValueError("must be true; without it leave the line away")
        return Objective(AVAILABILITY)
    if not isinstance(value, dict):
        return _checked(name, value, "")
    if unknown := sorted(value.keys() - {_FAMILY, _THRESHOLD}):
        raise ValueError(f"{unknown[0]!r} is no key; known are {_FAMILY} and {_THRESHOLD}")
    return _checked(name, value.get(_THRESHOLD, ""), value.get(_FAMILY, ""))


def _checked(name: str, threshold: object, family: object) -> Objective:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "must have a name of small letters, digits and _, that begins with a letter"
        )
    if name == AVAILABILITY:
        raise ValueError(f"{AVAILABILITY} is how requests end: it has no threshold and no family")
    if not isinstance(family, str):
        raise ValueError("family must be a string")  # noqa: TRY004
    if name in LATENCIES and family:
        raise ValueError(f"{name} has families of its own; give yours another name")
    if name not in LATENCIES and not family:
        known = ", ".join((*LATENCIES, AVAILABILITY))
        raise ValueError(f"{name!r} is none of {known}; add family= to name one of your own")
    return Objective(name, (family or name,), _seconds(threshold))


def _seconds(value: object) -> float:
    found = 0.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        # A file's integers may be larger than any float.
        found = float(value) if value <= LONGEST else math.inf
    elif isinstance(value, str) and (match := _TIME.fullmatch(value)):
        times, parts = _UNITS[match[2]]
        found = float(match[1]) * times / parts
    if not 0.0 < found <= LONGEST:
        raise ValueError(_THRESHOLD_ERROR)
    return found


collect = options.collector(attrgetter("name"), MAX_OBJECTIVES, "; give each objective once")
