"""What a Hello may say of its engines: each field has its bound, here are those of the whole.

Labels stand in every line of an engine's page, and bounds make lines: a Hello of 1 MiB, each
field of it within its own limit, came to a page of gigabytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.layout import Layout
from sidestep.errors import WireError
from sidestep.metrics.engine import LINE_BYTES
from sidestep.metrics.registry import MAX_ENGINES, Registry
from sidestep.protocol.limits import MAX_OPEN_VALUES
from sidestep.protocol.messages import EngineInfo

MAX_PARTS = 3 * MAX_ENGINES // 4
"""Versions of models that polled servers have: whatever they are, others find a place, too."""
MAX_NAMED = 4 * MAX_ENGINES
"""Engines that all streams name together: several may feed one."""
MAX_ENGINE_LABELS = 32
MAX_ENGINE_LABEL_CHARS = 2048
"""Of all labels of one engine together."""
MAX_SIZE = 32 << 10
"""Bytes, about, that one engine's description takes; vLLM's has 5 KiB."""
ENTRY = 24
"""Of them, what a text or a number takes beside its characters."""
PUNCTUATION = 4
"""Characters of a line that a label takes beside its name and value."""
MAX_EXCESS = 16 << 20
"""Bytes of page, about, that all engines may have over what as many ordinary ones have."""
ORDINARY_LABEL_CHARS = 192
ORDINARY_INFO_CHARS = 4096


def check(registry: Registry, named: int, infos: Sequence[EngineInfo]) -> None:
    """Whether the engines of a Hello can all be shown.

    ``named`` is how many other streams name.

    Raises:
        WireError: One cannot, or they are too many or too large; nothing has changed.
    """
    labels: dict[str, tuple[str, Mapping[str, str]]] = {}
    for info in infos:
        said = info.dialect, info.labels
        if labels.setdefault(info.id, said) != said:
            raise WireError("bad_label", f"{info.id} is named twice, with different labels")
        _check_size(registry, info)
        registry.check(info)
    if len(registry.engines) + len(labels.keys() - registry.engines.keys()) > MAX_ENGINES:
        raise _over(registry, "engines", f"more than {MAX_ENGINES} engines")
    new = sum(
        registry.layouts[dialect].tables.is_part(said)
        for name, (dialect, said) in labels.items()
        if name not in registry.engines
    )
    if new and registry.parts + new > MAX_PARTS:
        raise _over(registry, "engines", f"more than {MAX_PARTS} versions of models")
    if named + len(infos) > MAX_NAMED:
        raise _over(registry, "descriptions", f"streams name more than {MAX_NAMED} engines")
    _check_page(registry, infos)


def check_described(registry: Registry, info: EngineInfo) -> None:
    """Whether what is now said of an engine that has its place can be shown.

    Raises:
        WireError: It is too large; nothing has changed.
    """
    _check_size(registry, info)
    _check_page(registry, [info])


def _check_page(registry: Registry, infos: Sequence[EngineInfo]) -> None:
    named = {info.id for info in infos}
    everyone = (*registry.engines.values(), *registry.retired.values())
    others = sum(engine.excess_bytes for engine in everyone if engine.id not in named)
    if others + sum(excess(registry, info) for info in infos) > MAX_EXCESS:
        raise _over(registry, "descriptions", "labels and bounds make too large a page")


def excess(registry: Registry, info: EngineInfo) -> int:
    """Bytes that the page of ``info``'s engine can have over an ordinary one's, about."""
    chars = label_chars(info.labels)
    lines, families = _shape(registry.layouts[info.dialect])
    found = 0
    for buckets, bounds in info.bounds.items():
        more = len(bounds) - len(DEFAULTS.get(buckets, ()))
        if more > 0 and buckets not in registry.overrides:
            number, names = families.get(buckets, (0, 0))
            found += more * (number * (LINE_BYTES + chars) + names)
            lines += more * number
    told = sum(map(label_chars, info.info.values()))
    found += lines * max(chars - ORDINARY_LABEL_CHARS, 0)
    return found + max(told - ORDINARY_INFO_CHARS, 0)


def label_chars(labels: Mapping[str, str]) -> int:
    """Characters of a line that ``labels`` take."""
    return sum(len(name) + len(value) + PUNCTUATION for name, value in labels.items())


@functools.cache
def _shape(layout: Layout) -> tuple[int, dict[str, tuple[int, int]]]:
    """Lines of an ordinary page at most; by bucket family histograms and characters of names."""
    lines = 0
    families: dict[str, tuple[int, int]] = {}
    for placed in layout.assignments:
        row = placed.row
        children = MAX_OPEN_VALUES + 1 if placed.storage == "keyed" else max(len(row.closed), 1)
        lines += children * (len(row.bounds or DEFAULTS.get(row.buckets, ())) + 3)
        if row.buckets:
            number, names = families.get(row.buckets, (0, 0))
            families[row.buckets] = number + children, names + children * len(row.name)
    return lines, families


def _check_size(registry: Registry, info: EngineInfo) -> None:
    if len(info.labels) > MAX_ENGINE_LABELS or label_chars(info.labels) > MAX_ENGINE_LABEL_CHARS:
        raise _over(registry, "descriptions", f"{info.id}: too many labels, or too long ones")
    told = [info.labels, *info.info.values()]
    texts = [info.dialect, *info.info, *info.features, *info.bounds, *info.closed]
    texts += [text for labels in told for pair in labels.items() for text in pair]
    texts += [value for values in info.closed.values() for value in values]
    numbers = sum(map(len, info.bounds.values()))
    if sum(map(len, texts)) + ENTRY * (len(texts) + numbers) > MAX_SIZE:
        raise _over(registry, "descriptions", f"{info.id}: its description is too large")


def _over(registry: Registry, limit: str, detail: str) -> WireError:
    registry.limited[limit] += 1
    return WireError("over_limit", detail)
