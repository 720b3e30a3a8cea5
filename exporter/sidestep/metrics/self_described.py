"""Self-described families, such as those of KV connectors and of an engine's own extensions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.layout import OWN_PREFIXES, FeedTarget, exposed_names
from sidestep.catalog.row import OBSERVED, Kind
from sidestep.errors import WireError
from sidestep.metrics.engine import ORIGIN, Engine
from sidestep.metrics.engine_state import Key, OpenFamily
from sidestep.metrics.exponential_buckets import check_native
from sidestep.metrics.histogram import Histogram, rebucket
from sidestep.metrics.quotas import MAX_OPEN_FAMILIES
from sidestep.metrics.registry import Registry
from sidestep.protocol.limits import MAX_OBSERVATIONS, MAX_OPEN_VALUES, is_printable
from sidestep.protocol.self_described import Family, Sample, Samples


def add_samples(
    registry: Registry, engine: Engine, item: Samples, *, from_totals: bool = False
) -> None:
    """Add self-described families to ``engine``; all are checked before any is added.

    With ``from_totals``, the families are those of totals, which also hold the other series that such
    families feed, and the counts for objectives.
    """
    if sum(len(family.samples) for family in item.families) > MAX_OBSERVATIONS:
        raise WireError("too_big", "more samples than an item may have")
    made = _NewFamilies(registry)
    for family in item.families:
        target = made.families.get(family.name) or engine.open_families.get(family.name)
        if target is None or _has_new_labels(engine, target, family):
            target = _new_family(engine, family, made)
        _check_samples(target, family)
        _check_natives(family)
    _check_quota(registry, engine, made, item.families)
    for name in made.families.keys() & engine.open_families.keys():
        # The family of an earlier process, with labels that are no longer sent.
        registry.quota.remove_children(engine, engine.open_families[name])
        engine.renew_label_version()
    engine.open_families.update(made.families)
    for name, target in made.families.items():
        if name not in engine.layout.sampled_rows:
            registry.quota.describe(target)
    counts_slo = not from_totals and bool(engine.settings.objectives.names)
    for family in item.families:
        targets = () if from_totals else engine.layout.feeds.get(family.name, ())
        _add(registry, engine, engine.open_families[family.name], family, targets)
        if counts_slo:
            _count_slo(engine, family, targets)


class _NewFamilies:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.families: dict[str, OpenFamily] = {}
        self.fresh = 0
        self.names: set[str] = set()


def _check_quota(
    registry: Registry, engine: Engine, made: _NewFamilies, families: Sequence[Family]
) -> None:
    series = size = 0
    for family in families:
        target = made.families.get(family.name) or engine.open_families[family.name]
        known = target.children
        keys = dict.fromkeys(tuple(sample.labels) for sample in family.samples)
        # At most the free label values, and the child for all others.
        most = max(MAX_OPEN_VALUES - len(known), 0) + 1
        new = list(islice((key for key in keys if key not in known), most))
        if new:
            series += len(new)
            size += registry.quota.size(engine, target, new)
    if series and (limit := registry.quota.limit(engine, series, size)):
        raise registry.over_limit(limit, "too many self-described series")


def _add(
    registry: Registry,
    engine: Engine,
    target: OpenFamily,
    family: Family,
    targets: Sequence[FeedTarget],
) -> None:
    bounds = tuple(family.bounds) or target.bounds
    for sample in family.samples:
        key = registry.capped(target.children, tuple(sample.labels))
        if key not in target.children:
            registry.quota.resize(engine, 1, registry.quota.size(engine, target, [key]))
        refused = _add_sample(engine, target, key, sample, bounds)
        if refused:
            slot = engine.layout.handler_slot("refused_observations")
            engine.values[slot] = (engine.values[slot] or 0) + refused
        for feed in targets:
            if feed.values and not set(sample.labels[:1]) & set(feed.values):
                continue
            if feed.row.kind == "histogram":
                _observe(engine.histogram(feed.slot), bounds, sample)
            else:
                engine.values[feed.slot] = (engine.values[feed.slot] or 0) + sample.value


def _count_slo(engine: Engine, family: Family, targets: Sequence[FeedTarget]) -> None:
    """Count bucket counts for objectives; single observations are counted by their histograms."""
    bounds = tuple(family.bounds) or engine.open_families[family.name].bounds
    for name in (family.name, *(feed.row.name for feed in targets if not feed.values)):
        slo_counter = engine.slo_counter(name)
        if slo_counter is not None:
            for sample in family.samples:
                if sample.counts:
                    slo_counter.count_buckets(bounds, sample.counts)


def _new_family(engine: Engine, family: Family, made: _NewFamilies) -> OpenFamily:
    """Return the catalogue's family of that name, or a new one."""
    row = engine.layout.sampled_rows.get(family.name)
    labels = tuple(family.labels)
    if row is not None:
        target = made.families[family.name] = engine.new_family(row)
        more = row.extra_labels and set(target.labels) < set(labels)
        # Other releases of an engine may have fewer labels, if the dialect has no shared ones.
        fewer = not engine.layout.required_labels and set(labels) < set(target.labels)
        if more or fewer:
            _check_labels(engine, family.name, labels, row.shared)
            target.labels = labels
            # The children that start at 0 have the catalogue's labels.
            target.children.clear()
        return target
    fresh = _check_new_name(made, family.name, family.kind, labels)
    _check_labels(engine, family.name, labels)
    bounds = tuple(family.bounds)
    if any(a >= b for a, b in pairwise(bounds)) or (bounds and bounds[0] < 0):
        raise WireError("bad_bounds", family.name)
    if not is_printable(family.help):
        raise WireError("bad_family", f"{family.name}: HELP is not one printable line")
    if fresh:
        made.fresh += 1
        made.names |= exposed_names(family.name, family.kind)
    target = OpenFamily(family.name, family.kind, family.help, labels, bounds, born=engine.restarts)
    made.families[family.name] = target
    return target


