"""Problems of a query: the reasons why it has no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sidestep_tools.doctor.queries import codes, promql
from sidestep_tools.doctor.queries.files import Query
from sidestep_tools.doctor.queries.promql import PromqlError, operands, selectors
from sidestep_tools.doctor.queries.reasons import Problem

Reason = Callable[[Any], Problem | None]
"""Function that returns why a selector has no series, or None if it may have some."""

ALWAYS = frozenset(("absent", "absent_over_time", "vector", "time", "pi"))
"""Functions that have a result whatever is there."""
MOST_CHARACTERS = 60
"""Most characters of a query that a text has."""


def problems(query: Query, reason: Reason) -> Iterator[Problem]:
    """Yield what is wrong with a query, without repetitions."""
    try:
        tree = promql.parse(query.text)
    except PromqlError as error:
        if not query.is_guessed:
            yield Problem(codes.NOT_PROMQL, short(query.text), str(error))
        return
    ignored = codes.WRONG_VALUE if query.may_be_empty else None
    found = [each for each in _failures(tree, reason) if each.code is not ignored]
    # A fallback matters only to a query that has a result.
    without = [each for each in found if each.code is not codes.ALWAYS_CONSTANT]
    yield from dict.fromkeys(without or found)


def _failures(node: Any, reason: Reason) -> list[Problem]:
    """Return why a part of a query has no result; empty: it may have one."""
    name, parts = operands(node)
    if not parts:
        return [problem for each in selectors(node) if (problem := reason(each))]
    if name in ALWAYS:
        parts = []
    if name == "unless":
        parts = parts[:1]
    selecting = [each for each in parts if selectors(each)]
    below = [_failures(each, reason) for each in selecting]
    if name == "or" and not all(below):
        return []
    found = [each for some in below for each in some]
    if name == "or" and len(selecting) < len(parts):
        found = [each._replace(code=codes.ALWAYS_CONSTANT) for each in found]
    if name == "histogram_quantile":
        found += _without_buckets(parts[1])
    return found


def _without_buckets(node: Any) -> list[Problem]:
    name, parts = operands(node)
    if name == "or":
        found = [_without_buckets(each) for each in parts]
        return found[0] if all(found) else []
    names = [promql.name_of(each) for each in selectors(node)]
    buckets = [each for each in names if each.endswith("_bucket")]
    if buckets and promql.removes(node, "le"):
        return [Problem(codes.NO_BUCKETS, buckets[0], "an aggregation removes its label le")]
    if names and all(each.endswith(("_sum", "_count", "_total")) for each in names):
        return [Problem(codes.NO_BUCKETS, names[0], "it has no buckets")]
    return []


def short(text: str) -> str:
    """Return the beginning of a query, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
