"""Problems of a query: the reasons why it has no result, or a wrong one."""

from __future__ import annotations

from collections.abc import Iterator

from sidestep_tools.doctor.queries import codes
from sidestep_tools.doctor.queries.files import Query
from sidestep_tools.doctor.queries.promql import (
    AGGREGATIONS,
    Call,
    Node,
    Operation,
    PromqlError,
    Selector,
    parse,
    selectors,
)
from sidestep_tools.doctor.queries.reasons import Problem, Reasons

ALWAYS = frozenset(("absent", "absent_over_time", "vector", "time", "pi"))
"""Functions that have a result whatever is there."""
RATES = ("rate", "irate", "increase")
AVERAGES = ("avg", "avg_over_time")
ADDED_UP = ("sum", "avg", "avg_over_time", "stddev", "stdvar", "quantile")
"""Functions in which buckets are no longer buckets unless they keep ``le``."""
HIT_RATE = "cache_hit_rate"
"""End of the names of gauges that are ratios of counts, where there are counters of both."""
WITH_RESULT = frozenset(
    (
        codes.ALWAYS_CONSTANT, codes.RATE_OF_GAUGE, codes.WRONG_GROUPING, codes.CUMULATIVE,
        codes.MEAN_OF_RATIOS,
    )
)  # fmt: skip
"""Codes of queries that have a result."""
MOST_CHARACTERS = 60
"""Most characters of a query that a text has."""


def problems(query: Query, reasons: Reasons) -> Iterator[Problem]:
    """Yield what is wrong with a query, without repetitions."""
    try:
        node = parse(query.text)
    except PromqlError as error:
        if not query.is_guessed:
            yield Problem(codes.NOT_PROMQL, short(query.text), str(error))
        return
    ignored = (codes.WRONG_VALUE,) if query.may_be_empty else ()
    found = [each for each in _failures(node, reasons) if each.code not in ignored]
    if not found:
        hidden = _failures(node, reasons, with_constants=False)
        found = [
            each._replace(code=codes.ALWAYS_CONSTANT) for each in hidden if each.code not in ignored
        ]
    yield from dict.fromkeys((*found, *_mistakes(node, reasons)))


def _failures(node: Node, reasons: Reasons, *, with_constants: bool = True) -> list[Problem]:
    """Return why a part of a query has no result; empty: it may have one.

    ``with_constants`` says whether an operand of ``or`` without a selector counts as a result.
    """
    found: list[Problem] = []
    match node:
        case Selector():
            found += filter(None, [reasons.of(node)])
        case Operation(operator, operands):
            if operator == "or" and not with_constants:
                operands = tuple(one for one in operands if any(selectors(one)))
            below = [_failures(one, reasons, with_constants=with_constants) for one in operands]
            if operator == "unless":
                below = below[:1]
            if operator != "or" or all(below):
                found += (each for some in below for each in some)
        case Call(function, arguments) if function not in ALWAYS:
            for one in arguments:
                found += _failures(one, reasons, with_constants=with_constants)
            if function == "histogram_quantile" and len(arguments) > 1:
                found += _without_buckets(arguments[1])
    return found


def _without_buckets(node: Node) -> Iterator[Problem]:
    """Yield why an argument of ``histogram_quantile`` has no buckets."""
    if isinstance(node, Operation) and node.operator == "or":
        found = [list(_without_buckets(one)) for one in node.operands]
        if all(found):
            yield from found[0]
        return
    names = [each.name for each in selectors(node)]
    buckets = [name for name in names if name.endswith("_bucket")]
    if buckets and _removes_le(node):
        yield Problem(codes.NO_BUCKETS, buckets[0], "an aggregation removes its label le")
    if names and all(name.endswith(("_sum", "_count", "_total")) for name in names):
        yield Problem(codes.NO_BUCKETS, names[0], "it has no buckets")


def _loses_le(node: Call) -> bool:
    """Return whether an aggregation adds up series of different ``le``."""
    if node.function == "avg_over_time":
        return True
    return (node.grouping == "by") != ("le" in node.labels) if node.grouping else True


