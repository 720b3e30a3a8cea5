"""Prometheus text 0.0.4 and OpenMetrics 1.0 from cached prefixes.

Names, labels and bounds of a series never change, so its text up to the value
is made once; a histogram that saw nothing since the last page is not even
rendered again.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from sidestep.buckets import Bounds
from sidestep.catalogue.model import Same
from sidestep.histogram import Histogram
from sidestep.registry import Engine, Key, Number, Registry
from sidestep.view import Family, children, combined, families, is_shared, labels_of


def render(
    registry: Registry, *, openmetrics: bool = False, names: Collection[str] = ()
) -> list[str]:
    """The engines' page in pieces to be joined; without OpenMetrics' closing line."""
    out: list[str] = []
    for family in families(registry, names):
        samples = _shared(registry, family) if is_shared(family) else _samples(registry, family)
        if samples:
            out.append(header(family.name, family.kind, family.help, openmetrics=openmetrics))
            out += samples
    return out


def header(name: str, kind: str, text: str, *, openmetrics: bool) -> str:
    """HELP and TYPE lines; OpenMetrics names a counter's family without its suffix."""
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        escaped = escaped.replace('"', '\\"')
        if kind == "counter":
            name = name.removesuffix("_total")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def label_text(labels: dict[str, str]) -> str:
    """``{a="x",b="y"}``, sorted by name and escaped; empty without labels."""
    if not labels:
        return ""
    pairs = (f'{name}="{escape(value)}"' for name, value in sorted(labels.items()))
    return "{" + ",".join(pairs) + "}"


def escape(value: str) -> str:
    """A label value as both formats write it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def number(value: Number) -> str:
    """A sample's value: integers without a point, the rest as short as they round-trip."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)


def bound_text(bound: float) -> str:
    """``le`` as the engines write it: always a float."""
    return repr(float(bound))


def _samples(registry: Registry, family: Family) -> list[str]:
    out: list[str] = []
    # A histogram keeps its text under its own name only.
    alias = family.placed is not None and isinstance(family.placed.row.source, Same)
    for engine in registry.engines.values():
        for key, value in children(engine, family):
            if isinstance(value, Histogram):
                text = None if alias else value.cache
                if text is None:
                    text = _histogram_of(engine, family, key, value)
                    value.cache = None if alias else text
                out.append(text)
            else:
                prefix = engine.text.get((family.name, key)) or _prefix(engine, family, key)
                out.append(f"{prefix}{value!r}\n")
    return out


def _prefix(engine: Engine, family: Family, key: Key) -> str:
    text = family.name + label_text(labels_of(engine, family, key)) + " "
    engine.text[family.name, key] = text
    return text


def _histogram_of(engine: Engine, family: Family, key: Key, histogram: Histogram) -> str:
    """The lines of one histogram, from the frame kept beside the engine's other texts."""
    name = (family.name, key, histogram.bounds)
    frame = engine.frames.get(name)
    if frame is None:
        frame = histogram_frame(family.name, labels_of(engine, family, key), histogram.bounds)
        engine.frames[name] = frame
    return fill(frame, histogram)


def histogram_frame(name: str, labels: dict[str, str], bounds: Bounds) -> list[str]:
    """Alternately the text before a value, and a place for the value."""
    les = [*(bound_text(bound) for bound in bounds), "+Inf"]
    inner = label_text(labels)[1:-1]
    own = f"{inner}," if inner else ""
    before = [f'{name}_bucket{{{own}le="{le}"}} ' for le in les]
    outer = label_text(labels)
    before += [f"{name}_count{outer} ", f"{name}_sum{outer} "]
    frame: list[str] = []
    for index, text in enumerate(before):
        frame += ["\n" + text if index else text, ""]
    return [*frame, "\n"]


def fill(frame: list[str], histogram: Histogram) -> str:
    """The frame with ``histogram``'s state in it."""
    counts = list(map(str, histogram.cumulative))
    frame[1:-1:2] = [*counts, counts[-1], repr(histogram.sum)]
    return "".join(frame)


def _shared(registry: Registry, family: Family) -> list[str]:
    out: list[str] = []
    for labels, value in combined(registry, family):
        if isinstance(value, Histogram):
            out.append(fill(histogram_frame(family.name, labels, value.bounds), value))
        else:
            out.append(f"{family.name}{label_text(labels)} {number(value)}\n")
    return out
