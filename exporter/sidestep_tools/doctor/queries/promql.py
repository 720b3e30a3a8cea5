"""PromQL as promql-parser reads it: its parts, and the series that they select."""

from __future__ import annotations

import re
from typing import Any

from sidestep.errors import ConfigError

try:
    import promql_parser as library
except ModuleNotFoundError:  # it is an extra
    library = None  # type: ignore[assignment]

EXPERIMENTAL = ("limitk", "limit_ratio", "first_over_time")
"""Functions that need a feature flag of Prometheus, which the library does not say."""
MAX_OPERATORS = 250
"""Most operators and parentheses of a query: the library's stack overflows with thousands."""
_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`', re.DOTALL)
_OPERATOR = re.compile(r"[-+*/%^=<>(\[]|\b(?:and|or|unless|atan2)\b", re.IGNORECASE)


class PromqlError(ValueError):
    """A text that is no PromQL; the message is one line."""


def accepts(matcher: library.Matcher, value: str) -> bool:
    """Return whether a label's value fulfils a condition; an absent label is empty."""
    op = library.MatchOp
    is_positive = matcher.op in (op.Equal, op.Re)
    if matcher.op in (op.Equal, op.NotEqual):
        return (value == matcher.value) == is_positive
    try:
        found = re.fullmatch(matcher.value, value, re.DOTALL) is not None
    except re.error:  # RE2 knows more than Python
        return True
    return found == is_positive


def conditions(selector: library.VectorSelector, *, on_name: bool = False) -> list[Any]:
    """Return a selector's conditions on labels, or those on the metric's name."""
    return [e for e in selector.matchers.matchers if (e.name == "__name__") == on_name]


def name_of(selector: library.VectorSelector) -> str:
    """Return the name of the selected metric; empty where a pattern or nothing selects it."""
    named = conditions(selector, on_name=True)
    equal = (each.value for each in named if each.op == library.MatchOp.Equal)
    return selector.name or next(equal, "")


def parse(query: str) -> Any:
    """Return the library's tree of ``query``, which has no variables.

    Raises:
        PromqlError: Prometheus 3 refuses the query, whatever is stored.
        ConfigError: The library is not installed.
    """
    if library is None:
        raise ConfigError(
            "queries need promql-parser, which is not here: pip install '.[doctor]' in a clone of"
            " sidestep's repository"
        )
    if len(_OPERATOR.findall(_STRING.sub("", query))) > MAX_OPERATORS:
        raise PromqlError(f"it has more than {MAX_OPERATORS} operators and parentheses")
    try:
        found = library.parse(query)
    except ValueError as error:
        raise PromqlError(" ".join(str(error).split())) from None
    for node in nodes(found):
        modifier = node.modifier if isinstance(node, library.BinaryExpr) else None
        fills = modifier and modifier.fill_values
        if fills and not (fills.lhs is None and fills.rhs is None):
            raise PromqlError("Prometheus has no fill modifier")
    if any(each.matchers.or_matchers for each in selectors(found)):
        raise PromqlError("Prometheus has no `or` between matchers")
    return found


def nodes(tree: Any) -> list[Any]:
    """Return a query and all of its parts."""
    found: list[Any] = []
    library.walk(tree, found.append)
    return found


def selectors(tree: Any) -> list[library.VectorSelector]:
    """Return all selectors of a query."""
    return [each for each in nodes(tree) if isinstance(each, library.VectorSelector)]


def operands(node: Any) -> tuple[str, list[Any]]:
    """Return the function or operator of a part, empty for neither, and what it is applied to."""
    match node:
        case library.Call():
            return node.func.name, node.args
        case library.AggregateExpr():
            return str(node.op), [each for each in (node.param, node.expr) if each is not None]
        case library.BinaryExpr():
            return str(node.op), [node.lhs, node.rhs]
        case library.ParenExpr() | library.UnaryExpr() | library.SubqueryExpr():
            return "", [node.expr]
    return "", []


def removes(tree: Any, label: str) -> bool:
    """Return whether an aggregation in a query removes a label."""
    for node in nodes(tree):
        if isinstance(node, library.AggregateExpr) and str(node.op) not in ("topk", "bottomk"):
            by = node.modifier
            if by is None or (by.type == library.AggModifierType.By) != (label in by.labels):
                return True
    return False


def experimental_functions(tree: Any) -> set[str]:
    """Return the functions of a query that Prometheus has with a feature flag only."""
    calls = [each for each in nodes(tree) if isinstance(each, library.Call)]
    flagged = {each.func.name for each in calls if each.func.experimental}
    return flagged | {operands(each)[0] for each in nodes(tree)}.intersection(EXPERIMENTAL)
