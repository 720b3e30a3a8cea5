"""Conversion of values that a KV connector reports into self-described families.

Values that the wire does not allow are left out; the other values of the payload are kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, TypeVar

from sidestep.catalog.row import Kind, Row, Sampled
from sidestep.engines.vllm.connector_rows import ROWS
from sidestep.protocol.limits import MAX_LABEL_CHARS, MAX_OBSERVATIONS, VALUE_LIMIT, is_printable
from sidestep.protocol.self_described import Family, Sample

Payload = Mapping[object, object]
Children = dict[tuple[str, ...], list[float]]
"""Reported values by own label values, in the order of the row's ``own_labels``."""

KNOWN: Final = {row.name: row for row in ROWS}
_NUMBER: Final = (int, float)
_LIST: Final = (list, tuple)
"""Tuples for ``isinstance``, made once: it runs for each value."""
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,127}\Z")
_UNKNOWN_LABELS: Final = tuple(f"label_{number}" for number in range(1, 10))
_UNKNOWN_SECONDS_BOUNDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""Bounds that vLLM exposes for a family without bounds: the defaults of prometheus_client."""
_UNKNOWN_SIZE_BOUNDS: Final = tuple(float(10**power) for power in range(11))

T = TypeVar("T")


def families_of(row: Row, children: Children) -> Iterator[Family]:
    """Yield the families of ``row``, in parts that fit the wire's limits."""
    samples: list[Sample] = []
    for labels, values in children.items():
        if row.kind == "histogram":
            samples += [Sample(list(labels), observations=part) for part in _parts(values)]
        elif row.kind == "counter":
            total = math.fsum(value for value in values if value > 0)
            if total <= VALUE_LIMIT:
                samples.append(Sample(list(labels), total))
        elif values:
            samples.append(Sample(list(labels), values[-1]))
    if not samples:
        return
    own = list(row.own_labels)
    for part in _parts(samples):
        if row.name in KNOWN:
            yield Family(row.name, row.kind, own, part)
        else:
            yield Family(row.name, row.kind, own, part, row.help, list(row.bounds))


def _parts(values: list[T]) -> Iterator[list[T]]:
    """Yield ``values`` in lists within the wire's limit; one empty list if there are none."""
    for start in range(0, max(len(values), 1), MAX_OBSERVATIONS):
        yield values[start : start + MAX_OBSERVATIONS]


def numbers_of(value: object) -> list[float]:
    """Return the numbers in ``value``, a number or a list, that the wire allows."""
    values = value if isinstance(value, _LIST) else (value,)
    return [
        float(each)
        for each in values
        if isinstance(each, _NUMBER) and -VALUE_LIMIT <= each <= VALUE_LIMIT
    ]


def records_of(value: object) -> Iterator[Payload]:
    """Yield the mappings in ``value``, a mapping or a list."""
    for each in value if isinstance(value, _LIST) else (value,):
        if isinstance(each, Mapping):
            yield each


def label_values(values: Iterable[object]) -> tuple[str, ...] | None:
    """Return ``values`` as the label values that vLLM exposes; None if one is not allowed."""
    texts = []
    for value in values:
        if isinstance(value, str):
            text = value
        elif isinstance(value, _NUMBER) and -VALUE_LIMIT <= value <= VALUE_LIMIT:
            text = str(value)
        else:
            return None
        if len(text) > MAX_LABEL_CHARS or not is_printable(text):
            return None
        texts.append(text)
    return tuple(texts)


def uncatalogued_row(name: str, kind: Kind, labels: int) -> Row | None:
    """Return a row for a family outside the catalogue, from a tier or a user's spec."""
    countable = (kind == "counter") == name.endswith("_total")
    if not countable or not _NAME.match(name) or labels > len(_UNKNOWN_LABELS):
        return None
    bounds = _UNKNOWN_SECONDS_BOUNDS if "seconds" in name else _UNKNOWN_SIZE_BOUNDS
    return Row(
        name=name,
        kind=kind,
        source=Sampled(),
        help="Reported by the KV connector of the engine.",
        labels=_UNKNOWN_LABELS[:labels],
        bounds=bounds if kind == "histogram" else (),
    )
