"""PromQL as promql-parser reads it, reduced to what the checks need: selectors, calls, groupings and operators."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from sidestep.errors import ConfigError

try:
    import promql_parser as library
except ModuleNotFoundError:  # it is an extra
    library = None  # type: ignore[assignment]

AGGREGATIONS = frozenset(
    (
        "sum", "avg", "min", "max", "count", "group", "stddev", "stdvar", "topk", "bottomk",
        "quantile", "count_values", "limitk", "limit_ratio",
    )
)  # fmt: skip
EXPERIMENTAL = ("limitk", "limit_ratio", "first_over_time")
"""Functions that Prometheus has with a feature flag only, and of which the library does not know it."""
MAX_OPERATORS = 250
"""Most operators and parentheses of a query: the library's stack overflows with thousands."""
_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`', re.DOTALL)
_OPERATOR = re.compile(r"[-+*/%^=<>(\[]|\b(?:and|or|unless|atan2)\b", re.IGNORECASE)
_MATCH = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}


class PromqlError(ValueError):
    """A text that is no PromQL; the message is one line."""


class Matcher(NamedTuple):
    """A condition on a label; ``__name__`` is the metric's name."""

    label: str
    operator: str
    value: str

    def accepts(self, value: str) -> bool:
        """Return whether a label's value fulfils it; an absent label is empty."""
        if self.operator in ("=", "!="):
            return (value == self.value) == (self.operator == "=")
        try:
            found = re.fullmatch(self.value, value, re.DOTALL) is not None
        except re.error:  # RE2 knows more than Python
            return True
        return found == (self.operator == "=~")


class Selector(NamedTuple):
    """Selected series; the name is a matcher, too."""

    matchers: tuple[Matcher, ...]

    @property
    def name(self) -> str:
        """The metric's name; empty where a pattern or nothing selects it."""
        found = (m.value for m in self.matchers if m[:2] == ("__name__", "="))
        return next(found, "")

    @property
    def text(self) -> str:
        """The selector in PromQL."""
        return (
            f"{{{','.join(f'{m.label}{m.operator}{json.dumps(m.value)}' for m in self.matchers)}}}"
        )


class Call(NamedTuple):
    """A function or an aggregation.

    Attributes:
        grouping: ``by`` or ``without``; empty for none.
        is_experimental: Whether Prometheus has it with a feature flag only.
    """

    function: str
    arguments: tuple[Node, ...]
    grouping: str = ""
    labels: tuple[str, ...] = ()
    is_experimental: bool = False


class Operation(NamedTuple):
    """Two operands; the operator of a comparison with the modifier ``bool`` is ``bool``."""

    operator: str
    operands: tuple[Node, ...]


class Constant(NamedTuple):
    """A number or a text."""

    value: float | str


Node: TypeAlias = Selector | Call | Operation | Constant


def parse(query: str) -> Node:
    """Return the structure of ``query``, which has no variables.

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
        return _node(library.parse(query))
    except ValueError as error:
        raise PromqlError(" ".join(str(error).split())) from None


def nodes(node: Node) -> Iterator[Node]:
    """Yield a query and all of its parts."""
    yield node
    match node:
        case Call(arguments=parts) | Operation(operands=parts):
            for part in parts:
                yield from nodes(part)


def selectors(node: Node) -> Iterator[Selector]:
    """Yield all selectors of a query."""
    return (each for each in nodes(node) if isinstance(each, Selector))


def _node(found: Any) -> Node:
    node: Node
    match found:
        case library.ParenExpr() | library.UnaryExpr() | library.SubqueryExpr():
            node = _node(found.expr)
        case library.MatrixSelector():
            node = _selector(found.vector_selector)
        case library.VectorSelector():
            node = _selector(found)
        case library.Call():
            name, arguments = found.func.name, tuple(map(_node, found.args))
            is_experimental = found.func.experimental or name in EXPERIMENTAL
            node = Call(name, arguments, is_experimental=is_experimental)
        case library.AggregateExpr():
            node = _aggregation(found)
        case library.BinaryExpr():
            node = _operation(found)
        case _:
            node = Constant(found.val)
    return node


def _aggregation(found: Any) -> Call:
    name, by = str(found.op), found.modifier
    arguments = tuple(_node(each) for each in (found.param, found.expr) if each is not None)
    grouping = "" if by is None else str(by.type).rpartition(".")[2].lower()
    labels = () if by is None else tuple(by.labels)
    return Call(name, arguments, grouping, labels, name in EXPERIMENTAL)


def _operation(found: Any) -> Operation:
    operator, modifier = str(found.op), found.modifier
    if modifier is not None:
        fills = modifier.fill_values
        if fills is not None and not (fills.lhs is None and fills.rhs is None):
            raise PromqlError("Prometheus has no fill modifier")
        operator = "bool" if modifier.return_bool else operator
    return Operation(operator, (_node(found.lhs), _node(found.rhs)))


def _selector(found: Any) -> Selector:
    if found.matchers.or_matchers:
        raise PromqlError("Prometheus has no `or` between matchers")
    matchers = [
        Matcher(each.name, _MATCH[str(each.op).rpartition(".")[2]], each.value)
        for each in found.matchers.matchers
    ]
    if found.name:
        matchers.insert(0, Matcher("__name__", "=", found.name))
    return Selector(tuple(matchers))
