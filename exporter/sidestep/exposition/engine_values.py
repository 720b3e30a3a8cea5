"""The values of all engines at one moment, copied on the event loop and written in another thread.

A copy takes some 0.1 ms for an engine, and one that has not changed for a while is not copied again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from sidestep.catalog.layout import Layout
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.derived_counters import update_derived
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Key, Number, OpenFamily
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry

Value = Number | Histogram
_NONE: Mapping[Key, Number] = {}


class EngineValues:
    """Values of an engine that pages show, at one moment; most attributes are those of ``Engine``."""

    __slots__ = (
        "absent",
        "computed",
        "created",
        "features",
        "histograms",
        "id",
        "info",
        "keyed",
        "label_version",
        "labels",
        "layout",
        "live",
        "open_families",
        "values",
        "version",
    )

    def __init__(self, engine: Engine) -> None:
        self.id = engine.id
        self.layout = engine.layout
        self.labels = engine.labels.copy()
        self.label_version = engine.label_version
        self.version = engine.version
        self.features = engine.description.features
        self.live = engine.live
        self.absent = engine.absent
        self.created = engine.created
        # Never changed: the next Hello replaces it.
        self.info = engine.info
        self.values = engine.values.copy()
        self.histograms = [None if one is None else one.copy() for one in engine.histograms]
        self.keyed = [children.copy() if children else _NONE for children in engine.keyed]
        self.open_families = {
            name: _family(family) for name, family in engine.open_families.items()
        }
        self.computed = {
            name: computed_gauge(engine, source) for name, source in engine.layout.computed
        }


@dataclasses.dataclass(frozen=True, slots=True)
class RegistryValues:
    """Values of a registry that pages show, at one moment; the attributes are those of ``Registry``.

    Attributes:
        gone: Engines that are not, whose totals the registry retains.
        versions: Versions of all engines: pages of equal versions have the same series.
    """

    engines: Sequence[EngineValues]
    gone: Sequence[EngineValues]
    of_dialect: Mapping[str, Sequence[EngineValues]]
    layouts: Mapping[str, Layout]
    is_exposed: Callable[[str], bool]
    has_exemplars: bool
    versions: Sequence[int]


class EngineCopier:
    """Copies the values of a registry's engines.

    The copy of an engine that did not change between two pages is kept until the engine changes.
    Other copies are not kept: the next page could not use them, and they take as much memory as the
    engines' series.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._versions: dict[str, int] = {}
        """Versions at the last page, by identity."""
        self._kept: dict[str, EngineValues] = {}

    def copy(self, *, with_gone: bool = False) -> RegistryValues:
        """Return the values of this moment.

        Args:
            with_gone: Whether to include engines that are gone, which only sums need.
        """
        registry = self._registry
        found = [self._copied(engine) for engine in registry.engines.values()]
        gone = [self._copied(each) for each in registry.retired.values()] if with_gone else []
        engines = [engine for engine in found if not engine.absent]
        self._versions |= {each.id: each.version for each in (*found, *gone)}
        for known in (self._versions, self._kept):
            for name in [name for name in known if name not in registry]:
                del known[name]
        of_dialect: dict[str, list[EngineValues]] = {}
        for engine in engines:
            of_dialect.setdefault(engine.layout.dialect, []).append(engine)
        gone += [engine for engine in found if engine.absent and with_gone]
        return RegistryValues(
            engines,
            gone,
            of_dialect,
            registry.layouts,
            registry.is_exposed,
            registry.has_exemplars,
            [engine.version for engine in (*engines, *gone)],
        )

    def prepare(self, engine: Engine) -> None:
        """Copy an engine, for the next ``copy`` unless the engine changes before it."""
        self._kept[engine.id] = self._copied(engine)

    def _copied(self, engine: Engine) -> EngineValues:
        found = self._kept.pop(engine.id, None)
        # No two engines ever have the same version.
        if found is None or found.version != engine.version:
            # The totals of engines that are gone have those of each engine already.
            if self._registry.engines.get(engine.id) is engine:
                update_derived(engine)
            found = EngineValues(engine)
        if self._versions.get(engine.id) == engine.version:
            self._kept[engine.id] = found
        return found


def _family(family: OpenFamily) -> OpenFamily:
    children = {
        key: value.copy() if isinstance(value, Histogram) else value
        for key, value in family.children.items()
    }
    return dataclasses.replace(family, children=children)
