"""What the value of a setting may be.

A parser takes text, or what TOML has made of it, and raises ValueError with the
words that complete an error line.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from sidestep.protocol.limits import MAX_LABEL_CHARS, is_printable

DAY = 86400.0
OFTEN = 10.0
_PATH = re.compile(r"[A-Za-z0-9._/-]+")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,127}")
_FAMILIES = re.compile(r"[a-zA-Z0-9_:*?!\[\]-]{1,256}")


def text(value: object) -> str:
    """Any text; a number of the file is none."""
    if not isinstance(value, str):
        raise ValueError("must be a string")  # noqa: TRY004 - read() turns it into one line
    return value


def path(value: object) -> str:
    """Path of a page, which none of the exporter's others has."""
    given = text(value)
    if not given.startswith("/"):
        raise ValueError("must begin with /")
    if given == "/" or given.startswith(("/-/", "/api/")) or not _PATH.fullmatch(given):
        raise ValueError("must be a path of its own, of letters, digits and ._-/")
    return given


def named_label(value: object) -> tuple[str, str]:
    """``NAME=VALUE``."""
    name, equals, said = text(value).partition("=")
    if not equals or not said or not _LABEL.fullmatch(name):
        raise ValueError("must be NAME=VALUE, with the name of a label")
    if len(said) > MAX_LABEL_CHARS or not is_printable(said):
        raise ValueError(f"must have a printable value, {MAX_LABEL_CHARS} characters at most")
    return name, said


def source(value: object) -> str:
    """What an exporter calls itself; empty: by its host."""
    given = text(value)
    if len(given) > MAX_LABEL_CHARS // 2 or not is_printable(given):
        raise ValueError(f"must be printable, {MAX_LABEL_CHARS // 2} characters at most")
    return given


def forward_endpoint(value: object) -> str:
    """Of another exporter; empty: none."""
    given = text(value)
    if given and not given.startswith(("ipc://", "tcp://")):
        raise ValueError("must begin with ipc:// or tcp://")
    return given


def address(value: object) -> tuple[str, int]:
    """``host:port``, ``:port`` or ``[v6]:port``; an empty host is every address."""
    host, colon, port = text(value).rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) <= 65535:  # noqa: PLR2004
        raise ValueError("must be host:port")
    return host.strip("[]"), int(port)


def addresses(value: object) -> tuple[str, int] | None:
    """Likewise, or nothing at all: then nobody is served."""
    return None if value == "" else address(value)


def label(value: object) -> str:
    """Name of a label that series can do without: a bucket is none without its bound."""
    given = text(value)
    if not _LABEL.fullmatch(given) or given in ("le", "quantile"):
        raise ValueError("must be the name of a label, and neither le nor quantile")
    return given


def families(value: object) -> str:
    """A pattern of families' names."""
    given = text(value)
    if not _FAMILIES.fullmatch(given):
        raise ValueError("must be a family's name, in which * and ? stand for others")
    return given


def seconds(value: object) -> float:
    """A duration of at most a day."""
    return _number(value, DAY, "must be a number of seconds, 0 to 86400")


def age(value: object) -> float:
    """Likewise, but not nothing: a limit of 0 reads as none and would be the tightest."""
    found = seconds(value)
    if not found:
        raise ValueError("must be a number of seconds above 0")
    return found


def often(value: object) -> float:
    """Likewise, and often enough for whoever listens: what says nothing for 30 s is taken for gone."""
    found = age(value)
    if found > OFTEN:
        raise ValueError(
            f"must be {OFTEN:g} seconds at most: who says nothing for 30 is taken for gone"
        )
    return found


def share(value: object) -> float:
    """A part of a whole."""
    return _number(value, 1.0, "must be a number, 0 to 1")


def positive(value: object) -> int:
    """A whole number above 0."""
    digits = str(value)
    if not digits.isdecimal() or not int(digits):
        raise ValueError("must be a whole number above 0")
    return int(digits)


def whole(value: object) -> int:
    """A whole number, 0 included."""
    digits = str(value)
    if not digits.isdecimal():
        raise ValueError("must be a whole number")
    return int(digits)


def boolean(value: object) -> bool:
    """Yes or no, in a few words for each."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


def one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    """The parser that takes these words alone."""

    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return parse


def _number(value: object, limit: float, complaint: str) -> float:
    try:
        found = float(str(value))
    except ValueError:
        found = -1.0
    if not 0.0 <= found <= limit:
        raise ValueError(complaint)
    return found
