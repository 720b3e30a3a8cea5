"""Families that describe themselves: KV connectors and whatever an engine adds of its own."""

from __future__ import annotations

from itertools import pairwise

from sidestep.errors import WireError
from sidestep.histogram import Histogram
from sidestep.registry import MAX_OPEN_FAMILIES, Engine, OpenFamily, Registry
from sidestep.wire.items import Family, Sample, Samples
from sidestep.wire.limits import is_printable

EXPORTERS = ("sidestep_", "process_", "python_")
"""Families of the exporter's own process begin so."""


def add_samples(registry: Registry, engine: Engine, item: Samples) -> None:
    """Add families that describe themselves; all are checked before any is added.

    Raises:
        WireError: One of them contradicts the catalogue, or itself as it was before.
    """
    made: dict[str, OpenFamily] = {}
    for family in item.families:
        if family.name not in engine.open and family.name not in made:
            made[family.name] = _family(engine, family)
        _check_samples(made.get(family.name) or engine.open[family.name], family)
    engine.open.update(made)
    for family in item.families:
        target = engine.open[family.name]
        for sample in family.samples:
            key = registry.capped(target.children, tuple(sample.labels))
            _add_sample(target, key, sample)


def _family(engine: Engine, family: Family) -> OpenFamily:
    """The catalogue's family of that name, or one that is new on the page."""
    row = engine.layout.sampled.get(family.name)
    if row is not None:
        return engine.sampled(row)
    if _is_owned(engine, family.name):
        raise WireError("owned_family", family.name)
    if len(engine.open) >= MAX_OPEN_FAMILIES:
        raise WireError("over_limit", "too many self-described families")
    labels = tuple(family.labels)
    if len({*labels, *engine.labels, "le", "quantile"}) < len(labels) + len(engine.labels) + 2:
        raise WireError("bad_label", f"{family.name}: a label name twice, or one of the page's own")
    if any(a >= b for a, b in pairwise(family.bounds)):
        raise WireError("bad_bounds", family.name)
    return OpenFamily(family.name, family.kind, family.help, labels, tuple(family.bounds))


def _is_owned(engine: Engine, name: str) -> bool:
    """Whether the catalogue or the exporter has ``name``, or it reads as a histogram's sample."""
    base, _, suffix = name.rpartition("_")
    taken = {name, base} if suffix in ("bucket", "count", "sum", "created") else {name}
    if not taken.isdisjoint(engine.open):
        return True
    return name.startswith(EXPORTERS) or any(
        placed.row.name in taken for placed in engine.layout.placed
    )


def _check_samples(target: OpenFamily, family: Family) -> None:
    """Whether ``family`` may be added to ``target``.

    Raises:
        WireError: Another kind, other labels or bounds, or what cannot be exposed.
    """
    if (family.kind, tuple(family.labels)) != (target.kind, target.labels):
        raise WireError("changed_family", family.name)
    if family.kind == "histogram" and not target.bounds:
        raise WireError("bad_bounds", family.name)
    if (family.kind == "counter") != family.name.endswith("_total"):
        raise WireError("bad_family", f"{family.name}: counters, and they alone, end in _total")
    for sample in family.samples:
        if len(sample.labels) != len(target.labels) or not all(map(is_printable, sample.labels)):
            raise WireError("bad_label", family.name)
        if family.kind == "counter" and sample.value < 0:
            raise WireError("negative_counter", family.name)
        if sample.counts and (
            len(sample.counts) != len(target.bounds) + 1
            or tuple(family.bounds) not in ((), target.bounds)
        ):
            raise WireError("bad_bounds", family.name)


def _add_sample(target: OpenFamily, key: tuple[str, ...], sample: Sample) -> None:
    if target.kind == "histogram":
        child = target.children.get(key)
        if not isinstance(child, Histogram):
            child = target.children[key] = Histogram(target.bounds)
        child.observe_many(sample.observations)
        if sample.counts:
            child.add(sample.counts, sample.total)
    elif target.kind == "gauge":
        target.children[key] = sample.value
    else:
        before = target.children.get(key, 0)
        target.children[key] = (0 if isinstance(before, Histogram) else before) + sample.value
