"""Reasons why a selector has no series: the metric's name, its labels or their values."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sidestep.catalog.page_reader import PageSample, Samples
from sidestep.diagnosis.finding import Code
from sidestep.engines.sglang.legacy_rows import LOST
from sidestep_tools.doctor.queries import codes
from sidestep_tools.doctor.queries import known_metrics as known
from sidestep_tools.doctor.queries.known_metrics import LEGACY, Metric, catalogue
from sidestep_tools.doctor.queries.promql import accepts, conditions, name_of

if TYPE_CHECKING:
    from promql_parser import Matcher, VectorSelector

PROMETHEUS = ("up", "scrape_", "ALERTS")
"""Beginnings of names that every Prometheus has."""
MOST_VALUES = 6
"""Most values of a label that a finding names."""


class Problem(NamedTuple):
    """Problem with a metric of a query; ``instead`` is the name to use instead, if one is known."""

    code: Code
    name: str
    text: str
    instead: str = ""


def reason(
    selector: VectorSelector, there: Samples | None = None, recorded: Collection[str] = ()
) -> Problem | None:
    """Return why a selector has no series; None: it may have some.

    ``there`` has the samples of all pages by their names; None: only the catalogue is known.
    ``recorded`` has the names that the given rules record.
    """
    name = name_of(selector)
    if name in recorded or name.startswith(PROMETHEUS):
        return None
    if there is None:
        return _by_catalogue(name, selector)
    named = conditions(selector, on_name=True)
    names = [each for each in there if all(accepts(one, each) for one in named)]
    if selector.name:
        names = [each for each in names if each == selector.name]
    if not names and name:
        return _absent(name, there)
    if not names:
        return Problem(codes.ABSENT, str(named[0]), "no name is like it")
    found = [_by_values(each, there[each], selector) for each in names]
    return None if None in found else found[0]


def _by_catalogue(name: str, selector: VectorSelector) -> Problem | None:
    """Return what is wrong with a name or its labels, whatever is there."""
    found = catalogue().get(name)
    if found is None:
        return _unknown(name) if name else None
    if found.flag == LEGACY:
        return Problem(codes.FORMER, name, _removed(found), found.successor)
    if found.flag:
        return Problem(codes.NEEDS_FLAG, name, f"only with {found.flag}")
    for matcher in _demands(selector):
        label = matcher.name
        if label not in found.labels and _is_of_engine(name, label):
            if label == "le" and found.kind == "histogram":
                return Problem(codes.WRONG_LABEL, name, "only its _bucket has the label le")
            return Problem(codes.WRONG_LABEL, name, f"it never has the label {label}")
    return None


def _by_values(
    name: str, samples: Sequence[PageSample], selector: VectorSelector
) -> Problem | None:
    """Return why no series of a metric that is there fulfils the conditions."""
    for matcher in _demands(selector):
        label = matcher.name
        values = {each.labels[label] for each in samples if label in each.labels}
        if not values and _is_of_engine(name, label):
            return Problem(codes.WRONG_LABEL, name, f"it does not have the label {label}")
        if values and not any(accepts(matcher, each) for each in values):
            shown = ", ".join(sorted(values)[:MOST_VALUES])
            more = "" if len(values) <= MOST_VALUES else " and others"
            text = f"no series has {matcher}, but {shown}{more}"
            return Problem(_of_value(name, matcher), name, text)
    return None


def _demands(selector: VectorSelector) -> list[Matcher]:
    """Return the conditions that a series without the label does not fulfil."""
    return [each for each in conditions(selector) if not accepts(each, "")]


def _is_of_engine(name: str, label: str) -> bool:
    """Return whether a label is the engine's, and no target has it."""
    metric = catalogue().get(name)
    dialects = {known.by_prefix(known.PREFIXES, name)} if metric is None else metric.dialects
    return any(label in known.own_labels(dialect) for dialect in dialects)


def _of_value(name: str, matcher: Matcher) -> Code:
    """Return the code of a value that no series has."""
    if matcher.name == "dialect":  # a label of recorded series
        return codes.OTHER_ENGINE
    # Series of the exporter come and go with what they describe.
    comes = name.startswith("sidestep_") and not str(matcher).startswith('model_name="')
    return codes.ABSENT if comes else codes.WRONG_VALUE


def _unknown(name: str) -> Problem | None:
    """Return what is wrong with a name that the catalogue does not have."""
    if name.endswith("_created"):
        return None
    for other in known.spellings(name):
        metric = catalogue().get(other)
        if metric is not None:
            # An engine may write a former name in another way.
            instead = metric.successor if metric.flag == LEGACY else metric.name
            return Problem(codes.RENAMED, name, "it is written in another way", instead)
    if name in dict(LOST):
        return Problem(codes.RENAMED, name, f"it was removed: {dict(LOST)[name]}")
    if known.by_prefix(known.EXPORTERS, name):
        return None
    if known.by_prefix(known.PREFIXES, name):
        nearest = difflib.get_close_matches(name, catalogue(), n=1, cutoff=0.8)
        return Problem(codes.UNKNOWN, name, "no release has it", *nearest)
    return Problem(codes.NEEDS_RULE, name, "no rule records it") if ":" in name else None


def _absent(name: str, there: Samples) -> Problem:
    """Return why a name is not among those that are there."""
    for other in (*known.spellings(name), *known.former_names().get(name, ())):
        if other in there:
            return Problem(codes.RENAMED, name, "it has another name here", other)
    metric = catalogue().get(name)
    if metric is None:
        exporter = known.by_prefix(known.EXPORTERS, name)
        text = f"{exporter} has it" if exporter else "it is not known"
        return _unknown(name) or Problem(codes.ELSEWHERE, name, text)
    if metric.flag == LEGACY:
        return Problem(codes.RENAMED, name, _removed(metric), metric.successor)
    forms = {metric.family, *(metric.family + suffix for suffix in known.SUFFIXES)} & there.keys()
    if metric.kind == "histogram" and forms:
        return Problem(codes.OTHER_FORM, name, f"there is {', '.join(sorted(forms))}")
    if metric.flag:
        return Problem(codes.NEEDS_OPTION, name, f"it needs sidestep's {metric.flag}")
    return _of_engine(metric, there)


def _of_engine(metric: Metric, there: Samples) -> Problem:
    """Return why a metric without a flag of the exporter is not there."""
    name = metric.name
    if name.startswith("sidestep_") and "sidestep_build_info" not in there:
        return Problem(codes.ELSEWHERE, name, "only the page of a sidestep exporter has it")
    dialects = {known.by_prefix(known.PREFIXES, each) for each in there}
    if not metric.dialects & {*dialects, "stream", "exporter"}:
        titles = " or ".join(sorted(known.TITLES[each] for each in metric.dialects))
        other = (
            one + name.removeprefix(metric.family)
            for one in known.counterparts().get(metric.family, ())
        )
        same = next((one for one in other if one in there), "")
        return Problem(codes.OTHER_ENGINE, name, f"nothing is of {titles}", same)
    if metric.needs:
        return Problem(codes.NEEDS_OPTION, name, f"it needs {metric.needs}")
    since = f"; the engine has it since {metric.since}" if metric.since else ""
    return Problem(codes.ABSENT, name, f"it is not there{since}")


def _removed(metric: Metric) -> str:
    return f"its last release is {metric.until}" if metric.until else "no release has it"
