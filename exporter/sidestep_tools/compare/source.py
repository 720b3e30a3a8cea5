"""The inputs as a user names them: a file or an address, labels that select, and a time range."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from sidestep.errors import ConfigError

_SOURCE = re.compile(
    r"(?P<place>[^{}]+?)(?:\{(?P<labels>[^{}]*)\})?(?:@(?P<range>[^@{}]*))?", re.DOTALL
)
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*(?:"([^"\\]*)"|([^",\s]+))\s*')
_HOST = re.compile(r"(?:[\w.-]+|\[[\da-f:.]+\]):\d+(?:/.*)?")
"""Matches an address without http://."""
_AGO = re.compile(r"-(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


class Source(NamedTuple):
    """One input.

    Attributes:
        text: What the user gave, for messages.
        labels: What to select; empty: everything.
    """

    text: str
    place: str
    labels: Mapping[str, str]
    start: datetime | None = None
    end: datetime | None = None

    @property
    def is_url(self) -> bool:
        """Return whether it is an address."""
        return self.place.startswith(("http://", "https://"))


def parse(text: str) -> Source:
    """Return the input of ``PLACE[{LABEL=VALUE,...}][@START/END]``."""
    if os.path.exists(text):  # noqa: PTH110 - Path.exists raises for long texts
        return Source(text, text, {})
    found = _SOURCE.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r}: must be like PLACE{{LABEL=VALUE,...}}@START/END")
    place, labels = found["place"], _labels(text, found["labels"] or "")
    if _HOST.fullmatch(place) and not os.path.exists(place):  # noqa: PTH110
        place = f"http://{place}"
    if found["range"] is None:
        return Source(text, place, labels)
    try:
        start, end = map(_time, found["range"].split("/"))
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"{text}: behind @ must be START/END, each a time such as 2026-11-27T10:00:00Z, Unix"
            " seconds, -30m or now"
        ) from None
    if start >= end:
        raise ConfigError(f"{text}: the range ends before it begins")
    return Source(text, place, labels, start, end)


def _labels(text: str, inside: str) -> dict[str, str]:
    labels = {}
    for pair in filter(str.strip, inside.split(",")):
        found = _LABEL.fullmatch(pair)
        if found is None:
            raise ConfigError(f'{text}: labels must be like {{model_name="m",engine="0"}}')
        labels[found[1]] = found[2] or found[3] or ""
    return labels


def _time(text: str) -> datetime:
    """Return a time, in UTC where it names no zone; raise ValueError or others if it is none."""
    now = datetime.now(timezone.utc)
    if text == "now":
        return now
    if ago := _AGO.fullmatch(text):
        return now - timedelta(**{_UNITS[ago[2]]: float(ago[1])})
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return datetime.fromtimestamp(float(text), timezone.utc)
    time = datetime.fromisoformat(text.replace("Z", "+00:00"))
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)
