"""Families that describe themselves: KV connectors and whatever an engine adds of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.layout import FeedTarget, exposed_names
from sidestep.catalog.model import OBSERVED, Kind
from sidestep.errors import WireError
from sidestep.exposition.passthrough.registry import EXPORTERS
from sidestep.metrics.engine import ORIGIN, Engine, Key, OpenFamily
from sidestep.metrics.exponential_buckets import check as check_native
from sidestep.metrics.histogram import Histogram, rebucket
from sidestep.metrics.quotas import MAX_OPEN_FAMILIES
from sidestep.metrics.registry import Registry
from sidestep.protocol.limits import MAX_OBSERVATIONS, MAX_OPEN_VALUES, is_printable
from sidestep.protocol.self_described import Family, Sample, Samples


def add_samples(registry: Registry, engine: Engine, item: Samples, *, kept: bool = False) -> None:
    """Add families that describe themselves; all are checked before any is added.

    ``kept``: as a record kept them, which has what they feed besides in its own place.

    Raises:
        WireError: One of them contradicts the catalogue, or itself as it was before.
    """
    if sum(len(family.samples) for family in item.families) > MAX_OBSERVATIONS:
        raise WireError("too_big", "more samples than an item may have")
    made = _NewFamilies(registry)
    for family in item.families:
        target = made.families.get(family.name) or engine.open_families.get(family.name)
        if target is None or _is_another_form(engine, target, family):
            target = _new_family(engine, family, made)
        _check_samples(target, family)
        _check_natives(family)
    _check_quota(registry, engine, made, item.families)
    for name in made.families.keys() & engine.open_families.keys():
        # An earlier process's, with labels that are not told any more.
        before = engine.open_families[name]
        size = sum(before.size(key, engine) for key in before.children)
        registry.quota.resize(engine, -len(before.children), -size)
        engine.renew_label_version()
    engine.open_families.update(made.families)
    for name, target in made.families.items():
        if name not in engine.layout.sampled_rows:
            registry.quota.describe(target)
    is_judged = not kept and engine.objectives is not None and bool(engine.objectives.names)
    for family in item.families:
        fed = () if kept else engine.layout.feeds.get(family.name, ())
        _add(registry, engine, engine.open_families[family.name], family, fed)
        if is_judged:
            _count_slo(engine, family, fed)


def adopt_families(
    registry: Registry, engine: Engine, families: Iterable[tuple[OpenFamily, int]]
) -> WireError | None:
    """Let ``engine``, which has none, have families that were made apart, all that can be.

    Args:
        registry: Which has the engine.
        engine: Whose they are to be.
        families: Each with the bytes, about, that it takes on a page.

    Returns:
        What is wrong with the last one that was left out.
    """
    refused: WireError | None = None
    for family, size in families:
        is_ours = family.name in engine.layout.sampled_rows
        try:
            if not is_ours:
                _check_new_name(_NewFamilies(registry), family.name, family.kind, family.labels)
            _check_limit(registry, engine, len(family.children), size)
        except WireError as error:
            refused = error
            continue
        engine.open_families[family.name] = family
        registry.quota.resize(engine, len(family.children), size)
        if not is_ours:
            registry.quota.describe(family)
    return refused


class _NewFamilies:
    """Families that an item brings along.

    Attributes:
        families: By name.
        fresh: How many of them no engine had before.
        names: All names that those take on a page.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.families: dict[str, OpenFamily] = {}
        self.fresh = 0
        self.names: set[str] = set()


def _check_quota(
    registry: Registry, engine: Engine, made: _NewFamilies, families: Sequence[Family]
) -> None:
    """Whether there is room for the children that are new.

    Raises:
        WireError: There is none.
    """
    series = size = 0
    for family in families:
        target = made.families.get(family.name) or engine.open_families[family.name]
        known = target.children
        keys = dict.fromkeys(tuple(sample.labels) for sample in family.samples)
        # As many as find a place, and the one for all others.
        room = max(MAX_OPEN_VALUES - len(known), 0) + 1
        new = list(islice((key for key in keys if key not in known), room))
        series += len(new)
        size += sum(target.size(key, engine) for key in new)
    _check_limit(registry, engine, series, size)


def _check_limit(registry: Registry, engine: Engine, series: int, size: int) -> None:
    """Whether ``engine`` may have so many children more, of so many bytes.

    Raises:
        WireError: It may not.
    """
    if not series:
        return
    limit = registry.quota.limit(engine, series, size)
    if limit:
        registry.limited[limit] += 1
        raise WireError("over_limit", "too many self-described series")


