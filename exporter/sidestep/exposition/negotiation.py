"""The formats of a metrics page, and which of them an Accept header asks for."""

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
"""What options of the media type must say where they are given; protobuf's must be."""


def negotiate(accept: str, *, protobuf: bool = False) -> Format:
    """The format that an Accept header prefers; text where equal or unasked.

    Routers ask for nothing or for ``*/*`` and read text only. ``protobuf``: whether it is offered;
    who weighs it as much as another can read all that it says.
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
