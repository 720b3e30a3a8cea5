"""Numbers with units as Grafana writes them, and ticks of axes."""

from __future__ import annotations

import math
from datetime import datetime, timezone

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
THOUSANDS = ("", " K", " Mil", " Bil", " Tri")
BINARY = (" B", " KiB", " MiB", " GiB", " TiB")
DECIMAL = (" ", " k", " M", " G", " T", " P")
AFTER = {"cps": " c/s", "reqps": " req/s"}


def shown(value: float, unit: str) -> str:
    """Return ``value`` with its unit, in about three digits."""
    if math.isnan(value):
        return "no traffic"
    made = {
        "s": lambda: seconds(value),
        "ms": lambda: seconds(value / 1000),
        "percentunit": lambda: f"{digits(value * 100)} %",
        "percent": lambda: f"{digits(value)} %",
        "mbytes": lambda: scaled(value * 1024**2, 1024, BINARY),
        "watt": lambda: f"{digits(value)} W",
        "joule": lambda: f"{digits(value)} J",
        "bytes": lambda: scaled(value, 1024, BINARY),
        "Bps": lambda: f"{scaled(value, 1024, BINARY)}/s",
        "flops": lambda: f"{scaled(value, 1000, DECIMAL)}FLOP/s",
        "dateTimeAsIso": lambda: f"{datetime.fromtimestamp(value, timezone.utc):%Y-%m-%d %H:%M:%S}",
    }
    after = f" {unit.removeprefix('count:')}" if unit.startswith("count:") else AFTER.get(unit, "")
    return made.get(unit, lambda: scaled(value, 1000, THOUSANDS) + after)()


def seconds(value: float) -> str:
    """Return a duration in the unit that suits it."""
    for below, factor, name in (
        (1e-3, 1e6, "µs"),
        (1.0, 1e3, "ms"),
        (60.0, 1.0, "s"),
        (3600.0, 1 / 60, "min"),
    ):
        if abs(value) < below and value:
            return f"{digits(value * factor)} {name}"
    return f"{digits(value / 3600)} h" if value else "0 s"


def scaled(value: float, base: int, names: tuple[str, ...]) -> str:
    """Return a value with the prefix that leaves the fewest digits."""
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value /= base
        power += 1
    return digits(value) + names[power]


def digits(value: float) -> str:
    """Return three digits, without trailing zeros."""
    if value == 0:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{min(places, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def ticks(most: float, unit: str) -> list[float]:
    """Return round numbers from 0 to at least ``most``."""
    if most <= 0:
        return [0.0, 1.0]
    prefix = 1024.0 ** math.floor(math.log(most, 1024)) if unit in ("bytes", "Bps") else 1.0
    rough = most / prefix / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = prefix * next(s * power for s in STEPS if s * power >= rough * (1 - 1e-9))
    return [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]
