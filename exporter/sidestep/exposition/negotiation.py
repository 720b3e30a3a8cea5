"""Formats of a metrics page, and their choice by an Accept header."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Format = Literal["text", "openmetrics", "protobuf"]

CONTENT_TYPES: Mapping[Format, str] = {
    "text": "text/plain; version=0.0.4; charset=utf-8",
    "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
    "protobuf": (
        "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily;"
        " encoding=delimited"
    ),
}
_MEDIA: Mapping[str, Format] = {
    "application/vnd.google.protobuf": "protobuf",
    "application/openmetrics-text": "openmetrics",
    "text/plain": "text",
}
_NEEDED: Mapping[Format, Mapping[str, str]] = {
    "text": {"version": "0.0.4"},
    "openmetrics": {"version": "1.0.0"},
    "protobuf": {"proto": "io.prometheus.client.MetricFamily", "encoding": "delimited"},
}
"""Required values of the media type's options; only protobuf's must be present."""


def negotiate(accept: str, *, protobuf: bool = False) -> Format:
    """Return the format that an Accept header prefers; text if equal or without preference.

    Routers send no header or ``*/*`` and read text only. ``protobuf`` offers that format; a client
    that weighs it as highly as another gets it.
    """
    weights: dict[Format, float] = {"text": 0.0, "openmetrics": 0.0, "protobuf": 0.0}
    for part in accept.split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        found = _MEDIA.get(media.lower())
        options = dict(option.partition("=")[::2] for option in parameters)
        if found is None or not _fits(found, options):
            continue
        try:
            weights[found] = max(weights[found], float(options.get("q", "1")))
        except ValueError:
            continue
    if protobuf and weights["protobuf"] and weights["protobuf"] >= max(weights.values()):
        return "protobuf"
    return "openmetrics" if weights["openmetrics"] > weights["text"] else "text"


def _fits(found: Format, options: Mapping[str, str]) -> bool:
    needed = _NEEDED[found]
    if found == "protobuf" and not needed.keys() <= options.keys():
        return False
    return all(options.get(name, wanted).strip('"') == wanted for name, wanted in needed.items())
