"""The table of ``sidestep top``: its entries, its columns, and the choice of columns that fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from sidestep.exposition.live.answers import EngineRow, Percentiles
from sidestep.protocol.limits import escape
from sidestep.tracking.health.states import Level
from sidestep_tools import formatting
from sidestep_tools.formatting import age, count, duration, rate, share
from sidestep_tools.top.report import Report

KV_WARNING, KV_CRITICAL = 0.65, 0.85
SIGNS = {
    "ok": "●", "idle": "○", "slow": "▲", "stalled": "■", "unreachable": "□",
    "starting": "◌", "asleep": "☾", "stopped": "-",
}  # fmt: skip
"""Signs of states, which are those of the live page."""
ATTENTION_SIGN = "▲"
"""Sign of an engine that needs attention though its state is well."""
ATTENTION = "attention"
"""Text of the filter that shows all engines which need attention."""
BAR = 3
"""Least cells of a bar; the percentage beside it takes five."""


class Entry(NamedTuple):
    """A line of the table: an engine, or a target that failed.

    Attributes:
        key: Identity over all reports.
        row: The engine; None: the line is that of a target.
        error: Reason why the target failed, so that numbers of its engines are old.
        age: Seconds since the target's last answer, if it failed.
    """

    key: str
    url: str
    row: EngineRow | None
    error: str | None = None
    age: float | None = None


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        group: Printed above the titles of neighbours with the same group.
        meaning: Explanation in the help.
        value: Returns the value to sort by; None: not known.
        text: Returns the text of a cell. It has at most the given number of cells, unless it is a name.
    """

    key: str
    group: str
    title: str
    meaning: str
    value: Callable[[EngineRow], float | str | None]
    text: Callable[[EngineRow, int], str]

    @property
    def named(self) -> bool:
        """True if it holds text, which is sorted from a to z and aligned to the left."""
        return self.key in {"engine", "model", "state", "limit"}


class Order(NamedTuple):
    """Order of the table."""

    key: str = "state"
    reverse: bool = False

    @property
    def descending(self) -> bool:
        """True if large values come first, as numbers do unless the order is reversed."""
        return self.reverse == BY_KEY[self.key].named


def entries(report: Report) -> list[Entry]:
    """Return a line for each target that failed, and one for each engine."""
    found = []
    for target in report.targets:
        if target.error is not None:
            found.append(Entry(target.url, target.url, None, target.error, target.age))
        since = target.age if target.error is not None else None
        for row in target.engines:
            key = f"{target.url}\n{row.id}"
            found.append(Entry(key, target.url, row, target.error, since))
    return found


def matches(entry: Entry, text: str) -> bool:
    """Return whether the engine, its model, kind, state or target contains ``text``."""
    if not text:
        return True
    row, sought = entry.row, text.casefold()
    fields = [entry.url, entry.error or ""]
    if row is not None:
        fields += [row.engine, row.model, row.dialect, row.state or ""]
        fields += [ATTENTION, row.attention] if row.attention else []
    return any(sought in field.casefold() for field in fields)


def ordered(found: Iterable[Entry], order: Order) -> list[Entry]:
    """Return targets that failed, then engines in that order; unknown values come last.

    Equal ones are in the order of their names, so that no line moves without a reason.
    """
    column = BY_KEY[order.key]
    failed, unknown = [], []
    known: list[tuple[Any, Entry]] = []
    for entry in sorted(found, key=_by_name):
        if entry.row is None:
            failed.append(entry)
            continue
        value = column.value(entry.row)
        if value is None or value != value:  # noqa: PLR0124 # a page may have NaN
            unknown.append(entry)
        else:
            known.append((_natural(value) if isinstance(value, str) else value, entry))
    known.sort(key=lambda each: each[0], reverse=order.descending)
    return [*failed, *(entry for _, entry in known), *unknown]


def fit(width: int, found: Sequence[Entry]) -> list[tuple[Column, int]]:
    """Return the columns that fit side by side with a blank between, and the cells of each.

    ``WISHES`` are granted in their order, that of the limit only if one is known. A repeated column is widened as far as there is room, and a
    column of names no further than its longest name.
    """
    rows = [entry.row for entry in found if entry.row is not None]
    longest = {
        key: max((len(BY_KEY[key].text(row, 0)) for row in rows), default=0) for key in ELASTIC
    }
    chosen: dict[str, int] = {}
    left = width + 1
    for key, wish in WISHES:
        if key == "limit" and not any(row.limit for row in rows):
            continue
        cells = max(min(wish, longest.get(key, wish)), len(BY_KEY[key].title) + 1)
        if key in chosen:
            more = max(0, min(cells - chosen[key], left))
            chosen[key] += more
            left -= more
        elif cells + 1 <= left or not chosen:
            chosen[key] = cells
            left -= cells + 1
    return [(column, chosen[column.key]) for column in COLUMNS if column.key in chosen]


def level(column: Column, row: EngineRow) -> Level | None:
    """Return how alarming a cell is; None: it is a plain number."""
    usage = row.kv_cache_usage
    if column.key == "state":
        return row.level
    if column.key == "kv" and usage is not None and usage >= KV_WARNING:
        return "critical" if usage >= KV_CRITICAL else "warning"
    if column.key == "load" and row.saturation is not None and row.saturation >= 1:
        return "warning"
    return None


def bar(value: float | None, width: int) -> str:
    """Return a share as a bar and a number, or as a number if a bar does not fit."""
    text = share(value)
    cells = width - len("100% ")
    if cells < BAR or text == formatting.UNKNOWN or value is None:
        return text
    full = round(cells * min(1.0, max(0.0, value)))
    return f"{'━' * full}{'─' * (cells - full)} {text:>4}"


