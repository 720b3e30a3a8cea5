"""Families that describe themselves: KV connectors and whatever an engine adds of its own."""

from __future__ import annotations

from itertools import pairwise

from sidestep.catalogue.model import Kind
from sidestep.errors import WireError
from sidestep.histogram import Histogram
from sidestep.plan import taken
from sidestep.registry import (
    MAX_ENGINE_SERIES,
    MAX_OPEN_FAMILIES,
    MAX_SERIES,
    Engine,
    OpenFamily,
    Registry,
)
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
            made[family.name] = _family(registry, engine, family, made)
        _check_samples(made.get(family.name) or engine.open[family.name], family)
    more = sum(len(family.samples) for family in item.families)
    if _limit(registry, engine, more):
        limit = _limit(
            registry, engine, sum(_new_children(made, engine, family) for family in item.families)
        )
        if limit:
            registry.limited[limit] += 1
            raise WireError("over_limit", "too many self-described series")
    engine.open.update(made)
    for name, target in made.items():
        if name not in engine.layout.sampled:
            registry.open_families[name] = (target.kind, target.labels)
    for family in item.families:
        _add(registry, engine, engine.open[family.name], family)


def _limit(registry: Registry, engine: Engine, more: int) -> str:
    """Which limit so many more children would pass; empty where none."""
    if engine.series + more > MAX_ENGINE_SERIES:
        return "engine_series"
    return "series" if registry.open_series + more > MAX_SERIES else ""


def _new_children(made: dict[str, OpenFamily], engine: Engine, family: Family) -> int:
    known = (made.get(family.name) or engine.open[family.name]).children
    return len({tuple(sample.labels) for sample in family.samples} - known.keys())


def _add(registry: Registry, engine: Engine, target: OpenFamily, family: Family) -> None:
    before = len(target.children)
    for sample in family.samples:
        key = registry.capped(target.children, tuple(sample.labels))
        refused = _add_sample(target, key, sample)
        if refused:
            slot = engine.layout.hooks["refused_observations"].slots[0]
            engine.values[slot] = (engine.values[slot] or 0) + refused
    engine.series += len(target.children) - before
    registry.open_series += len(target.children) - before


def _family(
    registry: Registry, engine: Engine, family: Family, made: dict[str, OpenFamily]
) -> OpenFamily:
    """The catalogue's family of that name, or one that is new on the page."""
    row = engine.layout.sampled.get(family.name)
    if row is not None:
        return engine.sampled(row)
    form = (family.kind, tuple(family.labels))
    if registry.open_families.get(family.name, form) != form:
        raise WireError("changed_family", family.name)
    others = {name: kind for name, (kind, _) in registry.open_families.items()}
    others.update((name, target.kind) for name, target in made.items())
    if family.name not in others and _is_owned(registry, others, family):
        raise WireError("owned_family", family.name)
    if len(others) >= MAX_OPEN_FAMILIES:
        registry.limited["families"] += 1
        raise WireError("over_limit", "too many self-described families")
    labels = tuple(family.labels)
    if len({*labels, *engine.labels, "le", "quantile"}) < len(labels) + len(engine.labels) + 2:
        raise WireError("bad_label", f"{family.name}: a label name twice, or one of the page's own")
    if any(a >= b for a, b in pairwise(family.bounds)):
        raise WireError("bad_bounds", family.name)
    if not is_printable(family.help):
        raise WireError("bad_family", f"{family.name}: HELP is not one printable line")
    return OpenFamily(family.name, family.kind, family.help, labels, tuple(family.bounds))


def _is_owned(registry: Registry, others: dict[str, Kind], family: Family) -> bool:
    """Whether a name of ``family``'s is one of the catalogue's, the exporter's or another's."""
    names = taken(family.name, family.kind)
    if family.name.startswith(EXPORTERS):
        return True
    if any(names & layout.names for layout in registry.layouts.values()):
        return True
    return any(names & taken(name, kind) for name, kind in others.items())


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
        if (family.kind == "counter" and sample.value < 0) or sample.total < 0:
            raise WireError("negative_counter", family.name)
        if sample.counts and (
            len(sample.counts) != len(target.bounds) + 1
            or tuple(family.bounds) not in ((), target.bounds)
        ):
            raise WireError("bad_bounds", family.name)


def _add_sample(target: OpenFamily, key: tuple[str, ...], sample: Sample) -> int:
    """Add to one child; how many observations were refused."""
    if target.kind == "histogram":
        child = target.children.get(key)
        if not isinstance(child, Histogram):
            child = target.children[key] = Histogram(target.bounds)
        if sample.counts:
            child.add(sample.counts, sample.total)
        return child.observe_many(sample.observations)
    if target.kind == "gauge":
        target.children[key] = sample.value
    else:
        before = target.children.get(key, 0)
        target.children[key] = (0 if isinstance(before, Histogram) else before) + sample.value
    return 0
