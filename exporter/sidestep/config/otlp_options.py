"""Parsers of the settings ``--otlp.*``."""

from __future__ import annotations

import re
from collections.abc import Callable

from sidestep.config import options, parsing
from sidestep.config.scrape_targets import (
    HEADER_TEXT,
    MAX_HEADER_CHARS,
    Form,
    Header,
    address,
    is_header_name,
)
from sidestep.protocol.limits import MAX_LABEL_CHARS, is_printable

MIN_INTERVAL = 1.0
_ATTRIBUTE = re.compile(r"[A-Za-z][A-Za-z0-9_./-]{0,127}")


def endpoint(path: str) -> Callable[[object], str]:
    """Return a parser of a receiver's URL, to which it adds ``path`` where it has none; empty for none."""
    form = Form(path=path, usage="a URL", login="--otlp.header Authorization=...")

    def parse(value: object) -> str:
        given = parsing.text(value).strip()
        return address(given.rstrip("/"), form) if given else ""

    return parse


def header(value: object) -> Header:
    """Parse ``NAME=VALUE``; no error contains the value, which may be a secret."""
    name, equals, text = parsing.text(value).strip().partition("=")
    if not equals or not is_header_name(name):
        raise ValueError("must be NAME=VALUE, with the name of a header")
    if len(text) > MAX_HEADER_CHARS or not HEADER_TEXT.fullmatch(text):
        raise ValueError(f"must have a value in ASCII, {MAX_HEADER_CHARS} characters at most")
    return Header(name, text)


def headers(found: tuple[Header, ...]) -> tuple[Header, ...]:
    """Check that each header is given once."""
    options.check_unique(header.name.lower() for header in found)
    return found


def without_value(value: object) -> str:
    """Return the name of a header without its value."""
    name, equals, _ = str(value).partition("=")
    return f"{name}=***" if equals else "***"


def attribute(value: object) -> tuple[str, str]:
    """Parse ``NAME=VALUE`` of a resource attribute; an empty value removes it."""
    name, equals, text = parsing.text(value).strip().partition("=")
    if not equals or not _ATTRIBUTE.fullmatch(name):
        raise ValueError("must be NAME=VALUE, with the name of an attribute")
    if len(text) > MAX_LABEL_CHARS or not is_printable(text):
        raise ValueError(f"must have a printable value, {MAX_LABEL_CHARS} characters at most")
    return name, text


def attributes(found: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Check that each attribute is given once."""
    options.check_unique(name for name, _ in found)
    return found


def interval(value: object) -> float:
    """Parse the interval of pushes."""
    return parsing.number(value, MIN_INTERVAL, parsing.DAY, "a number of seconds")