def _add(
    registry: Registry,
    engine: Engine,
    target: OpenFamily,
    family: Family,
    also: Sequence[FeedTarget],
) -> None:
    bounds = tuple(family.bounds) or target.bounds
    for sample in family.samples:
        key = registry.capped(target.children, tuple(sample.labels))
        if key not in target.children:
            registry.quota.resize(engine, 1, target.size(key, engine))
        refused = _add_sample(engine, target, key, sample, bounds)
        if refused:
            slot = engine.layout.handled["refused_observations"].slots[0]
            engine.values[slot] = (engine.values[slot] or 0) + refused
        for fed in also:
            if fed.values and not set(sample.labels[:1]) & set(fed.values):
                continue
            if fed.row.kind == "histogram":
                _observe(engine.histogram(fed.slot), bounds, sample)
            else:
                engine.values[fed.slot] = (engine.values[fed.slot] or 0) + sample.value


def _count_slo(engine: Engine, family: Family, also: Sequence[FeedTarget]) -> None:
    """Hold against objectives what came as counts of buckets; observations have been already."""
    bounds = tuple(family.bounds) or engine.open_families[family.name].bounds
    for name in (family.name, *(fed.row.name for fed in also if not fed.values)):
        slo_counter = engine.slo_counter(name)
        if slo_counter is not None:
            for sample in family.samples:
                if sample.counts:
                    slo_counter.count_buckets(bounds, sample.counts)


def _new_family(engine: Engine, family: Family, made: _NewFamilies) -> OpenFamily:
    """The catalogue's family of that name, or one that is new on the page."""
    row = engine.layout.sampled_rows.get(family.name)
    labels = tuple(family.labels)
    if row is not None:
        target = made.families[family.name] = engine.new_family(row)
        more = row.extra_labels and set(target.labels) < set(labels)
        # Other releases of an engine have fewer labels, where no family has them from elsewhere.
        fewer = not engine.layout.required_labels and set(labels) < set(target.labels)
        if more or fewer:
            _check_labels(engine, family.name, labels, row.shared)
            target.labels = labels
            # What starts at 0 has other labels now.
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
    """Whether no engine has had a family of that name, which no catalogue has.

    Raises:
        WireError: The name is another's, or there is no room for more.
    """
    registry = made.registry
    form = (kind, labels)
    if registry.quota.families.get(name, form) != form:
        raise WireError("changed_family", name)
    if name in registry.quota.families:
        return False
    if _is_owned(made, name, exposed_names(name, kind)):
        raise WireError("owned_family", name)
    if len(registry.quota.families) + made.fresh >= MAX_OPEN_FAMILIES:
        registry.limited["families"] += 1
        raise WireError("over_limit", "too many self-described families")
    return True


def _is_another_form(engine: Engine, target: OpenFamily, family: Family) -> bool:
    """Whether a process that began since has other labels for a family of the catalogue."""
    known = family.name in engine.layout.sampled_rows and family.kind == target.kind
    return known and engine.restarts > target.born and tuple(family.labels) != target.labels


def _check_labels(engine: Engine, name: str, labels: Key, shared: Key = ()) -> None:
    reserved = {*engine.labels, *shared, ORIGIN, "le", "quantile"}
    if len({*labels, *reserved}) < len(labels) + len(reserved):
        raise WireError("bad_label", f"{name}: a label name twice, or one of the page's own")


def _is_owned(made: _NewFamilies, name: str, names: frozenset[str]) -> bool:
    """Whether one of ``names`` is the catalogue's, the exporter's or another family's."""
    registry = made.registry
    if name.startswith(EXPORTERS) or any(
        names & layout.names for layout in registry.layouts.values()
    ):
        return True
    return not names.isdisjoint(made.names) or not names.isdisjoint(registry.quota.names)


def _check_samples(target: OpenFamily, family: Family) -> None:
    """Whether ``family`` may be added to ``target``.

    Raises:
        WireError: Another kind, other labels or bounds, or what cannot be exposed.
    """
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
    """Add to one child; how many observations were refused."""
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
    """Add what ``sample`` has seen, its counts by ``bounds``; how many observations were refused."""
    if sample.counts:
        counts = sample.counts
        if histogram.bounds != bounds:
            counts = rebucket(bounds, counts, histogram.bounds)
        histogram.add(counts, sample.total, sample.native)
    if not sample.weights:
        return histogram.observe_many(sample.observations)
    return histogram.observe_weighted(list(zip(sample.observations, sample.weights, strict=True)))
