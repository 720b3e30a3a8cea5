"""Prometheus text 0.0.4 and OpenMetrics 1.0 from cached prefixes.

Names, labels and bounds of a series never change, so its text up to the value
is made once; a histogram that saw nothing since the last page is not even
rendered again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator

from prometheus_client.utils import floatToGoString

from sidestep.buckets import Bounds
from sidestep.catalogue.model import Kind, Same
from sidestep.engine import Engine, Key, Number
from sidestep.exposition import escape
from sidestep.histogram import Histogram
from sidestep.plan import Placed
from sidestep.registry import Registry
from sidestep.view import Family, children, combined, families, is_shared, labels_of, showing


def render(registry: Registry, *, openmetrics: bool = False, names: Collection[str] = ()) -> bytes:
    """The engines' page, without OpenMetrics' closing line.

    Its pieces are bytes, so that it is copied once: joining 20 MB of text and
    encoding them takes ten times as long.
    """
    found = pieces(registry, openmetrics=openmetrics, names=names)
    return b"".join(line for family in found for line in family)


def pieces(
    registry: Registry, *, openmetrics: bool = False, names: Collection[str] = ()
) -> Iterator[list[bytes]]:
    """The page, a family at a time; the registry may change between two of them."""
    for family in list(families(registry, names)):
        samples = _of_family(registry, family)
        if samples:
            head = header(family.name, family.kind, family.help, openmetrics=openmetrics)
            yield [head.encode(), *samples]


def _of_family(registry: Registry, family: Family) -> list[bytes]:
    if is_shared(family):
        return _shared(registry, family)
    if not family.places:
        return _samples(registry.engines.values(), family)
    out: list[bytes] = []
    for dialect, placed in family.places.items():
        engines = showing(registry, dialect, placed)
        if placed.where == "histogram":
            out += _histograms(engines, family, placed)
        elif placed.where == "scalars":
            out += _scalars(engines, family, placed)
        else:
            out += _samples(engines, family)
    return out


def _histograms(engines: Iterable[Engine], family: Family, placed: Placed) -> list[bytes]:
    out: list[bytes] = []
    # A histogram keeps its text under its own name only.
    alias = isinstance(placed.row.source, Same)
    places = list(zip(placed.values_of_label, placed.slots, strict=True))
    for engine in engines:
        histograms = engine.histograms
        for key, slot in places:
            histogram = histograms[slot]
            if histogram is not None:
                text = None if alias else histogram.cache
                out.append(text or _histogram_text(engine, family, key, histogram, alias=alias))
    return out


def _scalars(engines: Iterable[Engine], family: Family, placed: Placed) -> list[bytes]:
    lines: list[str] = []
    name, per = family.name, placed.row.per
    places = [
        (slot, (name, key)) for key, slot in zip(placed.values_of_label, placed.slots, strict=True)
    ]
    for engine in engines:
        values, texts = engine.values, engine.text
        for slot, place in places:
            value = values[slot]
            if value is not None:
                prefix = texts.get(place) or _prefix(engine, family, place[1])
                lines.append(f"{prefix}{value if per == 1 else value / per!r}\n")
    return ["".join(lines).encode()] if lines else []


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
    """``{a="x",b="y"}``, sorted by name and escaped; empty without labels."""
    if not labels:
        return ""
    pairs = (f'{name}="{escape(value)}"' for name, value in sorted(labels.items()))
    return "{" + ",".join(pairs) + "}"


def number(value: Number) -> str:
    """A sample's value: integers without a point, the rest as short as they round-trip."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)


def bound_text(bound: float) -> str:
    """``le`` as the engines write it, which is as Go does: ``0.5``, ``1e+06``."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]


def _samples(engines: Iterable[Engine], family: Family) -> list[bytes]:
    """Every other place: through the view."""
    out: list[bytes] = []
    for engine in engines:
        placed = family.places.get(engine.layout.dialect)
        alias = placed is not None and isinstance(placed.row.source, Same)
        for key, value in children(engine, family):
            if isinstance(value, Histogram):
                out.append(_histogram_text(engine, family, key, value, alias=alias))
            else:
                # Not kept: adapters and the like come and go.
                labels = label_text(labels_of(engine, family, key))
                out.append(f"{family.name}{labels} {value!r}\n".encode())
    return out


def _prefix(engine: Engine, family: Family, key: Key) -> str:
    text = family.name + label_text(labels_of(engine, family, key)) + " "
    engine.text[family.name, key] = text
    return text


def _histogram_text(
    engine: Engine, family: Family, key: Key, histogram: Histogram, *, alias: bool
) -> bytes:
    """The lines of one histogram, kept until it changes unless they have another's name."""
    if alias:
        return _histogram_of(engine, family, key, histogram)
    if histogram.cache is None:
        histogram.cache = _histogram_of(engine, family, key, histogram)
    return histogram.cache


def _histogram_of(engine: Engine, family: Family, key: Key, histogram: Histogram) -> bytes:
    """The lines of one histogram, from the frame kept beside the engine's other texts."""
    name = (family.name, key, histogram.bounds)
    frame = engine.frames.get(name)
    if frame is None:
        labels = labels_of(engine, family, key)
        frame = histogram_frame(family.name, labels, histogram.bounds, family.kind)
        engine.frames[name] = frame
    return fill(frame, histogram)


def histogram_frame(name: str, labels: dict[str, str], bounds: Bounds, kind: Kind) -> bytes:
    """A template with a place for every value: in bytes, for the page is."""
    if kind == "summary":
        shown = label_text(labels).replace("%", "%%")
        return f"{name}_count{shown} %d\n{name}_sum{shown} %b\n".encode()
    les = [*(bound_text(bound) for bound in bounds), "+Inf"]
    outer = label_text(labels)
    own = f"{outer[1:-1]}," if outer else ""
    lines = [f'{name}_bucket{{{own}le="{le}"}} ' for le in les] + [f"{name}_count{outer} "]
    counts = "".join(f"{line.replace('%', '%%')}%d\n" for line in lines)
    return f"{counts}{name}_sum{outer.replace('%', '%%')} %b\n".encode()


def fill(frame: bytes, histogram: Histogram) -> bytes:
    """The frame with ``histogram``'s state in it."""
    counts = histogram.cumulative
    # Without bounds it is a summary's, which shows no bucket.
    buckets = counts if histogram.bounds else ()
    return frame % (*buckets, counts[-1], repr(histogram.sum).encode())


def _shared(registry: Registry, family: Family) -> list[bytes]:
    out: list[bytes] = []
    for labels, value in combined(registry, family):
        if isinstance(value, Histogram):
            out.append(fill(histogram_frame(family.name, labels, value.bounds, family.kind), value))
        else:
            out.append(f"{family.name}{label_text(labels)} {number(value)}\n".encode())
    return out