def _check_new_name(made: _NewFamilies, name: str, kind: Kind, labels: Key) -> bool:
    """Check the name of a family that is in no catalogue; return whether no engine has it yet."""
    registry = made.registry
    form = (kind, labels)
    if registry.quota.families.get(name, form) != form:
        raise WireError("changed_family", name)
    if name in registry.quota.families:
        return False
    if _is_name_taken(made, name, exposed_names(name, kind)):
        raise WireError("owned_family", name)
    if len(registry.quota.families) + made.fresh >= MAX_OPEN_FAMILIES:
        raise registry.over_limit("families", "too many self-described families")
    return True


def _has_new_labels(engine: Engine, target: OpenFamily, family: Family) -> bool:
    """Return whether the engine restarted and now sends a catalogue family with other labels."""
    known = family.name in engine.layout.sampled_rows and family.kind == target.kind
    return known and engine.restarts > target.born and tuple(family.labels) != target.labels


def _check_labels(engine: Engine, name: str, labels: Key, shared: Key = ()) -> None:
    reserved = {*engine.labels, *shared, ORIGIN, "le", "quantile"}
    if len({*labels, *reserved}) < len(labels) + len(reserved):
        raise WireError("bad_label", f"{name}: a label name twice, or one of the page's own")


def _is_name_taken(made: _NewFamilies, name: str, names: frozenset[str]) -> bool:
    """Return whether the catalogue, the exporter or another family has one of ``names``."""
    registry = made.registry
    if name.startswith(OWN_PREFIXES) or any(
        names & layout.names for layout in registry.layouts.values()
    ):
        return True
    return not names.isdisjoint(made.names) or not names.isdisjoint(registry.quota.names)


def _check_samples(target: OpenFamily, family: Family) -> None:
    """Check that ``family`` can be added to ``target``."""
    if (family.kind, tuple(family.labels)) != (target.kind, target.labels):
        raise WireError("changed_family", family.name)
    if family.kind in OBSERVED and (family.kind == "histogram") != bool(target.bounds):
        raise WireError("bad_bounds", family.name)
    bounds = tuple(family.bounds) or target.bounds
    if family.bounds and any(a >= b for a, b in pairwise(bounds)):
        raise WireError("bad_bounds", family.name)
    if (family.kind == "counter") != family.name.endswith("_total") or family.name == "_total":
        raise WireError("bad_family", f"{family.name}: counters, and they alone, end in _total")
    for sample in family.samples:
        if len(sample.labels) != len(target.labels) or not all(map(is_printable, sample.labels)):
            raise WireError("bad_label", family.name)
        if (family.kind == "counter" and sample.value < 0) or sample.total < 0:
            raise WireError("negative_counter", family.name)
        if sample.counts and len(sample.counts) != len(bounds) + 1:
            raise WireError("bad_bounds", family.name)
        if sample.weights and len(sample.weights) != len(sample.observations):
            raise WireError("bad_item", f"{family.name}: observations without their weights")


def _check_natives(family: Family) -> None:
    for sample in family.samples:
        if sample.native is not None:
            check_native(sample.native, sum(sample.counts))


def _add_sample(
    engine: Engine, target: OpenFamily, key: Key, sample: Sample, bounds: Bounds
) -> int:
    """Add a sample to the series with the label values ``key``; return the number of refused values."""
    if target.kind in OBSERVED:
        child = target.children.get(key)
        if not isinstance(child, Histogram):
            child = target.children[key] = engine.new_histogram(target)
        return _observe(child, bounds, sample)
    if target.kind == "gauge":
        target.children[key] = sample.value
    else:
        before = target.children.get(key, 0)
        target.children[key] = (0 if isinstance(before, Histogram) else before) + sample.value
    return 0


def _observe(histogram: Histogram, bounds: Bounds, sample: Sample) -> int:
    """Add the observations of ``sample``, whose counts have ``bounds``; return how many were refused."""
    if sample.counts:
        counts = sample.counts
        if histogram.bounds != bounds:
            counts = rebucket(bounds, counts, histogram.bounds)
        histogram.add(counts, sample.total, sample.native)
    if not sample.weights:
        return histogram.observe_many(sample.observations)
    return histogram.observe_weighted(list(zip(sample.observations, sample.weights, strict=True)))
