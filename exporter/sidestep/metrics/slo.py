"""What ``--slo`` says: what is counted as good, of which families."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sidestep.catalog.model import Same
from sidestep.config import key_values as options
from sidestep.engines.dialects import COMMON, rows_of
from sidestep.engines.slo_rows import AVAILABILITY, FAMILIES, RESULTS

FORM = "NAME=THRESHOLD[,family=FAMILY]"
ENGINES = ("vllm", "sglang")
"""Dialects whose requests have latencies."""
MAX_OBJECTIVES = 16
LONGEST = 86_400.0
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|)")
_UNITS = {"ms": (1, 1000), "s": (1, 1), "": (1, 1), "m": (60, 1)}
"""What a number is multiplied with and divided by: 350 thousandths are the very float that 0.35 is."""
_FAMILY = "family"
_THRESHOLD = "threshold"
_MUST = f"must be a time above 0 and of a day at most, such as 350ms, 0.35 or 2s, as {FORM}"


@dataclasses.dataclass(frozen=True, slots=True)
class Objective:
    """One of them.

    Attributes:
        families: Histograms that it is about; none: how requests end.
        threshold: Seconds that a good observation takes at most.
    """

    name: str
    families: tuple[str, ...] = ()
    threshold: float = 0.0


class Limit(NamedTuple):
    """What an objective allows of a family."""

    objective: str
    threshold: float


class Objectives:
    """Those of one exporter, by family.

    Attributes:
        names: All of them.
        availability: Whether the ends of requests are judged.
    """

    def __init__(self, found: Iterable[Objective] = ()) -> None:
        found = tuple(found)
        self.names = frozenset(one.name for one in found)
        self.availability = any(not one.families for one in found)
        self._limits: dict[str, list[Limit]] = {}
        for one in found:
            for family in dict.fromkeys(one.families):
                self._limits.setdefault(family, []).append(Limit(one.name, one.threshold))

    def has(self, key: tuple[str, ...]) -> bool:
        """Whether a child is of one of them: its result, where it has one, and an objective."""
        *results, name = key
        return name in self.names and all(result in RESULTS for result in results)

    def limits(self, family: str) -> Sequence[Limit]:
        """What is allowed of ``family``."""
        return self._limits.get(family, ())


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


def checked(found: Iterable[Objective], *, common: bool = False) -> tuple[Objective, ...]:
    """``found``, where all of them can be counted.

    Args:
        found: What all ``--slo`` say.
        common: Whether names are shown that are the same for all engines.

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
    for one in objectives:
        for family in one.families:
            if problem := _problem(family, common=common):
                raise ValueError(f"{one.name}: {problem}")
    return objectives


def _problem(family: str, *, common: bool) -> str:
    """Why ``family`` has no latencies of its own here, and what to do; empty where it has."""
    rows = {row.name: row for name in ENGINES for row in rows_of(name, legacy=True, common=True)}
    row = rows.get(family)
    if row is None or row.kind != "histogram" or not family.endswith("_seconds"):
        return (
            f"{family!r} is no histogram of seconds of vLLM or SGLang; docs/metrics.md has those, and"
            f" {', '.join(FAMILIES)} stand for the same one of both"
        )
    if isinstance(row.source, Same):
        return f"{family} is an old name of {row.source.name}; give that instead"
    if not common and any(row in COMMON[name] for name in ENGINES):
        return f"{family} is there with --metrics.common only; give that, too"
    return ""
