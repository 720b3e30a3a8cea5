"""The text format: headers, labels, numbers, and the lines of a histogram."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.utils import floatToGoString

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.model import Kind
from sidestep.exposition.passthrough.parser import escape
from sidestep.metrics.exemplars import Exemplar, Exemplars

LABELS_PLACEHOLDER = b"\0"
"""Stands for the labels in a histogram's lines; no name and no bound has such a byte."""


def header(name: str, kind: str, text: str, *, openmetrics: bool) -> str:
    """Return HELP and TYPE lines; OpenMetrics names a counter's family without its suffix."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        escaped = escaped.replace('"', '\\"')
        if kind == "counter" and name.endswith("_total"):
            name = name.removesuffix("_total")
        elif kind == "counter":
            # OpenMetrics has no counters without the suffix; this keeps the name.
            kind = "unknown"
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def label_text(labels: dict[str, str]) -> str:
    """Return ``a="x",b="y"``, sorted by name and escaped."""
    return ",".join([f'{name}="{escape(value)}"' for name, value in sorted(labels.items())])


def series_text(name: str, pairs: str) -> str:
    """Return the text before a value: name, labels if any, and a blank."""
    return f"{name}{{{pairs}}} " if pairs else f"{name} "


def bound_text(bound: float) -> str:
    """Format ``le`` as the engines and Go do: ``0.5``, ``1e+06``."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def histogram_template(name: str, kind: Kind, bounds: Bounds) -> bytes:
    """Return a histogram's lines with a placeholder for each value and for the labels.

    The values: cumulative counts (none for a summary), the number of observations, their sum.

    All histograms with this name and these bounds share the template: inserting labels takes a
    tenth of the time of inserting values, and a template per series would need as much memory as
    the page.
    """
    index = LABELS_PLACEHOLDER.decode()
    outer = f"{{{index}}}"
    lines = [f"{name}_count{outer} %d\n", f"{name}_sum{outer} %a\n"]
    if kind != "summary":
        les = [*(bound_text(bound) for bound in bounds), "+Inf"]
        lines[:0] = [f'{name}_bucket{{{index},le="{le}"}} %d\n' for le in les]
    return "".join(lines).encode()


def with_exemplars(lines: bytes, exemplars: Exemplars, buckets: Sequence[int]) -> bytes:
    """Return a histogram's lines with its exemplars, as OpenMetrics has them.

    Args:
        lines: The lines, which begin with those of the buckets.
        exemplars: The exemplars; those of a bucket without a line go to the next one with a line.
        buckets: Indexes of the buckets that have lines, in the order of the lines.
    """
    of_line: dict[int, Exemplar] = {}
    for bucket, one in exemplars.items():
        line = bisect_left(buckets, bucket)
        if line not in of_line or of_line[line].time <= one.time:
            of_line[line] = one
    parts = lines.split(b"\n")
    for line, one in of_line.items():
        context = b'{trace_id="%b",span_id="%b"}' % (one.trace_id.encode(), one.span_id.encode())
        parts[line] += b" # %b %a %.3f" % (context, one.value, one.time)
    return b"\n".join(parts)
