"""Why a selector has no series: its metric's name, its labels and their values."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from sidestep.diagnosis.finding import Code
from sidestep_tools.doctor.queries import codes
from sidestep_tools.doctor.queries.inventory import Inventory
from sidestep_tools.doctor.queries.known_metrics import (
    LEGACY,
    SUFFIXES,
    TITLES,
    Metric,
    catalogue,
    counterparts,
    dialect_of,
    exporter_of,
    former_names,
    known_labels,
    own_labels,
    spellings,
    successor,
    why_lost,
)
from sidestep_tools.doctor.queries.promql import Matcher, Selector

PROMETHEUS = ("up", "scrape_", "ALERTS")
"""Beginnings of names that every Prometheus has."""
MOST_VALUES = 6
"""Most values of a label that a text names."""


class Problem(NamedTuple):
    """Problem of a part of a query.

    Attributes:
        name: Of the metric.
        instead: What to use instead, if that is known.
    """

    code: Code
    name: str
    text: str
    instead: str = ""


class Reasons:
    """Reasons why selectors have no series.

    Args:
        inventory: What there is; None: only the catalogue is known.
        recorded: Names that the given rules record.
        has_targets: Whether the inventory's series have the labels of their targets.
    """

    def __init__(
        self, inventory: Inventory | None, recorded: frozenset[str], *, has_targets: bool = False
    ) -> None:
        self._there = inventory
        self._recorded = recorded
        self._has_targets = has_targets

    def of(self, selector: Selector) -> Problem | None:
        """Return why a selector has no series; None: it may have some."""
        name = selector.name
        if name in self._recorded or name.startswith(PROMETHEUS):
            return None
        if self._there is None:
            problem = self._by_catalogue(name) if name else None
            metric = catalogue().get(name)
            if problem or metric is None:
                return problem
            return next(filter(None, (self._label(metric, m) for m in selector.matchers)), None)
        names = self._there.matching(selector)
        if not names:
            return self._absent(name) if name else self._pattern(selector)
        found = [self._values(each, selector) for each in names]
        return None if None in found else found[0]

    def kind_of(self, name: str) -> str:
        """Return the kind of a metric; empty: it is not known."""
        there = "" if self._there is None else self._there.kinds.get(name, "")
        metric = catalogue().get(name)
        return there or ("" if metric is None else metric.kind)

    def lacks(self, name: str, label: str) -> bool:
        """Return whether no series of a metric has the label, here or on any target."""
        metric = catalogue().get(name)
        if metric is not None and self._label(metric, Matcher(label, "!=", "")) is not None:
            return self._there is None or label not in self._there.names.get(name, {})
        return self.lacks_here(name, label) and label not in known_labels()

    def lacks_here(self, name: str, label: str) -> bool:
        """Return whether a metric's series are known with all of their labels, and have no such label."""
        there = None if self._there is None else self._there.names.get(name)
        return self._has_targets and there is not None and label not in there

    def _is_of_engine(self, name: str, label: str) -> bool:
        """Return whether a label is the engine's, and no target has it."""
        metric = catalogue().get(name)
        dialects = {dialect_of(name)} if metric is None else metric.dialects
        return any(label in own_labels(dialect) for dialect in dialects)

    def _label(self, metric: Metric, matcher: Matcher) -> Problem | None:
        label = matcher.label
        if label in metric.labels or matcher.accepts("") or label == "__name__":
            return None
        if not self._is_of_engine(metric.name, label):
            return None
        if label == "le" and metric.kind == "histogram":
            return Problem(codes.WRONG_LABEL, metric.name, "only its _bucket has the label le")
        return Problem(codes.WRONG_LABEL, metric.name, f"it never has the label {label}")

    def _values(self, name: str, selector: Selector) -> Problem | None:
        """Return why no series of a metric that is there fulfils the conditions."""
        labels = {} if self._there is None else self._there.names[name]
        for matcher in selector.matchers:
            label = matcher.label
            if label == "__name__" or matcher.accepts(""):
                continue
            values = labels.get(label)
            if values is None:
                if self._is_of_engine(name, label):
                    return Problem(codes.WRONG_LABEL, name, f"it does not have the label {label}")
                if self._has_targets:
                    return Problem(codes.WRONG_VALUE, name, f"no series has the label {label}")
            elif not any(matcher.accepts(value) for value in values):
                shown = ", ".join(sorted(values)[:MOST_VALUES])
                more = "" if len(values) <= MOST_VALUES else " and others"
                text = (
                    f"no series has {label}{matcher.operator}{matcher.value!r}, but {shown}{more}"
                )
                return Problem(_of_value(name, matcher), name, text)
        return None

    def _by_catalogue(self, name: str) -> Problem | None:
        """Return what is wrong with a name, whatever is there."""
        metric = catalogue().get(name)
        if metric is None:
            return self._unknown(name)
        if metric.flag == LEGACY:
            return Problem(codes.FORMER, name, _removed(metric), successor(metric))
        if metric.flag:
            return Problem(codes.NEEDS_FLAG, name, f"only with {metric.flag}")
        return None

    def _unknown(self, name: str) -> Problem | None:
        """Return what is wrong with a name that the catalogue does not have."""
        if name.removesuffix("_created") != name:
            return None
        for other in spellings(name):
            metric = catalogue().get(other)
            if metric is not None:
                # An engine may write a former name in another way.
                instead = successor(metric) if metric.flag == LEGACY else metric.name
                return Problem(codes.RENAMED, name, "it is written in another way", instead)
        if lost := why_lost(name):
            return Problem(codes.RENAMED, name, f"it was removed: {lost}")
        elsewhere = exporter_of(name)
        if dialect_of(name) and not elsewhere:
            nearest = difflib.get_close_matches(name, catalogue(), n=1, cutoff=0.8)
            return Problem(codes.UNKNOWN, name, "no release has it", *nearest)
        if ":" in name and not elsewhere:
            return Problem(codes.NEEDS_RULE, name, "no rule records it")
        return None

    def _absent(self, name: str) -> Problem:
        """Return why a name is not among those that are there."""
        assert self._there is not None
        names = self._there.names
        for other in (*spellings(name), *former_names().get(name, ())):
            if other in names:
                return Problem(codes.RENAMED, name, "it has another name here", other)
        metric = catalogue().get(name)
        if metric is None:
            unknown = self._unknown(name)
            return unknown or Problem(codes.ELSEWHERE, name, _from(exporter_of(name)))
        if metric.flag == LEGACY:
            return Problem(codes.RENAMED, name, _removed(metric), successor(metric))
        forms = {metric.family, *(metric.family + suffix for suffix in SUFFIXES)} & names.keys()
        if metric.kind == "histogram" and forms:
            return Problem(codes.OTHER_FORM, name, f"there is {', '.join(sorted(forms))}")
        if metric.flag:
            return Problem(codes.NEEDS_OPTION, name, f"it needs sidestep's {metric.flag}")
        return self._of_engine(metric)

    def _of_engine(self, metric: Metric) -> Problem:
        """Return why a live metric is not there."""
        assert self._there is not None
        name, names = metric.name, self._there.names
        if name.startswith("sidestep_") and "sidestep_build_info" not in names:
            return Problem(codes.ELSEWHERE, name, "only the page of a sidestep exporter has it")
        dialects = {dialect_of(each) for each in names} | (
            {"triton"} if any(each.startswith("nv_inference_") for each in names) else set()
        )
        if not metric.dialects & {*dialects, "stream", "exporter"}:
            titles = " or ".join(sorted(TITLES[each] for each in metric.dialects))
            other = (one + metric.suffix for one in counterparts().get(metric.family, ()))
            same = next((one for one in other if one in names), "")
            return Problem(codes.OTHER_ENGINE, name, f"nothing is of {titles}", same)
        if metric.needs:
            return Problem(codes.NEEDS_OPTION, name, f"it needs {metric.needs}")
        since = f"; the engine has it since {metric.since}" if metric.since else ""
        return Problem(codes.ABSENT, name, f"it is not there{since}")

    def _pattern(self, selector: Selector) -> Problem:
        named = [
            f"{each.operator}{each.value!r}"
            for each in selector.matchers
            if each.label == "__name__"
        ]
        return Problem(codes.ABSENT, f"__name__{named[0]}", "no name is like it")


def _of_value(name: str, matcher: Matcher) -> Code:
    """Return the kind of a value that no series has."""
    if matcher.label == "dialect":  # of recorded names
        return codes.OTHER_ENGINE
    # The exporter's own series come and go with what they describe.
    comes = name.startswith("sidestep_") and matcher[:2] != ("model_name", "=")
    return codes.ABSENT if comes else codes.WRONG_VALUE


def _removed(metric: Metric) -> str:
    return f"its last release is {metric.until}" if metric.until else "no release has it"


def _from(exporter: str) -> str:
    return f"{exporter} has it" if exporter else "it is not known"
