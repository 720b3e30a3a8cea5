"""Check of the queries of dashboards and rule files: by the catalogue, and by pages of metrics."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

from sidestep.catalog.page_reader import PageSample
from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.engine_page import Page
from sidestep_tools.doctor.queries import codes, rule_files
from sidestep_tools.doctor.queries.files import FileError, Query, queries_of, read
from sidestep_tools.doctor.queries.known_metrics import PREFIXES
from sidestep_tools.doctor.queries.problems import problems
from sidestep_tools.doctor.queries.reasons import Problem, reason

ENGINES = re.compile("|".join(PREFIXES.keys() - {"sidestep_"}))
"""Matches a name of an engine's metric."""


def check(files: Sequence[str], pages: Sequence[Page]) -> Iterator[Finding]:
    """Yield what is wrong with the queries of all files, by the pages or, without any, the catalogue."""
    found, are_rules = dict[str, list[Query]](), set[str]()
    for file in files:
        try:
            documents = read(file)
            rules = [*rule_files.rules_in(documents)]
            for text in (each for one in rules for each in rule_files.mistakes(one)):
                yield codes.REFUSED_RULES.on(file, text)
            are_rules |= {file} if rules else set()
            found[file] = queries_of(documents)
        except FileError as error:
            yield codes.UNREADABLE.on(file, str(error))
        except RecursionError:
            yield codes.UNREADABLE.on(file, "it is nested too deep")
    there = dict[str, list[PageSample]]()
    for page in pages:
        for name, samples in page.samples.items():
            there.setdefault(name, []).extend(samples)
    recorded = {each.record for queries in found.values() for each in queries} - {""}
    why = functools.partial(reason, there=there or None, recorded=recorded)
    for file, queries in found.items():
        for finding in _findings(file, [(each, list(problems(each, why))) for each in queries]):
            # In a rule file, Prometheus refuses the query: an error that has been found above.
            if finding.code != codes.NOT_PROMQL.code or file not in are_rules:
                yield finding


def _findings(file: str, checked: Sequence[tuple[Query, list[Problem]]]) -> Iterator[Finding]:
    """Yield a finding for each kind of problem, with all metrics and panels that have it."""
    good = [query for query, found in checked if not found]
    # An alert on the exporter's own families of engines is for all engines.
    alerts = any(each.is_alert and "sidestep_engine_" in each.text for each in good)
    is_for_several = alerts or any(ENGINES.search(each.text) for each in good)
    kinds: dict[tuple[Code, str], list[tuple[str, str]]] = {}
    for query, found in checked:
        for code, name, text, instead in found:
            if not (code is codes.OTHER_ENGINE and is_for_several):
                shown = f"{name} -> {instead}" if instead else name
                kinds.setdefault((code, text), []).append((shown, query.place))
    for (code, text), uses in kinds.items():
        names, places = (
            ", ".join(dict.fromkeys(filter(None, each))) for each in zip(*uses, strict=True)
        )
        yield code.on(file, f"{names}: {text}{f' ({places})' if places else ''}")
