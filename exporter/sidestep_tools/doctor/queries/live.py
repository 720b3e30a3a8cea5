"""Check of queries by running them on a Prometheus."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

from sidestep_tools.doctor.prometheus_api import QUERY_TIMEOUT, Api, RefusedError
from sidestep_tools.doctor.queries import codes
from sidestep_tools.doctor.queries.files import ANYTHING, Query
from sidestep_tools.doctor.queries.inventory import Inventory
from sidestep_tools.doctor.queries.problems import WITH_RESULT, problems, short
from sidestep_tools.doctor.queries.promql import Matcher, PromqlError, Selector, parse, selectors
from sidestep_tools.doctor.queries.reasons import Problem, Reasons
from sidestep_tools.web_client.fetch import FetchError

MOST_NAMES = 20
"""Most names of a pattern whose labels are read."""
FILTER = re.compile(r"[<>]|[^=!<>]==|!=|\b(and|unless)\b", re.IGNORECASE)
"""Matches operators that may leave nothing, outside of selectors."""
SELECTED = re.compile(r"\{[^{}]*\}")


class LiveQueries:
    """Queries on one Prometheus, and the labels of the metrics that they select."""

    def __init__(self, api: Api, names: list[str]) -> None:
        self._api = api
        self._there = Inventory({name: {} for name in names})
        self._reasons = Reasons(self._there, frozenset(), has_targets=True)
        self._known: set[str] = set()

    @classmethod
    async def of(cls, api: Api) -> LiveQueries:
        """Read the names of all metrics.

        Raises:
            FetchError: Prometheus does not answer.
            RefusedError: Prometheus refuses the request.
        """
        return cls(api, await api.names())

    async def problems(self, query: Query) -> list[Problem]:
        """Return what is wrong with a query."""
        try:
            has_result = bool(await self._api.query(query.text, QUERY_TIMEOUT))
        except RefusedError as error:
            # With the variables' own values it may be a good query.
            is_doubtful = ANYTHING in query.text and (
                not error.is_syntax or "non-empty matcher" in str(error)
            )
            refused = Problem(codes.REFUSED, short(query.text), str(error))
            return [] if query.is_guessed or is_doubtful else [refused]
        except FetchError as error:
            return [Problem(codes.REFUSED, short(query.text), str(error))]
        try:
            selected = list(selectors(parse(query.text)))
            for selector in selected:
                await self._read(selector)
        except PromqlError:  # more than this reader knows
            return []
        found = list(problems(query, self._reasons))
        if has_result:
            return [each for each in found if each.code in WITH_RESULT]
        is_filter = FILTER.search(SELECTED.sub("", query.text)) is not None
        if not (found or query.may_be_empty or is_filter) and await self._are_there(selected):
            found = [Problem(codes.NO_SERIES, short(query.text), "its parts have series")]
        return found

    async def _are_there(self, selected: Iterable[Selector]) -> bool:
        """Return whether all selectors have series now; labels are known of those that have ended, too."""
        with contextlib.suppress(RefusedError, FetchError):
            for selector in selected:
                if not await self._api.query(selector.text, QUERY_TIMEOUT):
                    return False
        return True

    async def _read(self, selector: Selector) -> None:
        """Read the labels of a selector's metrics, and the values of those that it selects by."""
        for name in self._there.matching(selector)[:MOST_NAMES]:
            labels = self._there.names[name]
            match = {"match[]": f'{{__name__="{name}"}}'}
            if name not in self._known:
                self._known.add(name)
                for label in await self._api.optional("labels", match):
                    labels.setdefault(label, set())
            for matcher in selector.matchers:
                values = labels.get(matcher.label)
                if values == set() and not _accepts_all(matcher):
                    values.update(await self._api.optional(f"label/{matcher.label}/values", match))


def _accepts_all(matcher: Matcher) -> bool:
    return matcher.label == "__name__" or matcher.accepts("")