def state(row: EngineRow, width: int) -> str:
    """Return the state, with the seconds without progress or the problem if there is room."""
    text = escape(row.state) if row.state else formatting.UNKNOWN
    if row.stalled_seconds is not None:
        longer = f"{text} {age(row.stalled_seconds)}"
    elif row.attention not in (None, row.state):
        longer = f"{text} {row.attention}"
        # Where only one fits, the problem is more useful than the state.
        text = longer if len(longer) <= width else str(row.attention)
    else:
        longer = text
    return longer if len(longer) <= width else text


def limit(row: EngineRow, width: int) -> str:
    """Return the limit that bound, with its share of the busy time if there is room."""
    name = row.limit or formatting.UNKNOWN
    longer = f"{name} {share(row.limit_share)}" if row.limit_share else name
    return longer if len(longer) <= width else name


def sign(row: EngineRow) -> str:
    """Return the sign of an engine: of its state, or of what it needs attention for besides."""
    if row.attention not in (None, row.state):
        return ATTENTION_SIGN
    return SIGNS.get(row.state or "", " ")


def _severity(row: EngineRow) -> str:
    """Return the key that sorts engines that need attention first, by kind."""
    return f"{row.level} {row.attention}" if row.attention else "well"


def _by_name(entry: Entry) -> tuple[list[str | int], str]:
    return _natural("" if entry.row is None else entry.row.engine), entry.key


@lru_cache(maxsize=4096)
def _natural(text: str) -> list[str | int]:
    """Return a key that sorts ``pod-2`` before ``pod-10``."""
    parts = re.split(r"([0-9]+)", text.casefold())
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _p95(percentiles: Percentiles | None) -> float | None:
    return None if percentiles is None else percentiles.p95


COLUMNS = (
    Column(
        "engine", "", "ENGINE", "the label engine, or the engine's identity",
        lambda row: row.engine, lambda row, _: escape(row.engine),
    ),
    Column(
        "model", "", "MODEL", "the model's name",
        lambda row: row.model or None, lambda row, _: escape(row.model) or formatting.UNKNOWN,
    ),
    Column(
        "state", "", "STATE", "health, or what is wrong; -- where no process reports progress",
        _severity, state,
    ),
    Column(
        "running", "requests", "RUN", "requests in the batch",
        lambda row: row.running, lambda row, _: count(row.running),
    ),
    Column(
        "waiting", "requests", "WAIT", "requests that wait to be scheduled",
        lambda row: row.waiting, lambda row, _: count(row.waiting),
    ),
    Column(
        "in", "tokens/s", "IN", "prompt tokens computed per second",
        lambda row: row.prompt_tokens_per_second,
        lambda row, _: rate(row.prompt_tokens_per_second),
    ),
    Column(
        "out", "tokens/s", "OUT", "tokens generated per second",
        lambda row: row.generation_tokens_per_second,
        lambda row, _: rate(row.generation_tokens_per_second),
    ),
    Column(
        "ttft", "p95 of 60 s", "TTFT", "time to first token",
        lambda row: _p95(row.ttft), lambda row, _: duration(_p95(row.ttft)),
    ),
    Column(
        "itl", "p95 of 60 s", "ITL", "inter-token latency",
        lambda row: _p95(row.inter_token), lambda row, _: duration(_p95(row.inter_token)),
    ),
    Column(
        "e2e", "p95 of 60 s", "E2E", "latency from arrival to the end of a request",
        lambda row: _p95(row.e2e), lambda row, _: duration(_p95(row.e2e)),
    ),
    Column(
        "kv", "", "KV", "share of the KV cache in use",
        lambda row: row.kv_cache_usage, lambda row, width: bar(row.kv_cache_usage, width),
    ),
    Column(
        "hits", "prefix", "HITS", "share of the looked-up tokens in the prefix cache",
        lambda row: row.prefix_hit_rate, lambda row, _: share(row.prefix_hit_rate),
    ),
    Column(
        "preemptions", "last 60 s", "PREEMPT", "preemptions",
        lambda row: row.preemptions, lambda row, _: count(row.preemptions),
    ),
    Column(
        "aborted", "last 60 s", "ABORT", "aborted requests",
        lambda row: row.aborted, lambda row, _: count(row.aborted),
    ),
    Column(
        "finished", "last 60 s", "DONE", "requests that ended, for whatever reason",
        lambda row: row.finished, lambda row, _: count(row.finished),
    ),
    Column(
        "limit", "", "LIMIT", "what kept requests waiting for longest in the last 60 s",
        lambda row: row.limit, limit,
    ),
    Column(
        "load", "", "LOAD", "offered load divided by the load that the engine can serve",
        lambda row: row.saturation, lambda row, _: share(row.saturation),
    ),
)  # fmt: skip
BY_KEY = {column.key: column for column in COLUMNS}
ELASTIC = ("engine", "model")
WISHES = (
    ("engine", 10), ("state", 8), ("waiting", 5), ("kv", 5), ("out", 5), ("running", 5),
    ("ttft", 6), ("itl", 6), ("in", 5), ("e2e", 6), ("kv", 8), ("engine", 16), ("hits", 6),
    ("limit", 9), ("model", 12), ("engine", 24), ("preemptions", 8), ("aborted", 6), ("kv", 13), ("model", 20),
    ("engine", 30), ("load", 5), ("finished", 5), ("state", 12), ("limit", 15), ("model", 40), ("engine", 40),
)  # fmt: skip
"""Columns and the cells that they want, the most important first."""
