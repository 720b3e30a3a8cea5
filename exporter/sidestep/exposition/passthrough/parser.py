"""Strict parser for the lines of Prometheus' text format 0.0.4, and for those of OpenMetrics that engines write.

An invalid line raises WireError with a fixed reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from sidestep.errors import WireError

PageKind = Literal["counter", "gauge", "histogram", "summary", "untyped"]
Labels = tuple[tuple[str, str], ...]
"""Names and values; values are escaped as on the line."""

KINDS: Mapping[str, PageKind] = {
    "counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
    "summary": "summary",
    "untyped": "untyped",
    "unknown": "untyped",
}
MAX_LINE_BYTES = 16 << 10
MAX_VALUE_BYTES = 128
"""Length limit of a value and its timestamp."""

_NAME = rb"[a-zA-Z_:][a-zA-Z0-9_:]*"
# A NUL ends the page for Prometheus.
_LABEL = rb'[a-zA-Z_][a-zA-Z0-9_]*[ \t]*=[ \t]*"[^"\\\0]*(?:\\[\\n"][^"\\\0]*)*"'
_HEAD = re.compile(
    rb"[ \t]*(%b)[ \t]*(?:\{[ \t]*(?:(%b(?:[ \t]*,[ \t]*%b)*)(?:[ \t]*,)?[ \t]*)?\})?[ \t]+"
    % (_NAME, _LABEL, _LABEL)
)
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\]*(?:\\.[^"\\]*)*)"')
"""Matches labels in text that ``_HEAD`` has matched."""
_SHORT = re.compile(rb"[+-]?\d{1,30}(?:\.\d{0,30})?(?:[eE][+-]?\d{1,2})?")
"""Numbers that cannot exceed a double; nearly every value."""
_LONG = re.compile(
    rb"([+-]?(?:(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?|(?i:inf(?:inity)?))|(?i:nan))"
    rb"(?:[ \t]+(\d{1,18}))?[ \t]*"
)
"""Any other number; no negative timestamp, for which Prometheus rejects the whole page."""
_OPENMETRICS = re.compile(rb"(\S+)(?: (\d{1,15})(?:\.(\d*))?)?(?: # \{.*)?", re.DOTALL)
"""A value of OpenMetrics: with a timestamp in seconds and an exemplar, or without."""
_COMMENT = re.compile(rb"[ \t]*#[ \t]*(HELP|TYPE)[ \t]+(%b)(?:[ \t]+(.*))?" % _NAME, re.DOTALL)
ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
"""Escapes of a label value."""
_ESCAPES = {"\\\\": "\\", "\\n": "\n", '\\"': '"'}
_LABEL_ESCAPE = re.compile(r'\\[\\n"]')
_HELP_ESCAPE = re.compile(r"\\[\\n]")

is_plain_value = _SHORT.fullmatch
"""Match a common value without a timestamp."""


class SeriesHead(NamedTuple):
    """The text before a value, which begins at ``end``."""

    end: int
    name: str
    labels: Labels


class Comment(NamedTuple):
    """A readable HELP or TYPE line."""

    is_type: bool
    name: str
    text: str


def parse_head(line: bytes) -> SeriesHead:
    """Parse the series of a sample line."""
    if len(line) > MAX_LINE_BYTES:
        raise WireError("too_long")
    found = _HEAD.match(line)
    if found is None:
        raise WireError("bad_line")
    labels: Labels = ()
    if found[2]:
        try:
            labels = tuple(_PAIR.findall(found[2].decode()))
        except UnicodeDecodeError:
            raise WireError("not_utf8") from None
        names = dict(labels)
        if len(names) < len(labels) or "__name__" in names:
            raise WireError("bad_label")
    return SeriesHead(found.end(), found[1].decode(), labels)


def parse_value(text: bytes) -> bytes:
    """Return the value and, after a blank, the timestamp if there is one.

    Raises:
        WireError: This is no number, or exceeds a double, which a reader would reject.
    """
    if is_plain_value(text):
        return text
    found = _LONG.fullmatch(text) if len(text) <= MAX_VALUE_BYTES else None
    if found is None:
        raise WireError("bad_line")
    number, stamp = found.groups()
    if math.isinf(float(number)) and b"n" not in number.lower():
        raise WireError("bad_line")
    return number if stamp is None else b"%b %b" % (number, stamp)


def parse_openmetrics_value(text: bytes) -> bytes:
    """Return the value and, after a blank, the timestamp in milliseconds if there is one; no exemplar."""
    found = _OPENMETRICS.fullmatch(text)
    if found is None:
        raise WireError("bad_line")
    number, seconds, fraction = found.groups()
    if seconds is None:
        return parse_value(number)
    return parse_value(b"%b %b%b" % (number, seconds, (fraction or b"").ljust(3, b"0")[:3]))


def parse_comment(line: bytes) -> Comment | None:
    """Parse a HELP or TYPE line; return None for any other comment."""
    if len(line) > MAX_LINE_BYTES:
        raise WireError("too_long")
    found = _COMMENT.fullmatch(line)
    if found is None:
        return None
    if b"\0" in line:
        raise WireError("bad_line")
    try:
        text = (found[3] or b"").decode()
    except UnicodeDecodeError:
        raise WireError("not_utf8") from None
    if found[1] == b"HELP":
        return Comment(False, found[2].decode(), _unescape(text, _HELP_ESCAPE))
    if text.strip(" \t").lower() not in KINDS:
        raise WireError("unknown_kind")
    return Comment(True, found[2].decode(), text.strip(" \t").lower())


def timestamp_in_seconds(text: bytes) -> bytes:
    """Convert the timestamp after a value from milliseconds to OpenMetrics' seconds."""
    number, blank, stamp = text.partition(b" ")
    if not blank:
        return number
    digits = stamp.zfill(4)
    return b"%b %b.%b" % (number, digits[:-3], digits[-3:])


def series_text(name: str, labels: Labels) -> bytes:
    """Return the series as on a page, without the blank before a value."""
    if not labels:
        return name.encode()
    pairs = ",".join([f'{label}="{text}"' for label, text in labels])
    return f"{name}{{{pairs}}}".encode()


def unescape_labels(labels: Labels) -> dict[str, str]:
    """Return ``labels`` without escapes."""
    return {name: _unescape(text, _LABEL_ESCAPE) for name, text in labels}


def escape(text: str) -> str:
    """Escape a label value, as both formats do."""
    return text.translate(ESCAPES)


def _unescape(text: str, escaped: re.Pattern[str]) -> str:
    return escaped.sub(lambda found: _ESCAPES[found[0]], text) if "\\" in text else text
