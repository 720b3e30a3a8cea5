"""Conditions on records, as ``--requests.log.if`` has them: ``ttft > 2s or reason = abort``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

from sidestep.requests.record import RequestRecord

SECONDS = {
    "e2e": "e2e_seconds",
    "queue": "queue_seconds",
    "prefill": "prefill_seconds",
    "decode": "decode_seconds",
    "preempted": "preempted_seconds",
    "ttft": "ttft_seconds",
    "mean_itl": "mean_itl_seconds",
    "max_itl": "max_itl_seconds",
}
NUMBERS = ("priority", "preemptions", "prompt_tokens", "cached_tokens", "output_tokens")
TEXTS = ("engine", "model", "adapter", "tenant", "reason", "id")
FORM = "TERM [and|or TERM]..., where TERM is a name, one of = != < <= > >=, and a value"
_TERM = re.compile(r"\s*([a-z0-9_]+)\s*(<=|>=|!=|<|>|=)\s*([^\s<>=]+)\s*")
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|m|)")
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


Condition = Callable[[RequestRecord], bool]
"""Returns whether a condition holds for a record; a comparison does not hold for an unknown value."""


def parse(text: str) -> Condition:
    """Return the condition in ``text``; ``and`` binds closer than ``or``.

    Raises:
        ValueError: The text is no condition; it ends a line about the flag.
    """
    alternatives = re.split(r"\s+or\s+", text.strip())
    any_of = [[_term(term) for term in re.split(r"\s+and\s+", one)] for one in alternatives]
    return lambda record: any(all(holds(record) for holds in terms) for terms in any_of)


def _term(text: str) -> Condition:
    found = _TERM.fullmatch(text)
    if found is None:
        raise ValueError(f"must be {FORM}, not {text.strip()!r}")
    name, sign, value = found.groups()
    if name in TEXTS:
        if sign not in ("=", "!="):
            raise ValueError(f"{name} is a text: compare it by = or !=")
        return _comparison(name, sign, value)
    if name in SECONDS:
        time = _TIME.fullmatch(value)
        if time is None:
            raise ValueError(f"{name} is a time: compare it with 2s, 350ms or 1m, not {value!r}")
        return _comparison(SECONDS[name], sign, float(time[1]) * _UNITS[time[2]])
    if name not in NUMBERS:
        known = ", ".join((*SECONDS, *NUMBERS, *TEXTS))
        raise ValueError(f"{name!r} is no field; known are {known}")
    try:
        return _comparison(name, sign, float(value))
    except ValueError:
        raise ValueError(f"{name} is a number, not {value!r}") from None


def _comparison(field: str, sign: str, value: str | float) -> Condition:
    compare = _COMPARE[sign]

    def holds(record: RequestRecord) -> bool:
        found = getattr(record, field)
        return found is not None and compare(found, value)

    return holds
