"""Numbers at the terminal."""

import math
from collections.abc import Callable

import pytest

from sidestep_tools import formatting

UNITS: list[tuple[Callable[[float], str], float, str]] = [
    (formatting.count, 0, "0"),
    (formatting.count, 812.4, "812"),
    (formatting.count, 999.4, "999"),
    (formatting.count, 999.6, "1.00k"),
    (formatting.count, 12_345, "12.3k"),
    (formatting.count, 99_960, "100k"),
    (formatting.count, 999_600, "1.00M"),
    (formatting.count, 123_456_789, "123M"),
    (formatting.count, 5e16, "50000T"),
    (formatting.rate, 0, "0"),
    (formatting.rate, 0.44, "0.44"),
    (formatting.rate, 9.996, "10.0"),
    (formatting.rate, 51_234.5, "51.2k"),
    (formatting.share, 0, "0%"),
    (formatting.share, 0.004, "0.4%"),
    (formatting.share, 0.0096, "1%"),
    (formatting.share, 1, "100%"),
    (formatting.duration, 0, "0s"),
    (formatting.duration, 0.000_84, "0.84ms"),
    (formatting.duration, 0.0123, "12.3ms"),
    (formatting.duration, 0.1234, "123ms"),
    (formatting.duration, 0.9996, "1.00s"),
    (formatting.duration, 12.34, "12.3s"),
    (formatting.duration, 59.6, "1m00s"),
    (formatting.duration, 99.96, "1m40s"),
    (formatting.duration, 3599.7, "1h00m"),
    (formatting.duration, 90_000, "1d01h"),
    (formatting.age, 0.4, "400ms"),
    (formatting.age, 31.4, "31s"),
    (formatting.age, 59.7, "1m00s"),
]
EACH = [formatting.count, formatting.rate, formatting.share, formatting.duration, formatting.age]


@pytest.mark.parametrize(("function", "value", "text"), UNITS)
def test_units(function: Callable[[float], str], value: float, text: str) -> None:
    """A number keeps about three digits and gets the unit of its size."""
    assert function(value) == text


@pytest.mark.parametrize("function", EACH)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_unknown(function: Callable[[float | None], str], value: float | None) -> None:
    """What is not known is not a zero, and neither is a page's NaN."""
    assert function(value) == "--"
