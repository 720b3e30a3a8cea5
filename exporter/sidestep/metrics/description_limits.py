"""Limits on the engine descriptions in Hellos.

Each field has its own limit in ``protocol.messages``. But labels are repeated in every line of a page, and
each bucket bound adds lines: without further limits, a valid Hello of 1 MiB made a page of gigabytes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from sidestep.catalog.buckets import DEFAULTS
from sidestep.catalog.layout import Layout
from sidestep.errors import WireError
from sidestep.metrics.exposed_engines import MAX_ENGINES
from sidestep.metrics.quotas import LINE_BYTES, label_chars
from sidestep.metrics.registry import Registry
from sidestep.protocol.limits import MAX_OPEN_VALUES
from sidestep.protocol.messages import EngineInfo

MAX_PARTS = 3 * MAX_ENGINES // 4
"""Most model versions of polled servers; the rest of ``MAX_ENGINES`` is for other engines."""
MAX_NAMED = 4 * MAX_ENGINES
"""Most engines in the Hellos of all streams; several streams may name the same engine."""
MAX_ENGINE_LABELS = 32
MAX_ENGINE_LABEL_CHARS = 2048
"""Most labels of one engine, and most characters of these together."""
MAX_SIZE = 32 << 10
"""Most bytes of one engine's description, approximately; vLLM's takes 5 KiB."""
ENTRY_BYTES = 24
"""Approximate bytes of a text or a number besides its characters."""
MAX_EXCESS = 16 << 20
"""Most bytes by which the page of all engines may exceed a page of as many ordinary engines."""
ORDINARY_LABEL_CHARS = 192
ORDINARY_INFO_CHARS = 4096


def check_engines(registry: Registry, named: int, infos: Sequence[EngineInfo]) -> None:
    """Check that the engines of a Hello can be registered; other streams name ``named`` engines.

    Raises:
        WireError: An engine is invalid, or there are too many, or their descriptions are too large.
    """
    described: dict[str, tuple[str, Mapping[str, str]]] = {}
    for info in infos:
        found = info.dialect, info.labels
        if described.setdefault(info.id, found) != found:
            raise WireError("bad_label", f"{info.id} is named twice, with different labels")
        _check_size(registry, info)
        registry.check(info)
    new = described.keys() - registry.engines.keys()
    if len(registry.engines) + len(new) > MAX_ENGINES:
        raise registry.over_limit("engines", f"more than {MAX_ENGINES} engines")
    parts = 0
    for dialect, labels in map(described.__getitem__, new):
        parts += registry.layouts[dialect].tables.is_part(labels)
    if parts and registry.parts + parts > MAX_PARTS:
        raise registry.over_limit("engines", f"more than {MAX_PARTS} versions of models")
    if named + len(infos) > MAX_NAMED:
        raise registry.over_limit("descriptions", f"streams name more than {MAX_NAMED} engines")
    _check_page(registry, infos)


def excess(registry: Registry, info: EngineInfo) -> int:
    """Return by how many bytes the engine's page may exceed an ordinary one's, approximately."""
    chars = label_chars(info.labels)
    lines, families = _ordinary_page(registry.layouts[info.dialect])
    found = 0
    for buckets, bounds in info.bounds.items():
        more = len(bounds) - len(DEFAULTS.get(buckets, ()))
        if more > 0 and buckets not in registry.series.overrides:
            histograms, name_chars = families.get(buckets, (0, 0))
            found += more * (histograms * (LINE_BYTES + chars) + name_chars)
            lines += more * histograms
    info_chars = sum(map(label_chars, info.info.values()))
    found += lines * max(chars - ORDINARY_LABEL_CHARS, 0)
    return found + max(info_chars - ORDINARY_INFO_CHARS, 0)


@functools.cache
def _ordinary_page(layout: Layout) -> tuple[int, dict[str, tuple[int, int]]]:
    """Return the most lines of a page with default bounds; by bucket family, histograms and characters.

    The characters are those of the histograms' names.
    """
    lines = 0
    families: dict[str, tuple[int, int]] = {}
    for assignment in layout.assignments:
        row = assignment.row
        is_open = assignment.storage == "keyed"
        children = MAX_OPEN_VALUES + 1 if is_open else max(len(row.closed), 1)
        lines += children * (len(row.bounds or DEFAULTS.get(row.buckets, ())) + 3)
        if row.buckets:
            histograms, name_chars = families.get(row.buckets, (0, 0))
            families[row.buckets] = histograms + children, name_chars + children * len(row.name)
    return lines, families


def _check_page(registry: Registry, infos: Sequence[EngineInfo]) -> None:
    ids = {info.id for info in infos}
    others = sum(engine.description.excess_bytes for engine in registry if engine.id not in ids)
    if others + sum(excess(registry, info) for info in infos) > MAX_EXCESS:
        raise registry.over_limit("descriptions", "labels and bounds make too large a page")


def _check_size(registry: Registry, info: EngineInfo) -> None:
    if len(info.labels) > MAX_ENGINE_LABELS or label_chars(info.labels) > MAX_ENGINE_LABEL_CHARS:
        raise registry.over_limit("descriptions", f"{info.id}: too many labels, or too long ones")
    texts = [info.dialect, *info.info, *info.features, *info.bounds, *info.closed]
    for labels in (info.labels, *info.info.values()):
        texts += [*labels, *labels.values()]
    for values in info.closed.values():
        texts += values
    numbers = sum(map(len, info.bounds.values()))
    if sum(map(len, texts)) + ENTRY_BYTES * (len(texts) + numbers) > MAX_SIZE:
        raise registry.over_limit("descriptions", f"{info.id}: its description is too large")
