"""Parsers of the settings ``--prices.*``."""

from __future__ import annotations

import decimal
from operator import attrgetter

from sidestep.catalog.prices import PARTS, TOKENS, Price
from sidestep.config import options, parsing

FORM = "MODEL,input=PRICE[,cached=PRICE][,transferred=PRICE],output=PRICE"
MAX_PRICE = 1_000_000
MAX_PRICES = 256
_NAMES = ("input", "cached", "transferred", "output")
_PRICE_ERROR = f"must be a price from 0 to {MAX_PRICE:,}, with 6 decimals at most"


def parse(value: object) -> Price:
    """Return the prices of one ``--prices.model``, or of a key and its value in the file's table."""
    if isinstance(value, tuple):
        model, given = value
        if not isinstance(given, dict):
            raise ValueError("must be a table with input and output")  # noqa: TRY004 - likewise
        if unknown := sorted(given.keys() - set(_NAMES)):
            raise ValueError(f"{unknown[0]!r} is no price; known are {', '.join(_NAMES)}")
        options.check_text("a model", model)
    else:
        model, *rest = (part.strip() for part in parsing.text(value).split(","))
        given = options.parse(rest, _NAMES, {})
        options.check_text("a model", model)
    if not model or "input" not in given or "output" not in given:
        raise ValueError(f"must be {FORM}")
    computed = _parts(given["input"])
    cached = _parts(given["cached"]) if "cached" in given else computed
    transferred = _parts(given.get("transferred", 0))
    return Price(model, computed, cached, _parts(given["output"]), transferred)


def shown(value: object) -> str:
    """Format ``value`` for an error line."""
    return str(value[0]) if isinstance(value, tuple) else str(value)


collect = options.collector(attrgetter("model"), MAX_PRICES, "; give each model's prices once")


def gpu_hour(value: object) -> float | None:
    """Parse the price of an hour of a GPU; None if there is none."""
    return None if value in ("", None) else float(_number(value))


def _parts(value: object) -> int:
    return int(_number(value) * (PARTS // TOKENS))


def _number(value: object) -> decimal.Decimal:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError(_PRICE_ERROR)  # noqa: TRY004 - read() turns it into one line
    try:
        found = decimal.Decimal(str(value))
    except decimal.InvalidOperation:
        raise ValueError(_PRICE_ERROR) from None
    if not (found.is_finite() and 0 <= found <= MAX_PRICE) or found % 1 != round(found % 1, 6):
        raise ValueError(_PRICE_ERROR)
    return found
