"""The differences between two measurements, and the verdict on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from sidestep_tools.compare.measurement import Estimate, Measurement, quantile

Unit = Literal["number", "seconds", "share"]
Verdict = Literal["better", "worse", "no difference seen", "not comparable"]
POINT = 0.01
"""Difference of the share of failed requests from which on it is worse or better."""
RATE, CONCURRENCY = "requests/s", "concurrent requests"
NAMED = 3
"""Most differences that a verdict names."""


class Quantity(NamedTuple):
    """A quantity that is compared.

    Attributes:
        name: Its name in a ``Measurement``.
        shares: Quantiles that are compared.
        is_judged: Whether more of it is worse.
    """

    section: str
    name: str
    label: str
    unit: Unit = "number"
    shares: Sequence[float] = ()
    is_judged: bool = False


QUANTILES = (0.5, 0.95, 0.99)
QUANTITIES = (
    Quantity("load", "request_rate", RATE),
    Quantity("load", "prompt_tokens", "prompt tokens", shares=(0.95,)),
    Quantity("load", "output_tokens", "output tokens", shares=(0.95,)),
    Quantity("load", "hit_ratio", "prefix-cache hit ratio", "share"),
    Quantity("load", "concurrency", CONCURRENCY),
    Quantity("latency", "ttft", "TTFT", "seconds", QUANTILES, is_judged=True),
    Quantity("latency", "itl", "ITL", "seconds", QUANTILES, is_judged=True),
    Quantity("latency", "request_itl", "ITL of a request", "seconds", QUANTILES, is_judged=True),
    Quantity("latency", "e2e", "e2e", "seconds", QUANTILES, is_judged=True),
    Quantity("throughput", "output_rate", "output tokens/s"),
    Quantity("throughput", "failed", "requests not served", "share", is_judged=True),
)
PART, LIMIT = "part ", "limit "
"""Beginnings of the names of parts of requests' time, and of limits."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of both inputs.

    Attributes:
        change: B / A - 1 where ``is_relative``, else B - A; None: A is 0.
        low: Lower bound of the 95 % interval of ``change``; None: no interval is known.
        verdict: ``worse`` or ``better`` where the whole interval lies beyond the threshold;
            ``differs`` of load.
    """

    section: str
    quantity: str
    unit: Unit
    a: Estimate
    b: Estimate
    is_relative: bool
    change: float | None
    low: float | None
    high: float | None
    verdict: Literal["worse", "better", "differs"] | None = None


class Side(msgspec.Struct, frozen=True):
    """One input: what the user named, its kind of engine, and what was measured."""

    source: str
    dialect: str
    extent: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of ``sidestep compare --json``."""

    version: str
    a: Side
    b: Side
    verdict: Verdict
    reason: str
    rows: list[Row]


class Thresholds(NamedTuple):
    """Relative changes from which on a latency counts as worse or better, and load as another one."""

    latency: float
    load: float


def rows(a: Measurement, b: Measurement, thresholds: Thresholds) -> Iterator[Row]:
    """Yield the quantities that both have."""
    for each in (*QUANTITIES, *_named(a, b, PART, "seconds"), *_named(a, b, LIMIT, "share")):
        pairs: list[tuple[str, Estimate | None, Estimate | None]] = []
        if each.name in a.ratios and each.name in b.ratios:
            label = f"{each.label}, mean" if each.shares else each.label
            pairs.append((label, a.ratios[each.name].estimate(), b.ratios[each.name].estimate()))
        if each.name in a.distributions and each.name in b.distributions:
            both = a.distributions[each.name], b.distributions[each.name]
            for share in each.shares:
                label = f"{each.label} p{share * 100:.0f}"
                pairs.append((label, *(quantile(one, share) for one in both)))
        for label, first, second in pairs:
            if first is not None and second is not None:
                yield _row(each, label, first, second, thresholds)


def _named(a: Measurement, b: Measurement, prefix: str, unit: Unit) -> Iterator[Quantity]:
    """Yield the parts of requests' time, or the limits, of either input."""
    section = {PART: "seconds of a request", LIMIT: "share of the busy time by limit"}[prefix]
    for name in dict.fromkeys([*a.ratios, *b.ratios]):
        if name.startswith(prefix):
            yield Quantity(section, name, name.removeprefix(prefix), unit)


