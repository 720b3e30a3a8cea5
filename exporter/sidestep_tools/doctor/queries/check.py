"""Check of the queries of dashboards and rule files: by the catalogue, pages of metrics, and a Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

import aiohttp

from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor import engine_page
from sidestep_tools.doctor.prometheus_api import Api, RefusedError
from sidestep_tools.doctor.queries import codes, rule_files
from sidestep_tools.doctor.queries.files import FileError, Query, queries_of, read
from sidestep_tools.doctor.queries.inventory import Inventory
from sidestep_tools.doctor.queries.known_metrics import PREFIXES
from sidestep_tools.doctor.queries.live import LiveQueries
from sidestep_tools.doctor.queries.problems import problems
from sidestep_tools.doctor.queries.reasons import Problem, Reasons
from sidestep_tools.web_client.fetch import FetchError

ENGINES = re.compile("|".join({*PREFIXES, "nv_inference_"} - {"sidestep_"}))
"""Matches a name of an engine's metric."""
Checked = list[tuple[Query, list[Problem]]]
"""Queries with what is wrong with each."""


async def check(
    session: aiohttp.ClientSession,
    files: Sequence[str],
    scalers: Mapping[str, Sequence[Query]],
    pages: Sequence[str],
    prometheus: Sequence[str],
) -> AsyncIterator[Finding]:
    """Yield what is wrong with the queries of all files and of autoscalers, which are by their names.

    They are compared with the pages (addresses or files) and run on the Prometheus servers; without
    either they are compared with the catalogue.

    Raises:
        ConfigError: A server's address cannot be used.
    """
    inventory = Inventory()
    for page in pages:
        if unreadable := await _add(session, page, inventory):
            yield unreadable
    found, are_rules = dict(scalers), set[str]()
    for file in files:
        try:
            documents = await asyncio.to_thread(read, file)
            rules = [*rule_files.rules_in(documents)]
            for text in (each for one in rules for each in rule_files.mistakes(one)):
                yield codes.REFUSED_RULES.on(file, text)
            are_rules |= {file} if rules else set()
            found[file] = queries_of(documents)
        except FileError as error:
            yield codes.UNREADABLE.on(file, str(error))
    checked = [each async for each in _run(session, found, prometheus)] if found else []
    if inventory.names or not checked:
        recorded = {each.record for queries in found.values() for each in queries} - {""}
        reasons = Reasons(inventory if inventory.names else None, frozenset(recorded))
        checked += (
            (file, [(one, list(problems(one, reasons))) for one in queries])
            for file, queries in found.items()
        )
    for file, some in checked:
        for finding in _findings(file, some):
            # Of rules it is an error that has been named.
            if finding.code != codes.NOT_PROMQL.code or file not in are_rules:
                yield finding


async def _add(session: aiohttp.ClientSession, page: str, inventory: Inventory) -> Finding | None:
    """Add a page's series, or return why it cannot be read."""
    text = await engine_page.read(session, page)
    if isinstance(text, Finding):
        return text
    try:
        inventory.add_page(text)
    except ValueError as error:
        return engine_page.NOT_A_PAGE.on(page, str(error)[:100])
    return None


async def _run(
    session: aiohttp.ClientSession, found: Mapping[str, Sequence[Query]], prometheus: Sequence[str]
) -> AsyncIterator[tuple[str, Checked]]:
    """Yield the files' queries with what is wrong on the Prometheus servers that answer."""
    for url in prometheus:
        # The check of the server itself reports why it does not answer.
        with contextlib.suppress(FetchError, RefusedError):
            live = await LiveQueries.of(Api(session, url))
            for file, queries in found.items():
                yield file, [(query, await live.problems(query)) for query in queries]


def _is_of_engines(query: Query) -> bool:
    """Return whether a query shows that its file is for the engines that are there."""
    is_alert_of_all = query.is_alert and "sidestep_engine_" in query.text
    return is_alert_of_all or ENGINES.search(query.text) is not None


def _findings(file: str, checked: Checked) -> Iterator[Finding]:
    """Yield a finding for each kind of problem, with all metrics and panels that have it."""
    is_for_several = any(not found and _is_of_engines(query) for query, found in checked)
    names: dict[tuple[Code, str], dict[str, None]] = {}
    places: dict[tuple[Code, str], dict[str, None]] = {}
    for query, found in checked:
        for code, name, text, instead in found:
            if code is codes.OTHER_ENGINE and is_for_several:
                continue
            shown = f"{name} -> {instead}" if instead else name
            names.setdefault((code, text), {})[shown] = None
            places.setdefault((code, text), {})[query.place] = None
    for (code, text), which in names.items():
        where = ", ".join(filter(None, places[code, text]))
        yield code.on(file, f"{', '.join(which)}: {text}{f' ({where})' if where else ''}")
