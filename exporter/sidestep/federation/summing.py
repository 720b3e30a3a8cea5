"""What records of one engine come to: made apart in small steps, and then shown at once."""

from __future__ import annotations

from collections.abc import Iterator

from sidestep.catalog.buckets import Bounds
from sidestep.errors import WireError
from sidestep.metrics.engine import Engine, Number, OpenFamily
from sidestep.metrics.histogram import Histogram, rebucket
from sidestep.metrics.merge import add_counts, add_family
from sidestep.metrics.native_histogram import NativeHistogram
from sidestep.metrics.record_codec import encode_record, totals_of
from sidestep.metrics.registry import Registry
from sidestep.metrics.self_described import adopt_families
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.records import OpenTotals, Record

CHILDREN = 16
"""Of families that describe themselves, in one step: 0.5 ms, about."""
ROUNDING = 1e-12
"""Of a sum of floats, by how much another order of adding can change it."""


class Sum:
    """Adds up checked records of one engine's dialect.

    What they do not have is not shown either, though an engine of the dialect begins with it at
    0. Each of its iterators is to be exhausted before the next one begins.

    Args:
        registry: Which has the engine, or is to have it.
        info: What the engine is to be.
        described: One that is that already, where there is one: to describe it takes a while.

    Attributes:
        refused: What was wrong with the last family that describes itself and was left out.
    """

    def __init__(
        self, registry: Registry, info: EngineInfo, described: Engine | None = None
    ) -> None:
        # Nobody sees it until it is complete.
        self._apart = Registry(registry.layouts, registry.overrides, native=registry.native)
        layout = registry.layouts[info.dialect]
        known = described or Engine(layout, info, registry.overrides, registry.native)
        self._engine = known.without_series()
        self._sizes: dict[str, int] = {}
        self._left_out: set[str] = set()
        """Families that would be there in part only."""
        self.refused: WireError | None = None

    def add(self, record: Record, *, gauges: bool) -> Iterator[None]:
        """Add ``record``; where its ``gauges`` count, too, they replace those of earlier ones."""
        add_counts(self._apart, self._engine, record, gauges=gauges)
        yield
        done = 0
        for family in record.totals.open:
            if family.name in self._left_out or (family.kind == "gauge" and not gauges):
                continue
            self._narrow(family)
            try:
                for part in _parts(family):
                    add_family(self._apart, self._engine, part)
                    done += 1 + len(part.children)
                    if done >= CHILDREN:
                        done = 0
                        yield
            except WireError as error:
                self.refused = error
                if error.reason == "over_limit":
                    self._left_out.add(family.name)

    def encoded(self) -> bytes:
        """All that was added, as one record."""
        return encode_record(self._engine, totals_of(self._engine))

    def keep(self, engine: Engine) -> Iterator[None]:
        """Have those histograms of ``engine`` that did not change, with what renderers know of them."""
        made = self._engine
        pairs = zip(engine.histograms, made.histograms, strict=True)
        made.histograms = [new if new is None else _kept(known, new) for known, new in pairs]
        yield
        done = 0
        for family in made.open_families.values():
            before = engine.open_families.get(family.name)
            size = 0
            for key, child in family.children.items():
                size += family.size(key, made)
                known = None if before is None else before.children.get(key)
                if isinstance(child, Histogram):
                    family.children[key] = _kept(known, child)
                elif family.kind == "counter":
                    family.children[key] = _steadied(known, child)
                done += 1
                if done % (4 * CHILDREN) == 0:
                    yield
            self._sizes[family.name] = size

    def show(self, registry: Registry, engine: Engine) -> WireError | None:
        """Let ``engine`` have what was added, and nothing else.

        Returns:
            What is wrong with families that describe themselves, which are left out.
        """
        made = self._engine
        labels = {name: family.labels for name, family in engine.open_families.items()}
        self._steady(engine)
        registry.clear_series(engine)
        engine.values[:] = made.values
        engine.histograms[:] = made.histograms
        engine.keyed[:] = made.keyed
        engine.prefix_hits, engine.external_hits = made.prefix_hits, made.external_hits
        engine.mm_hits = made.mm_hits
        engine.exposed_paths |= made.exposed_paths
        engine.restarts, engine.last_seen = made.restarts, max(engine.last_seen, made.last_seen)
        engine.created = min(engine.created, made.created)
        for limit, count in self._apart.limited.items():
            # Who counted has said so already.
            registry.limited[limit] += count if limit != "label_values" else 0
        families = (
            made.open_families[name] for name in made.open_families if name not in self._left_out
        )
        refused = adopt_families(
            registry, engine, ((each, self._sizes[each.name]) for each in families)
        )
        if any(labels.get(name, f.labels) != f.labels for name, f in engine.open_families.items()):
            # Another process's, which calls its labels something else.
            engine.renew_label_version()
        registry.touch(engine)
        return refused or self.refused

    def _steady(self, engine: Engine) -> None:
        """Let no counter of ``engine`` fall because its parts were added in another order."""
        made, layout = self._engine, engine.layout
        for slot, value in enumerate(made.values):
            if isinstance(value, float) and slot not in layout.scalar_gauges:
                made.values[slot] = _steadied(engine.values[slot], value)
        for row, known, children in zip(layout.keyed, engine.keyed, made.keyed, strict=True):
            for key, value in children.items():
                if isinstance(value, float) and row.kind != "gauge":
                    children[key] = _steadied(known.get(key), value)

    def _narrow(self, totals: OpenTotals) -> None:
        """Have the bounds that the family's earlier records and this one have in common."""
        known = self._engine.open_families.get(totals.name)
        if known is None or totals.name in self._engine.layout.sampled_rows:
            return
        told = set(totals.bounds)
        common = tuple(bound for bound in known.bounds if bound in told)
        if not common or common == known.bounds:
            # Where there is none, those of the first record stand.
            return
        before, known.bounds = known.bounds, common
        for key, child in known.children.items():
            if isinstance(child, Histogram):
                known.children[key] = self._moved(known, before, child)

    def _moved(self, family: OpenFamily, before: Bounds, child: Histogram) -> Histogram:
        """``child`` with fewer bounds: what was counted up to each of these stays."""
        found = self._engine.new_histogram(family)
        found.add(rebucket(before, child.counts, family.bounds), child.sum, child.to_wire().native)
        return found


def _parts(family: OpenTotals) -> Iterator[OpenTotals]:
    """``family`` with some of its children each; one where it has none."""
    children = family.children
    if len(children) <= CHILDREN:
        yield family
        return
    for at in range(0, len(children), CHILDREN):
        part = OpenTotals(family.name, family.kind, family.help, family.labels, family.bounds)
        part.children = children[at : at + CHILDREN]
        yield part


def _kept(known: Number | Histogram | None, new: Histogram) -> Histogram:
    """``known``, where ``new`` is the same; else that."""
    if not isinstance(known, Histogram) or known.bounds != new.bounds:
        return new
    if isinstance(known, NativeHistogram) and isinstance(new, NativeHistogram):
        # Where nobody tells since when it counts, it is since the first word.
        new.created = min(new.created, known.created)
    new.sum = float(_steadied(known.sum, new.sum))
    return known if known.to_wire() == new.to_wire() else new


def _steadied(known: Number | Histogram | None, new: Number) -> Number:
    """``new``, or what was ``known`` where that is the same but for its last digits."""
    if isinstance(known, float) and isinstance(new, float):
        return known if known * (1.0 - ROUNDING) <= new < known else new
    return new
