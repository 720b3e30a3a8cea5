"""``--slo``: what one objective says, and what all of them say together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from sidestep.catalog.slo import AVAILABILITY, FAMILIES, Objective
from sidestep.config import key_values as options

FORM = "NAME=THRESHOLD[,family=FAMILY]"
MAX_OBJECTIVES = 16
LONGEST = 86_400.0
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|)")
_UNITS = {"ms": (1, 1000), "s": (1, 1), "": (1, 1), "m": (60, 1)}
"""What a number is multiplied with and divided by: 350 thousandths are the very float that 0.35 is."""
_FAMILY = "family"
_THRESHOLD = "threshold"
_MUST = f"must be a time above 0 and of a day at most, such as 350ms, 0.35 or 2s, as {FORM}"


def parse(value: object) -> Objective:
    """The objective of one ``--slo``, or of one key of the file's table: its name and its value.

    Raises:
        ValueError: Completes an error line.
    """
    if isinstance(value, tuple):
        return _of_table(*value)
    if not isinstance(value, str):
        raise ValueError(f"must be {FORM}, or {AVAILABILITY}")  # noqa: TRY004 - read() turns it into one line
    first, *rest = (part.strip() for part in value.split(","))
    if first == AVAILABILITY and not rest:
        return Objective(AVAILABILITY)
    name, _, threshold = first.partition("=")
    return _made(name, threshold, options.read(rest, (_FAMILY,), {}).get(_FAMILY, ""))


def shown(value: object) -> str:
    """``value`` as an error line has it."""
    return "=".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _of_table(name: str, value: object) -> Objective:
    if name == AVAILABILITY:
        if value is not True:
            raise ValueError("must be true; without it leave the line away")
        return Objective(AVAILABILITY)
    if not isinstance(value, dict):
        return _made(name, value, "")
    if unknown := sorted(value.keys() - {_FAMILY, _THRESHOLD}):
        raise ValueError(f"{unknown[0]!r} is no key; known are {_FAMILY} and {_THRESHOLD}")
    return _made(name, value.get(_THRESHOLD, ""), value.get(_FAMILY, ""))


def _made(name: str, threshold: object, family: object) -> Objective:
    if not _NAME.fullmatch(name):
        raise ValueError(
            "must have a name of small letters, digits and _, that begins with a letter"
        )
    if name == AVAILABILITY:
        raise ValueError(f"{AVAILABILITY} is how requests end: it has no threshold and no family")
    if not isinstance(family, str):
        raise ValueError("family must be a string")  # noqa: TRY004
    if name in FAMILIES and family:
        raise ValueError(f"{name} has families of its own; give yours another name")
    if name not in FAMILIES and not family:
        known = ", ".join((*FAMILIES, AVAILABILITY))
        raise ValueError(f"{name!r} is none of {known}; add family= to name one of your own")
    families = FAMILIES.get(family or name) or (family,)
    return Objective(name, families, _seconds(threshold))


def _seconds(value: object) -> float:
    found = 0.0
    if isinstance(value, int | float) and not isinstance(value, bool):
        # A file's integers may be larger than any float.
        found = float(value) if value <= LONGEST else math.inf
    elif isinstance(value, str) and (match := _TIME.fullmatch(value)):
        times, parts = _UNITS[match[2]]
        found = float(match[1]) * times / parts
    if not 0.0 < found <= LONGEST:
        raise ValueError(_MUST)
    return found


def checked(found: Iterable[Objective]) -> tuple[Objective, ...]:
    """Return the objectives of all ``--slo``, each of another name.

    Raises:
        ValueError: Completes an error line.
    """
    objectives = tuple(found)
    names = [one.name for one in objectives]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is given twice; give each objective once")
    if len(names) > MAX_OBJECTIVES:
        raise ValueError(f"there are {len(names)}; give {MAX_OBJECTIVES} at most")
    return objectives
