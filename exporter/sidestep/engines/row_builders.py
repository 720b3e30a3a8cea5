"""Builders of catalogue rows, by the row's kind."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.row import ENGINE_LABELS, Kind, Row, Sampled, Source


def row(
    kind: Kind,
    name: str,
    source: Source,
    text: str,
    *,
    own: tuple[str, ...] = (),
    shared: tuple[str, ...] = ENGINE_LABELS,
    buckets: str | Bounds = "",
    **more: Any,
) -> Row:
    """Return a row with the labels ``shared`` and ``own``; see ``Row`` for the other arguments.

    ``buckets`` is the name of a bucket family, or bounds.
    """
    bounds: Any = {"buckets" if isinstance(buckets, str) else "bounds": buckets}
    labels = tuple(sorted((*shared, *own)))
    return Row(
        name=name,
        kind=kind,
        source=source,
        help=text,
        labels=labels,
        shared=shared,
        **bounds,
        **more,
    )


counter = functools.partial(row, "counter")
gauge = functools.partial(row, "gauge")
histogram = functools.partial(row, "histogram")


@dataclasses.dataclass(frozen=True, slots=True)
class SampledRows:
    """Builder of rows that Samples items feed, for engines with the same labels."""

    prefix: str
    shared: tuple[str, ...] = ENGINE_LABELS
    extra_labels: bool = False
    mirrored: bool = False

    def row(self, kind: Kind, name: str, text: str, *own: str, **more: Any) -> Row:
        """Return a row with the labels ``own`` besides ``shared``; see the function ``row``."""
        same: Any = {"extra_labels": self.extra_labels, "mirrored": self.mirrored, **more}
        return row(kind, self.prefix + name, Sampled(), text, own=own, shared=self.shared, **same)

    counter = functools.partialmethod(row, "counter")
    gauge = functools.partialmethod(row, "gauge")
    summary = functools.partialmethod(row, "summary")

    def histogram(self, name: str, text: str, buckets: Bounds | str, *own: str) -> Row:
        """Return a histogram; ``buckets`` are its bounds or the name of a bucket family."""
        return self.row("histogram", name, text, *own, buckets=buckets)
