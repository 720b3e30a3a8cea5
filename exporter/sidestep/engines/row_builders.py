"""Builders of catalogue rows, by the row's kind."""

from __future__ import annotations

import dataclasses
import functools

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.row import ENGINE_LABELS, Combine, Kind, Row, Sampled, Source


def row(
    kind: Kind,
    name: str,
    source: Source,
    text: str,
    *,
    own: tuple[str, ...] = (),
    shared: tuple[str, ...] = ENGINE_LABELS,
    closed: tuple[str, ...] = (),
    buckets: str | Bounds = (),
    combine: Combine = "sum",
    unit_divisor: int = 1,
    extra_labels: bool = False,
    mirrored: bool = False,
    feature: str = "",
    since: str = "",
) -> Row:
    """Return a row; see ``Row`` for the arguments.

    Its labels are ``shared`` and ``own``; ``buckets`` is the name of a bucket family, or bounds.
    """
    return Row(
        name=name,
        kind=kind,
        source=source,
        help=text,
        labels=tuple(sorted((*shared, *own))),
        shared=shared,
        closed=closed,
        buckets=buckets if isinstance(buckets, str) else "",
        bounds=() if isinstance(buckets, str) else buckets,
        combine=combine,
        unit_divisor=unit_divisor,
        extra_labels=extra_labels,
        mirrored=mirrored,
        feature=feature,
        since=since,
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

    def row(
        self,
        kind: Kind,
        name: str,
        text: str,
        *own: str,
        closed: tuple[str, ...] = (),
        buckets: Bounds | str = (),
        combine: Combine = "sum",
    ) -> Row:
        """Return a row with the labels ``own`` besides ``shared``; see the function ``row``."""
        return row(
            kind,
            self.prefix + name,
            Sampled(),
            text,
            own=own,
            shared=self.shared,
            closed=closed,
            buckets=buckets,
            combine=combine,
            extra_labels=self.extra_labels,
            mirrored=self.mirrored,
        )

    counter = functools.partialmethod(row, "counter")
    gauge = functools.partialmethod(row, "gauge")
    summary = functools.partialmethod(row, "summary")

    def histogram(self, name: str, text: str, buckets: Bounds | str, *own: str) -> Row:
        """Return a histogram; ``buckets`` are its bounds or the name of a bucket family."""
        return self.row("histogram", name, text, *own, buckets=buckets)
