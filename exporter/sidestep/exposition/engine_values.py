"""The values of all engines at one moment, copied on the event loop and written in another thread.

A copy takes some 20 us for an engine, and an engine that has not changed is not copied again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from sidestep.catalog.layout import Layout
from sidestep.metrics.availability import update_availability
from sidestep.metrics.computed_gauges import computed_gauge
from sidestep.metrics.engine import Engine, Number, OpenFamily
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.registry import Registry

Value = Number | Histogram


class EngineValues:
    """What pages show of an engine, at one moment; the attributes are those of ``Engine``.

    Attributes:
        features: Options that the engine has.
        computed: Computed gauges by row.
    """

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
        update_availability(engine)
        self.id = engine.id
        self.layout = engine.layout
        self.labels = engine.labels.copy()
        self.label_version = engine.label_version
        self.version = engine.version
        self.features = engine.description.features
        self.live = engine.live
        self.absent = engine.absent
        self.created = engine.created
        # The next Hello replaces the labels.
        self.info = engine.info
        self.values = engine.values.copy()
        self.histograms = [None if one is None else one.copy() for one in engine.histograms]
        self.keyed = [children.copy() for children in engine.keyed]
        self.open_families = {
            name: _copied(family) for name, family in engine.open_families.items()
        }
        self.computed = {
            name: computed_gauge(engine, source) for name, source in engine.layout.computed
        }


@dataclasses.dataclass(frozen=True, slots=True)
class RegistryValues:
    """What pages show of a registry, at one moment; the attributes are those of ``Registry``.

    Attributes:
        engines: Engines that are exposed.
        gone: Engines that are not, whose totals the registry retains.
        of_dialect: The exposed engines by dialect.
    """

    engines: Sequence[EngineValues]
    gone: Sequence[EngineValues]
    of_dialect: Mapping[str, Sequence[EngineValues]]
    layouts: Mapping[str, Layout]
    is_exposed: Callable[[str], bool]
    has_exemplars: bool


class EngineCopier:
    """Copies the values of a registry's engines."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._engines: dict[str, EngineValues] = {}
        self._gone: dict[str, EngineValues] = {}

    def copy(self, *, with_gone: bool = False) -> RegistryValues:
        """Return the values of this moment.

        Args:
            with_gone: Whether to include engines that are gone, which only sums need.
        """
        registry = self._registry
        found = self._engines = _copies(registry.engines.values(), self._engines)
        if with_gone:
            self._gone = _copies(registry.retired.values(), self._gone)
        engines = [engine for engine in found.values() if not engine.absent]
        absent = [engine for engine in found.values() if engine.absent]
        of_dialect: dict[str, list[EngineValues]] = {}
        for engine in engines:
            of_dialect.setdefault(engine.layout.dialect, []).append(engine)
        return RegistryValues(
            engines,
            [*self._gone.values(), *absent] if with_gone else (),
            of_dialect,
            registry.layouts,
            registry.is_exposed,
            registry.has_exemplars,
        )


def copied(registry: Registry, *, with_gone: bool = False) -> RegistryValues:
    """Return the values of a registry's engines now."""
    return EngineCopier(registry).copy(with_gone=with_gone)


def _copies(
    engines: Iterable[Engine], known: Mapping[str, EngineValues]
) -> dict[str, EngineValues]:
    found: dict[str, EngineValues] = {}
    for engine in engines:
        copy = known.get(engine.id)
        # An engine's version is one of the registry's, which no other engine has.
        if copy is None or copy.version != engine.version:
            copy = EngineValues(engine)
        found[engine.id] = copy
    return found


def _copied(family: OpenFamily) -> OpenFamily:
    children = {
        key: value.copy() if isinstance(value, Histogram) else value
        for key, value in family.children.items()
    }
    return dataclasses.replace(family, children=children)