def _row(of: Quantity, label: str, a: Estimate, b: Estimate, thresholds: Thresholds) -> Row:
    is_relative = of.unit != "share" and not of.name.startswith(PART)
    difference = _relative(a, b) if is_relative else _absolute(a, b)
    row = Row(
        section=of.section,
        quantity=label,
        unit=of.unit,
        a=a,
        b=b,
        is_relative=is_relative,
        change=None if difference is None else difference.value,
        low=None if difference is None else difference.low,
        high=None if difference is None else difference.high,
    )
    if of.section == "load":
        verdict = "differs" if _beyond(row, thresholds.load) else None
    elif of.is_judged:
        lies = _beyond(row, thresholds.latency if is_relative else POINT)
        verdict = (None, "worse", "better")[lies]
    else:
        return row
    return msgspec.structs.replace(row, verdict=verdict)


def _beyond(row: Row, threshold: float) -> int:
    """Return the sign of a change whose whole interval lies beyond the threshold; 0: it does not.

    Without an interval only load differs, by its change.
    """
    low, high = row.low, row.high
    if low is None or high is None:
        if row.section != "load" or row.change is None:
            return 0
        low = high = row.change
    return 1 if low > threshold else -1 if high < -threshold else 0


def _absolute(a: Estimate, b: Estimate) -> Estimate:
    """Return the difference; its interval combines those of both (MOVER; Zou and Donner, 2008)."""
    value = b.value - a.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Estimate(value)
    return Estimate(
        value,
        value - math.hypot(b.value - b.low, a.high - a.value),
        value + math.hypot(b.high - b.value, a.value - a.low),
    )


def _relative(a: Estimate, b: Estimate) -> Estimate | None:
    """Return the relative change, by the difference of logarithms; None of 0."""
    if not (a.value > 0 and b.value > 0):
        return None
    logs = [
        Estimate(*(math.log(each) if each is not None and each > 0 else None for each in one))
        for one in (a, b)
    ]
    found = _absolute(*logs)
    return Estimate(*(None if each is None else math.expm1(each) for each in found))


def judge(found: Sequence[Row]) -> tuple[Verdict, str]:
    """Return the verdict and its reason."""
    differing = [row for row in found if row.verdict == "differs"]
    rates = [row for row in found if row.quantity in (RATE, CONCURRENCY)]
    # With as many requests at a time, a slower engine serves fewer a second, and the reverse.
    is_as_busy = any(row.verdict is None for row in rates)
    loads = [row for row in differing if row.unit == "number" and not (row in rates and is_as_busy)]
    if loads:
        return "not comparable", f"another load: {_list(loads)}"
    if all(row.low is None for row in found if row.section == "latency"):
        return "not comparable", "too few requests or scrapes for an interval of any latency"
    worse, better = ([row for row in found if row.verdict == kind] for kind in ("worse", "better"))
    reasons = [_list(worse or better)] if worse or better else []
    if worse and better:
        reasons.append(f"better: {_list(better)}")
    reasons += [
        f"{row.quantity} {change_text(row)}: other prompts, or another cache"
        for row in differing
        if row.unit == "share"
    ]
    verdict: Verdict = "worse" if worse else "better" if better else "no difference seen"
    return verdict, "; ".join(reasons)


def _list(several: Sequence[Row]) -> str:
    ordered = sorted(several, key=lambda row: -abs(row.change or 0.0))
    texts = [f"{row.quantity} {change_text(row)}" for row in ordered[:NAMED]]
    more = len(ordered) - NAMED
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def lines(report: Report) -> Iterator[str]:
    """Yield the report for a terminal."""
    for name, side in (("A", report.a), ("B", report.b)):
        yield f"{name}  {side.source}: {side.dialect}, {side.extent}"
    section = ""
    for row in report.rows:
        if row.section != section:
            section = row.section
            yield ""
            yield f"{section:<36}{'A':>10}{'B':>10}{'change':>12}   95 % interval"
        cells = (number(row.a.value, row.unit), number(row.b.value, row.unit), change_text(row))
        bounds = [_change(row, bound) for bound in (row.low, row.high) if bound is not None]
        mark = f"  {row.verdict}" if row.verdict else ""
        yield f"  {row.quantity:<34}{cells[0]:>10}{cells[1]:>10}{cells[2]:>12}   {' to '.join(bounds) or '--':<22}{mark}".rstrip()
    yield ""
    yield f"{report.verdict}: {report.reason}" if report.reason else report.verdict


def number(value: float, unit: Unit) -> str:
    """Return a value with its unit."""
    if unit == "share":
        return f"{value:.1%}".replace("%", " %")
    if unit == "number":
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1e3:.3g} ms"


def change_text(row: Row) -> str:
    """Return the change of a row with its sign and unit."""
    return "--" if row.change is None else _change(row, row.change)


def _change(row: Row, change: float) -> str:
    if row.is_relative:
        return f"{change:+.1%}".replace("%", " %")
    if row.unit == "share":
        return f"{change * 100:+.1f} points"
    return f"{'-' if change < 0 else '+'}{number(abs(change), row.unit)}"
