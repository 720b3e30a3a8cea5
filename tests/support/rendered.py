"""Pages of a registry's engines at this moment."""

from __future__ import annotations

from collections.abc import Collection

from sidestep.exposition.engine_values import EngineCopier, RegistryValues
from sidestep.exposition.protobuf_page import ProtobufPage
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import TextPage
from sidestep.metrics.registry import Registry


def copied(registry: Registry, *, with_gone: bool = False) -> RegistryValues:
    """Return the values of a registry's engines now."""
    return EngineCopier(registry).copy(with_gone=with_gone)


def render(
    registry: Registry,
    series_filter: SeriesFilter | None = None,
    *,
    openmetrics: bool = False,
    names: Collection[str] = (),
) -> bytes:
    """Return the page as text, without the closing line of OpenMetrics."""
    page = TextPage(series_filter, exemplars=openmetrics)
    values = copied(registry, with_gone=bool(page.series_filter.dropped_labels))
    return b"".join(page.write(values, openmetrics=openmetrics, names=names))


def render_protobuf(registry: Registry, names: Collection[str] = ()) -> bytes:
    """Return the page as protobuf messages."""
    native = registry.series.native
    page = ProtobufPage(classic_buckets=native is None or native.both)
    return b"".join(page.write(copied(registry), names))
