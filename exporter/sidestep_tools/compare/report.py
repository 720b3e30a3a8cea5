"""The differences between two measurements, and the verdict on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from sidestep_tools.compare.measurement import (
    Estimate,
    Measurement,
    difference,
    quantile,
    relative_change,
)

Unit = Literal["number", "seconds", "share"]
Mark = Literal["better", "worse", "differs"]
Verdict = Literal["better", "worse", "no difference seen", "not comparable"]
POINT = 0.01
"""Difference of the share of failed requests from which on it is worse or better."""
RATE, CONCURRENCY = "requests/s", "concurrent requests"
MANY = 1000
"""Numbers without decimal places."""
NAMED = 3
"""Most differences that a verdict names."""


class Quantity(NamedTuple):
    """A quantity that is compared.

    Attributes:
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
    Quantity("latency", "inter_token", "ITL", "seconds", QUANTILES, is_judged=True),
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
        change: B / A - 1 where ``is_relative``, else B - A; None: one of them is 0.
        verdict: ``worse`` or ``better`` if the whole interval of the change lies beyond the threshold;
            ``differs`` of load.
    """

    section: str
    quantity: str
    unit: Unit
    a: Estimate
    b: Estimate
    is_relative: bool
    change: Estimate | None
    verdict: Mark | None = None


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
        for share in (None, *each.shares):
            first, second = (_estimate(one, each.name, share) for one in (a, b))
            if first is not None and second is not None:
                row = _row(each, share, first, second)
                mark = _mark(each, row, thresholds, is_mean=share is None)
                yield msgspec.structs.replace(row, verdict=mark)


def _named(a: Measurement, b: Measurement, prefix: str, unit: Unit) -> Iterator[Quantity]:
    """Yield the parts of requests' time, or the limits, that either input has, the largest first."""
    section = {PART: "seconds of a request", LIMIT: "share of the busy time"}[prefix]
    largest: dict[str, float] = {}
    for name, ratio in [*a.ratios.items(), *b.ratios.items()]:
        found = ratio.estimate() if name.startswith(prefix) else None
        if found is not None:
            largest[name] = max(largest.get(name, 0.0), found.value)
    for name in sorted(largest, key=lambda name: -largest[name]):
        yield Quantity(section, name, name.removeprefix(prefix), unit)


def _estimate(of: Measurement, name: str, share: float | None) -> Estimate | None:
    """Return a quantile, or the mean where there is no share; None if it is not known."""
    if share is not None:
        found = of.distributions.get(name)
        return None if found is None else quantile(found, share)
    if name in of.ratios:
        return of.ratios[name].estimate()
    # One of several parts or limits that never was.
    prefix, is_named, _ = name.partition(" ")
    is_zero = is_named and any(each.startswith(f"{prefix} ") for each in of.ratios)
    return Estimate(0.0, 0.0, 0.0) if is_zero else None


def _row(of: Quantity, share: float | None, a: Estimate, b: Estimate) -> Row:
    statistic = ", mean" if share is None else f" p{share * 100:.0f}"
    is_relative = of.unit != "share" and not of.name.startswith(PART)
    return Row(
        section=of.section,
        quantity=f"{of.label}{statistic if of.shares else ''}",
        unit=of.unit,
        a=a,
        b=b,
        is_relative=is_relative,
        change=relative_change(a, b) if is_relative else difference(a, b),
    )


def _mark(of: Quantity, row: Row, thresholds: Thresholds, *, is_mean: bool) -> Mark | None:
    """Return what a change is: load differs by its mean, a latency is worse by its whole interval."""
    change = row.change
    if change is None:
        return None
    if of.section == "load":
        size = abs(math.log1p(change.value) if row.is_relative else change.value)
        return "differs" if is_mean and size > math.log1p(thresholds.load) else None
    if not of.is_judged or change.low is None or change.high is None:
        return None
    threshold = thresholds.latency if row.is_relative else POINT
    return "worse" if change.low > threshold else "better" if change.high < -threshold else None


def judge(found: Sequence[Row]) -> tuple[Verdict, str]:
    """Return the verdict and its reason."""
    differing = [row for row in found if row.verdict == "differs"]
    rates = [row for row in found if row.quantity in (RATE, CONCURRENCY)]
    # With as many requests at a time, a slower engine serves fewer a second, and the reverse.
    is_as_busy = any(row.verdict is None for row in rates)
    loads = [row for row in differing if row.unit == "number" and not (row in rates and is_as_busy)]
    if loads:
        return "not comparable", f"another load: {_list(loads)}"
    latencies = [row.change for row in found if row.section == "latency"]
    if all(change is None or change.low is None for change in latencies):
        return "not comparable", "too few requests or scrapes for an interval of any latency"
    worse, better = ([row for row in found if row.verdict == kind] for kind in ("worse", "better"))
    reasons = [_list(worse or better)] if worse or better else [_unseen(found)]
    if worse and better:
        reasons.append(f"better: {_list(better)}")
    reasons += [
        f"{row.quantity} {_signed(row)}: other prompts, or another cache"
        for row in differing
        if row.unit == "share"
    ]
    verdict: Verdict = "worse" if worse else "better" if better else "no difference seen"
    return verdict, "; ".join(reasons)


def _unseen(found: Sequence[Row]) -> str:
    """Return how much worse B may be: of each latency, by the highest quantile with an interval."""
    highest = {
        row.quantity.rpartition(" ")[0]: f"{row.quantity} up to {_change(row, row.change.high)}"
        for row in found
        if row.section == "latency" and row.change is not None and row.change.high is not None
    }
    return f"not excluded are {', '.join(highest.values())}"


def _list(several: Sequence[Row]) -> str:
    ordered = sorted(several, key=lambda row: -abs(row.change.value) if row.change else 0.0)
    texts = [f"{row.quantity} {_signed(row)}" for row in ordered[:NAMED]]
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
            yield f"{section:<36}{'A':>10}{'B':>10}{'change':>14}   95 % interval"
        values = "".join(f" {_number(one.value, row.unit):>9}" for one in (row.a, row.b))
        bounds = row.change[1:] if row.change else ()
        interval = " to ".join(_change(row, each) for each in bounds if each is not None) or "--"
        line = f"  {row.quantity:<34}{values}{_signed(row):>14}   {interval:<28}"
        yield f"{line}{row.verdict or ''}".rstrip()
    yield ""
    yield f"{report.verdict}: {report.reason}".removesuffix(": ")


def _number(value: float, unit: Unit) -> str:
    if unit == "share":
        return f"{value * 100:.1f} %"
    if unit == "seconds":
        return f"{value:.3g} s" if value >= 1 or value == 0 else f"{value * 1e3:.3g} ms"
    return f"{value:.3g}" if value < MANY else f"{value:,.0f}"


def _signed(row: Row) -> str:
    return _change(row, row.change.value) if row.change else "--"


def _change(row: Row, value: float) -> str:
    """Return a change, or a bound of it, with its sign and unit."""
    if row.is_relative:
        return f"{value * 100:+.1f} %" if value < 1 else f"{value * 100:+,.0f} %"
    if row.unit == "share":
        return f"{value * 100:+.1f} points"
    return f"{'-' if value < 0 else '+'}{_number(abs(value), row.unit)}"
