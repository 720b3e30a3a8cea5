"""Parsers of the settings ``--otlp.*``."""

from __future__ import annotations

from collections.abc import Callable

from sidestep.config import parsing
from sidestep.config.scrape_targets import Form, address

MIN_INTERVAL = 1.0


def endpoint(path: str) -> Callable[[object], str]:
    """Return a parser of a receiver's URL, to which it adds ``path`` where it has none; empty for none."""
    form = Form(path=path, usage="a URL", login="OTEL_EXPORTER_OTLP_HEADERS")

    def parse(value: object) -> str:
        given = parsing.text(value).strip()
        return address(given.rstrip("/"), form) if given else ""

    return parse


def interval(value: object) -> float:
    """Parse the interval of pushes."""
    return parsing.number(value, MIN_INTERVAL, parsing.DAY, "a number of seconds")
