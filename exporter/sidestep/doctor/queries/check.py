"""Check of the queries of dashboards and rule files against the catalogue and pages of metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path

import aiohttp

from sidestep.diagnosis.finding import Code, Finding
from sidestep.doctor.queries import codes
from sidestep.doctor.queries.files import FileError, Query, read_queries
from sidestep.doctor.queries.inventory import Inventory
from sidestep.doctor.queries.promql import (
    AGGREGATIONS,
    Call,
    Node,
    Operation,
    PromqlError,
    Selector,
    parse,
    selectors,
)
from sidestep.doctor.queries.reasons import Problem, Reasons
from sidestep.web_client.fetch import FetchError, fetch, refusal

ALWAYS = frozenset(("absent", "absent_over_time", "vector", "time", "pi"))
"""Functions that have a result whatever is there."""
RATES = ("rate", "irate", "increase")
MOST_CHARACTERS = 60
"""Most characters of a query that a text has."""


async def check(
    session: aiohttp.ClientSession,
    files: Sequence[str],
    pages: Sequence[str],
) -> AsyncIterator[Finding]:
    """Yield what is wrong with the queries of all files.

    They are compared with the catalogue, and with what is on the pages: addresses or files.
    """
    inventory = Inventory() if pages else None
    for page in pages:
        try:
            assert inventory is not None
            inventory.add_page(await _read_page(session, page))
        except (FetchError, OSError, ValueError) as error:
            yield codes.NO_PAGE.on(page, getattr(error, "strerror", None) or str(error))
    found = {}
    for file in files:
        try:
            found[file] = read_queries(file)
        except FileError as error:
            yield codes.UNREADABLE.on(file, str(error))
    recorded = {each.record for queries in found.values() for each in queries} - {""}
    reasons = Reasons(inventory, frozenset(recorded))
    for file, queries in found.items():
        for finding in _findings(file, queries, reasons):
            yield finding


async def _read_page(session: aiohttp.ClientSession, page: str) -> str:
    if "://" not in page:
        return await asyncio.to_thread(Path(page).read_text, "utf-8")
    answer = await fetch(session, page)
    if answer.status != HTTPStatus.OK:
        raise FetchError(refusal(answer.status))
    return answer.text


def _findings(file: str, queries: Sequence[Query], reasons: Reasons) -> Iterator[Finding]:
    """Yield a finding for each kind of problem, with all metrics and panels that have it."""
    names: dict[tuple[Code, str], dict[str, None]] = {}
    places: dict[tuple[Code, str], dict[str, None]] = {}
    for query in queries:
        for code, name, text, instead in problems(query, reasons):
            shown = f"{name} -> {instead}" if instead else name
            names.setdefault((code, text), {})[shown] = None
            places.setdefault((code, text), {})[query.place] = None
    for (code, text), found in names.items():
        where = ", ".join(filter(None, places[code, text]))
        yield code.on(file, f"{', '.join(found)}: {text}{f' ({where})' if where else ''}")


def problems(query: Query, reasons: Reasons) -> Iterator[Problem]:
    """Yield what is wrong with a query, without repetitions."""
    try:
        node = parse(query.text)
    except PromqlError as error:
        if not query.is_guessed:
            yield Problem(codes.NOT_PROMQL, _short(query.text), str(error))
        return
    found = _failures(node, reasons)
    if not found and (hidden := _failures(node, reasons, with_constants=False)):
        found = [each._replace(code=codes.ALWAYS_CONSTANT) for each in hidden]
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


def _removes_le(node: Node) -> bool:
    match node:
        case Call(function, arguments, grouping, labels):
            if function in AGGREGATIONS and function not in ("topk", "bottomk"):
                keeps = (grouping == "by") == ("le" in labels) if grouping else False
                return not keeps or any(map(_removes_le, arguments))
            return function not in ALWAYS and any(map(_removes_le, arguments))
        case Operation(operands=operands):
            return any(map(_removes_le, operands))
    return False


def _mistakes(node: Node, reasons: Reasons) -> Iterator[Problem]:
    """Yield what is wrong with parts that have a result."""
    match node:
        case Call(function, (Selector() as selector,)) if function in RATES:
            if reasons.kind_of(selector.name) == "gauge":
                yield Problem(codes.RATE_OF_GAUGE, selector.name, f"{function}() of a gauge")
        case Call(_, arguments, "by", labels) if not _is_joined(node):
            names = {each.name for part in arguments for each in selectors(part)}
            for label in labels:
                if names and all(reasons.lacks(name, label) for name in names):
                    text = f"grouped by {label}, which it never has"
                    yield Problem(codes.WRONG_GROUPING, ", ".join(sorted(names)), text)
    match node:
        case Call(arguments=parts) | Operation(operands=parts):
            for part in parts:
                yield from _mistakes(part, reasons)


def _is_joined(node: Node) -> bool:
    """Return whether labels may come from elsewhere than from the selected series."""
    match node:
        case Call(function, arguments):
            made = function.startswith("label_") or function in ("count_values", "info")
            return made or any(map(_is_joined, arguments))
        case Operation():
            return True
    return False


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
