"""Rows of engines from a metrics page in Prometheus' text format."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

from sidestep.catalog.engine_pages import (
    NAMES,
    PAGES,
    STALLED,
    STATE,
    STEP_AGE,
    Alternatives,
    EnginePage,
)
from sidestep.protocol.limits import VALUE_LIMIT

STATES = ("stalled", "unreachable", "slow", "ok", "idle", "starting", "asleep", "stopped")
"""States of docs/health.md, the worst first; those that serve before those that do not."""
WANTED = NAMES | {STATE, STALLED, STEP_AGE}
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_EXEMPLAR = re.compile(r' # \{(?:[^"}]|"(?:[^"\\]|\\.)*")*\}[^"}]*$')
"""An exemplar, after the value on a page in the OpenMetrics format; a label's value may look like its start."""
COMMENTS = ("# TYPE ", "# HELP ")
MAX_REPLICAS = 1024
"""Most replicas that are read from a page."""


class PageSample(NamedTuple):
    """A sample of a page."""

    labels: Mapping[str, str]
    value: float


Samples = Mapping[str, list[PageSample]]
"""Samples by their name."""
Buckets = tuple[tuple[float, ...], tuple[float, ...]]
"""Upper bounds without +Inf, and cumulative counts, the last of +Inf."""


class Reading(NamedTuple):
    """The numbers of one replica on a page.

    Attributes:
        key: Model and labels that distinguish it.
    """

    dialect: str
    key: tuple[str, ...]
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    histograms: Mapping[str, Buckets]
    state: str | None = None
    reason: str | None = None
    stalled: float | None = None
    step_age: float | None = None


def read_page(text: str) -> list[Reading]:
    """Return the replicas of all engines on a page.

    Raises:
        ValueError: The page is not in the text format, or of no known engine; the text is one line.
    """
    found = readings(text)
    if not found:
        known = ", ".join(page.dialect for page in PAGES)
        raise ValueError(
            f"a page without numbers of a known engine ({known})"
            if text.startswith(COMMENTS) or any(f"\n{each}" in text for each in COMMENTS)
            else "not a metrics page: give the whole URL of one"
        )
    return found


def readings(text: str) -> list[Reading]:
    """Return the replicas of all known engines on a page, which may have none.

    Raises:
        ValueError: A sample has no number.
    """
    wanted = samples(text, WANTED)
    found = [reading for page in PAGES for reading in _replicas(page, wanted)]
    return found[:MAX_REPLICAS]


def samples(text: str, wanted: Collection[str] = ()) -> Samples:
    """Return the samples of a page by their names.

    With ``wanted`` only those names are read, and values that no engine counts to are left out.
    """
    found: dict[str, list[PageSample]] = {}
    for line in text.split("\n"):
        name, brace, rest = _EXEMPLAR.sub("", line).partition("{")
        if not brace:
            name, _, rest = name.partition(" ")
        if name not in wanted if wanted else line.startswith("#") or not line.strip():
            continue
        inside, _, after = rest.rpartition("}") if brace else ("", "", rest)
        try:
            value = float(after.split()[0])
        except (ValueError, IndexError):
            raise ValueError(f"{name} has no number where its value should be") from None
        if wanted and not abs(value) <= VALUE_LIMIT:
            # NaN, an infinity, or a number that no engine counts to.
            continue
        labels = {key: _plain(text) for key, text in _LABEL.findall(inside)}
        found.setdefault(name, []).append(PageSample(labels, value))
    return found


def _plain(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], text)


def _replicas(page: EnginePage, all_: Samples) -> list[Reading]:
    groups: dict[tuple[str, ...], dict[str, list[PageSample]]] = {}
    for name, found in all_.items():
        if not name.startswith(page.prefix):
            continue
        for sample in found:
            if any(sample.labels.get(rank, "0") != "0" for rank in page.ranks):
                continue
            key = (
                sample.labels.get(page.model, "") if page.model else "",
                *(sample.labels.get(label, "") for label in page.replica),
            )
            groups.setdefault(key, {}).setdefault(name, []).append(sample)
    return [_reading(page, key, own, all_) for key, own in sorted(groups.items())]


def _reading(page: EnginePage, key: tuple[str, ...], own: Samples, all_: Samples) -> Reading:
    def number(alternatives: Alternatives, *, is_gauge: bool) -> float | None:
        for alternative in alternatives:
            values = [
                sample.value
                for match in alternative
                for sample in own.get(match.name, ())
                if all(sample.labels.get(name) == value for name, value in match.labels)
            ]
            if values:
                return max(values) if is_gauge and page.is_pooled else sum(values)
        return None

    gauges = {name: number(each, is_gauge=True) for name, each in page.gauges.items()}
    counters = {name: number(each, is_gauge=False) for name, each in page.counters.items()}
    histograms = {name: _buckets(names, own) for name, names in page.histograms.items()}
    return Reading(
        page.dialect,
        key,
        {name: value for name, value in gauges.items() if value is not None},
        {name: value for name, value in counters.items() if value is not None},
        {name: value for name, value in histograms.items() if value is not None},
        *_health(page, key, all_),
    )


def _buckets(names: tuple[str, ...], own: Samples) -> Buckets | None:
    """Return the buckets of the first histogram that there is, summed over its series."""
    for name in names:
        counts: dict[float, float] = {}
        for sample in own.get(f"{name}_bucket", ()):
            try:
                bound = float(sample.labels.get("le", ""))
            except ValueError:
                raise ValueError(f"{name}_bucket has no number as its label le") from None
            counts[bound] = counts.get(bound, 0.0) + sample.value
        if math.inf in counts:
            bounds = sorted(counts)
            return tuple(bounds[:-1]), tuple(counts[bound] for bound in bounds)
    return None


def _health(
    page: EnginePage, key: tuple[str, ...], all_: Samples
) -> tuple[str | None, str | None, float | None, float | None]:
    """Return state, reason, seconds without progress and age of the step, from an exporter's page.

    A replica without a state of its own, such as one of the pod view, has the worst of its model.
    """
    names = (page.model, *page.replica)

    def own(name: str) -> list[PageSample]:
        found = all_.get(name, ())
        exact = [s for s in found if key == tuple(s.labels.get(label, "") for label in names)]
        return exact or [s for s in found if key[0] in ("", s.labels.get("model_name"))]

    states = {s.labels.get("state", "") for s in own(STATE) if s.value}
    state = next((each for each in STATES if each in states), None)
    stalled = max(own(STALLED), key=lambda s: s.value, default=None)
    step_age = max(own(STEP_AGE), key=lambda s: s.value, default=None)
    return (
        state,
        None if stalled is None else stalled.labels.get("reason"),
        None if stalled is None else stalled.value,
        None if step_age is None else step_age.value,
    )
