"""The words of a text page: headers, labels, numbers, and the lines of a histogram."""

from __future__ import annotations

import math

from prometheus_client.utils import floatToGoString

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.model import Kind
from sidestep.exposition.passthrough.parser import escape
from sidestep.metrics.engine import Number

LABELS_PLACEHOLDER = b"\0"
"""Where labels come in a histogram's lines: no name and no bound has such a byte."""


def header(name: str, kind: str, text: str, *, openmetrics: bool) -> str:
    """HELP and TYPE lines; OpenMetrics names a counter's family without its suffix."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        escaped = escaped.replace('"', '\\"')
        if kind == "counter" and name.endswith("_total"):
            name = name.removesuffix("_total")
        elif kind == "counter":
            # There is no other way to keep such a name there.
            kind = "unknown"
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def label_text(labels: dict[str, str]) -> str:
    """``a="x",b="y"``, sorted by name and escaped."""
    return ",".join([f'{name}="{escape(value)}"' for name, value in sorted(labels.items())])


def series_text(name: str, pairs: str) -> str:
    """What stands before a value: a name, its labels' text where it has any, a blank."""
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def format_number(value: Number) -> str:
    """A sample's value: integers without a point, the rest as short as they round-trip."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)


def bound_text(bound: float) -> str:
    """``le`` as the engines write it, which is as Go does: ``0.5``, ``1e+06``."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def histogram_template(name: str, kind: Kind, bounds: Bounds, *, labelled: bool) -> bytes:
    """A histogram's lines with a place for every value, and ``PLACE`` for its labels' text.

    The values: cumulative counts, none of a summary; how many there are; their sum.

    All that have the name and the bounds share it: to put labels into what is filled is a
    tenth of filling it, and a frame of each one's own would take as much room as the page.
    """
    index = LABELS_PLACEHOLDER.decode()
    outer = f"{{{index}}}" if labelled else ""
    lines = [f"{name}_count{outer} %d\n", f"{name}_sum{outer} %a\n"]
    if kind != "summary":
        inner = f"{index}," if labelled else ""
        les = [*(bound_text(bound) for bound in bounds), "+Inf"]
        lines[:0] = [f'{name}_bucket{{{inner}le="{le}"}} %d\n' for le in les]
    return "".join(lines).encode()