def _removes_le(node: Node) -> bool:
    match node:
        case Call(function, arguments):
            if function in AGGREGATIONS and function not in ("topk", "bottomk"):
                return _loses_le(node) or any(map(_removes_le, arguments))
            return function not in ALWAYS and any(map(_removes_le, arguments))
        case Operation(operands=operands):
            return any(map(_removes_le, operands))
    return False


def _mistakes(node: Node, reasons: Reasons) -> Iterator[Problem]:
    """Yield what is wrong with parts that have a result."""
    if isinstance(node, Call):
        yield from _wrong_function(node, reasons)
        yield from _wrong_grouping(node, reasons)
    # A quantile without buckets has its own reason.
    if isinstance(node, Operation) or (
        isinstance(node, Call) and node.function != "histogram_quantile"
    ):
        for part in node.operands if isinstance(node, Operation) else node.arguments:
            yield from _mistakes(part, reasons)


def _wrong_function(node: Call, reasons: Reasons) -> Iterator[Problem]:
    match node:
        case Call(function, (Selector() as selector,)) if function in RATES:
            if reasons.kind_of(selector.name) == "gauge":
                yield Problem(codes.RATE_OF_GAUGE, selector.name, f"{function}() of a gauge")
        case Call(function, (*_, argument)) if function in ADDED_UP:
            if function in AVERAGES and (ratio := _ratio(argument)):
                yield Problem(codes.MEAN_OF_RATIOS, ratio, f"{function}() of ratios")
            for name in dict.fromkeys(_buckets(argument) if _loses_le(node) else ()):
                yield Problem(codes.CUMULATIVE, name, f"{function}() of buckets, not by le")


def _wrong_grouping(node: Call, reasons: Reasons) -> Iterator[Problem]:
    if node.grouping != "by" or _is_joined(node):
        return
    names = {each.name for part in node.arguments for each in selectors(part)}
    if not names:
        return
    wrong = [one for one in node.labels if all(reasons.lacks(name, one) for name in names)]
    # A missing target label matters only if no other label distinguishes the series.
    if not wrong and all(reasons.lacks_here(name, one) for name in names for one in node.labels):
        wrong = [*node.labels]
    for label in wrong:
        text = f"grouped by {label}, which it never has"
        yield Problem(codes.WRONG_GROUPING, ", ".join(sorted(names)), text)


def _ratio(node: Node) -> str:
    """Return a series whose ratio to another, or whose quantile, is a query's value; empty: none is."""
    below: tuple[Node, ...] = ()
    match node:
        case Selector():
            return node.name if node.name.endswith(HIT_RATE) else ""
        case Call("histogram_quantile"):
            return next((each.name for each in selectors(node)), "")
        case Operation("/", operands) if all(map(_is_rate, operands)):
            return next(selectors(node)).name
        case Operation(operator, operands) if operator != "bool":
            below = operands[:1] if operator in ("and", "unless") else operands
        case Call(function, arguments) if function not in ("sum", "count", "group"):
            below = arguments
    return next(filter(None, map(_ratio, below)), "")


def _is_rate(node: Node) -> bool:
    match node:
        case Call(function, arguments):
            return function in RATES or any(map(_is_rate, arguments))
        case Operation(operands=operands):
            return any(map(_is_rate, operands))
    return False


def _buckets(node: Node) -> Iterator[str]:
    """Yield the names of buckets of any ``le`` whose values are a query's."""
    below: tuple[Node, ...] = ()
    match node:
        case Selector(matchers):
            if node.name.endswith("_bucket") and not any(
                each.label == "le" and each.operator in ("=", "=~") for each in matchers
            ):
                yield node.name
        case Operation(operator, operands):
            below = operands[:1] if operator in ("and", "unless") else operands
        case Call(function, arguments) if not function.startswith(("histogram", "count", "absent")):
            # An aggregation that loses the label has its own finding.
            below = () if function in ADDED_UP and _loses_le(node) else arguments
    for each in below:
        yield from _buckets(each)


def _is_joined(node: Node) -> bool:
    """Return whether labels may come from elsewhere than from the selected series."""
    match node:
        case Call(function, arguments):
            made = function.startswith("label_") or function in ("count_values", "info")
            return made or any(map(_is_joined, arguments))
        case Operation():
            return True
    return False


def short(text: str) -> str:
    """Return the beginning of a query, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
