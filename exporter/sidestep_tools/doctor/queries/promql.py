"""PromQL as far as the checks need it: selectors, calls, groupings, and which parts may be missing.

Operators other than ``or``, ``and`` and ``unless`` are alike: a query needs both of their sides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

_TOKEN = re.compile(
    r"""
    (?P<blank>\s+|\#[^\n]*)
    |(?P<text>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|`[^`]*`)
    |(?P<number>(?:\d|\.\d)(?:[\w.]|(?<=\d[eE])[+-](?=\d))*)
    |(?P<name>[a-zA-Z_:][\w:]*)
    |(?P<sign>=~|!~|==|!=|>=|<=|[-+*/%^<>=(){}\[\],@])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_OPERATORS = frozenset(("+", "-", "*", "/", "%", "^", "==", "!=", ">", "<", ">=", "<=", "atan2"))
_MATCHING = frozenset(("on", "ignoring", "group_left", "group_right"))
_NUMBERS = frozenset(("inf", "nan"))
AGGREGATIONS = frozenset(
    (
        "sum", "avg", "min", "max", "count", "group", "stddev", "stdvar", "topk", "bottomk",
        "quantile", "count_values", "limitk", "limit_ratio",
    )
)  # fmt: skip
MAX_DEPTH = 100


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
    """

    function: str
    arguments: tuple[Node, ...]
    grouping: str = ""
    labels: tuple[str, ...] = ()


class Operation(NamedTuple):
    """Operands of ``or``, ``and``, ``unless``, of a chain with ``/`` or ``bool``, or of other operators, which are ``all``."""

    operator: str
    operands: tuple[Node, ...]


class Constant(NamedTuple):
    """A number or a text."""

    text: str


Node: TypeAlias = Selector | Call | Operation | Constant


def parse(query: str) -> Node:
    """Return the structure of ``query``, which has no variables.

    Raises:
        PromqlError: It is no PromQL.
    """
    reader = _Reader(list(_tokens(query)))
    node = reader.alternatives()
    reader.expect("end")
    return node


def selectors(node: Node) -> Iterator[Selector]:
    """Yield all selectors of a query."""
    match node:
        case Selector():
            yield node
        case Call(arguments=parts) | Operation(operands=parts):
            for part in parts:
                yield from selectors(part)


class _Token(NamedTuple):
    kind: str
    text: str


def _tokens(query: str) -> Iterator[_Token]:
    at = 0
    while at < len(query):
        found = _TOKEN.match(query, at)
        if found is None:
            raise PromqlError(f"unexpected {query[at : at + 20]!r}")
        kind = str(found.lastgroup)
        if kind != "blank":
            yield _Token(kind, found[0])
        at = found.end()
    yield _Token("end", "the end")


class _Reader:
    """A recursive descent over the tokens."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def alternatives(self) -> Node:
        """Read operands of ``or``."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise PromqlError(f"it is nested more than {MAX_DEPTH} deep")
        operands = [self._conditions()]
        while self._word() == "or":
            self._next()
            self._matching()
            operands.append(self._conditions())
        self._depth -= 1
        return operands[0] if len(operands) == 1 else Operation("or", tuple(operands))

    def expect(self, what: str) -> str:
        """Read a token of this kind or with this text."""
        token = self._next()
        if what not in token:
            raise PromqlError(f"unexpected {token.text!r}")
        return token.text

    def _conditions(self) -> Node:
        left = self._arithmetic()
        while (operator := self._word()) in ("and", "unless"):
            self._next()
            self._matching()
            left = Operation(operator, (left, self._arithmetic()))
        return left

    def _arithmetic(self) -> Node:
        operands, operator = [self._unary()], "all"
        while self._word() in _OPERATORS:
            operator = "/" if self._next().text == "/" else operator
            if self._word() == "bool":
                operator = self._next().text.lower()
            self._matching()
            operands.append(self._unary())
        return operands[0] if len(operands) == 1 else Operation(operator, tuple(operands))

    def _matching(self) -> None:
        while self._word() in _MATCHING:
            word = self._next().text.lower()
            if word in ("on", "ignoring") or self._peek().text == "(":
                self._names()

    def _unary(self) -> Node:
        while self._peek().text in ("+", "-"):
            self._next()
        node = self._operand()
        while True:
            word = self._word()
            if word == "[":
                while self._next().text != "]":
                    if self._peek().kind == "end":
                        raise PromqlError("a window has no ]")
            elif word == "offset":
                self._next()
                if self._peek().text in ("+", "-"):
                    self._next()
                self.expect("number")
            elif word == "@":
                self._next()
                self._unary()
            else:
                return node

    def _operand(self) -> Node:
        kind, text = self._peek()
        if text == "(":
            self._next()
            node = self.alternatives()
            self.expect(")")
            return node
        if text == "{":
            return Selector(self._matchers())
        if kind in ("number", "text") or text.lower() in _NUMBERS:
            return Constant(self._next().text)
        name = self.expect("name")
        if name.lower() in AGGREGATIONS and self._word() in ("by", "without", "("):
            return self._aggregation(name.lower())
        if self._peek().text == "(":
            return Call(name.lower(), self._arguments())
        named = Matcher("__name__", "=", name)
        return Selector((named, *(self._matchers() if self._peek().text == "{" else ())))

    def _aggregation(self, function: str) -> Call:
        grouping = ""
        labels: tuple[str, ...] = ()
        if self._word() in ("by", "without"):
            grouping, labels = self._next().text.lower(), self._names()
        arguments = self._arguments()
        if self._word() in ("by", "without"):
            grouping, labels = self._next().text.lower(), self._names()
        return Call(function, arguments, grouping, labels)

    def _arguments(self) -> tuple[Node, ...]:
        self.expect("(")
        found = []
        while self._peek().text != ")":
            found.append(self.alternatives())
            if self._peek().text != ")":
                self.expect(",")
        self._next()
        return tuple(found)

    def _names(self) -> tuple[str, ...]:
        self.expect("(")
        found = []
        while (token := self._next()).text != ")":
            if token.kind not in ("name", "text") and token.text != ",":
                raise PromqlError(f"unexpected {token.text!r}")
            if token.text != ",":
                found.append(_plain(token))
        return tuple(found)

    def _matchers(self) -> tuple[Matcher, ...]:
        self.expect("{")
        found = []
        while self._peek().text != "}":
            label = self._next()
            if label.kind not in ("name", "text"):
                raise PromqlError(f"unexpected {label.text!r}")
            if label.kind == "text" and self._peek().text in (",", "}"):
                found.append(Matcher("__name__", "=", _plain(label)))
            else:
                operator = self._next().text
                if operator not in ("=", "!=", "=~", "!~"):
                    raise PromqlError(f"unexpected {operator!r}")
                value = self._next()
                if value.kind != "text":
                    raise PromqlError(f"unexpected {value.text!r}")
                found.append(Matcher(_plain(label), operator, _plain(value)))
            if self._peek().text != "}":
                self.expect(",")
        self._next()
        return tuple(found)

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _word(self) -> str:
        """Return the next token as operators and keywords are written; empty for a string."""
        kind, text = self._peek()
        return "" if kind == "text" else text.lower()

    def _next(self) -> _Token:
        token = self._tokens[self._at]
        if token.kind != "end":
            self._at += 1
        return token


def _plain(token: _Token) -> str:
    """Return a name, or what a string stands for."""
    if token.kind != "text":
        return token.text
    inside = token.text[1:-1]
    return inside if token.text[0] == "`" else _ESCAPED.sub(_character, inside)


def _character(escaped: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t", "r": "\r"}.get(escaped[1], escaped[1])
