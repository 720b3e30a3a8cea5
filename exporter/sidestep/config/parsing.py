"""Parsers of single values.

A parser takes text, or a value of the TOML file, and raises ValueError with the end of an error
line.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

from sidestep.protocol.limits import COUNT_LIMIT, MAX_LABEL_CHARS, is_printable
from sidestep.transport.addresses import MAX_PORT, check_bindable, checked_endpoint

DAY = 86400.0
MAX_TENANTS = 120
_PATH = re.compile(r"[A-Za-z0-9._/-]+")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,127}")
_HOST_NAME = re.compile(r"[\w.-]{1,253}", re.ASCII)
_FAMILIES = re.compile(r"[a-zA-Z0-9_:*?!\[\]-]{1,256}")


def text(value: object) -> str:
    """Accept any text, but not a number in the file, nor a NUL, which no path can have."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("must be a string without NUL")
    return value


def path(value: object) -> str:
    """Accept a path that no other page of the exporter has."""
    given = text(value)
    if not given.startswith("/"):
        raise ValueError("must begin with /")
    if given == "/" or given.startswith(("/-/", "/api/")) or not _PATH.fullmatch(given):
        raise ValueError("must be a path of its own, of letters, digits and ._-/")
    return given


def is_label_name(name: str) -> bool:
    """Return whether an operator may give a label this name."""
    return _LABEL.fullmatch(name) is not None


def ingest_endpoint(value: object) -> str:
    """Accept an endpoint that has a path or a host; binding checks the rest."""
    given = text(value)
    check_bindable(given)
    return checked_endpoint(given)


def exporter_endpoint(value: object) -> str:
    """Accept the endpoint of an exporter to connect to."""
    given = text(value)
    if not given.startswith(("ipc://", "tcp://")):
        raise ValueError("must begin with ipc:// or tcp://")
    return checked_endpoint(given)


def optional_address(value: object) -> tuple[str, int] | None:
    """Parse ``host:port``, ``:port`` or ``[v6]:port``; None for an empty text.

    An empty host means all addresses.
    """
    if value == "":
        return None
    host, colon, port = text(value).rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) <= MAX_PORT:
        raise ValueError("must be host:port")
    return host.strip("[]"), int(port)


def host_name(value: object) -> str:
    """Accept the name of a host, and return it in lower case."""
    given = text(value)
    if not _HOST_NAME.fullmatch(given):
        raise ValueError("must be the name of a host, without a port")
    return given.lower().rstrip(".")


def droppable_label(value: object) -> str:
    """Accept the name of a label, except those that buckets and quantiles need."""
    given = text(value)
    if not is_label_name(given) or given in ("le", "quantile"):
        raise ValueError("must be the name of a label, and neither le nor quantile")
    return given


def family_pattern(value: object) -> str:
    """Accept a family name with wildcards."""
    given = text(value)
    if not _FAMILIES.fullmatch(given):
        raise ValueError("must be a family's name, in which * and ? stand for others")
    return given


def number(value: object, low: float, high: float, name: str) -> float:
    """Parse a number from ``low`` to ``high``; an error calls it ``name``."""
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not low <= found <= high:
        raise ValueError(f"must be {name}, {low:g} to {high:g}")
    return found


seconds = functools.partial(number, low=0.0, high=DAY, name="a number of seconds")
min_threshold = functools.partial(number, low=3.0, high=DAY, name="a number of seconds")
"""Parser of a time to wait for progress, which a busy machine may report only after 2 seconds."""
share = functools.partial(number, low=0.0, high=1.0, name="a number")


def positive_seconds(value: object) -> float:
    """Parse a duration above 0, since a limit of 0 looks like no limit."""
    found = seconds(value)
    if not found:
        raise ValueError("must be a number of seconds above 0")
    return found


def whole(value: object, low: int = 0, high: int = COUNT_LIMIT) -> int:
    """Parse a whole number from ``low`` to ``high``, by default one that engines can read."""
    digits = str(value)
    if not digits.isdecimal() or int(digits[: len(str(high)) + 1]) < low:
        raise ValueError(f"must be a whole number, {low} or above")
    if len(digits) > len(str(high)) or int(digits) > high:
        raise ValueError(f"must be {high} at most")
    return int(digits)


positive = functools.partial(whole, low=1)
tenants = functools.partial(whole, low=1, high=MAX_TENANTS)
"""Parser of a number of tenants whose series fit into a record of one engine."""


def tenant_rule(value: object) -> str:
    """Accept a property of requests that can name a tenant; empty: none."""
    given = text(value)
    name = given.removeprefix("header:")
    if given in ("", "cache-salt", "adapter", "priority", "id-prefix"):
        return given
    if name == given or not name or len(name) > MAX_LABEL_CHARS or not is_printable(name):
        raise ValueError("must be one of cache-salt, adapter, priority, id-prefix, header:NAME")
    return given


def boolean(value: object) -> bool:
    """Parse true or false, 1 or 0, yes or no."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


def one_of(*choices: str) -> Callable[[object], str]:
    """Return a parser that accepts ``choices`` only."""

    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return parse
