"""Validation of records from senders, which are untrusted input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from sidestep.errors import WireError
from sidestep.metrics.engine import Engine
from sidestep.metrics.merge import check_slots
from sidestep.metrics.record_codec import extremes, number_of
from sidestep.protocol.limits import MAX_OBSERVATIONS, MAX_OPEN_VALUES
from sidestep.protocol.records import Amount, Buckets, Child, Record

LARGEST = 10**30
"""Largest accepted number. Items within their limits do not reach it in years, and sums of such
numbers over all sequence numbers still fit into a float and a snapshot."""
MAX_CHILDREN = 4 * MAX_OPEN_VALUES
"""Most children of one family; a family with two labels may have twice the values."""

TOO_LARGE = "a number that is too large"

Name = TypeVar("Name", str, tuple[str, str])


def check_record(engine: Engine, record: Record) -> None:
    """Check that all of ``record`` except self-described families can be added to ``engine``.

    Raises:
        WireError: A number is too large, a series occurs twice, or there are more children than an
            engine may have; nothing of the record may be added.
    """
    head, totals = record.head, record.totals
    _check_unique(head.scalars)
    _check_unique(head.histograms)
    _check_unique(head.keyed)
    _check_unique([family.name for family in totals.open])
    families = [*totals.keyed, *(family.children for family in totals.open)]
    sizes = [len(children) for children in families]
    if sum(sizes) > MAX_OBSERVATIONS or max(sizes, default=0) > MAX_CHILDREN:
        raise WireError("over_limit", "more children than an engine has")
    _check_numbers(value for value in totals.scalars if value is not None)
    _check_histograms(totals.histograms)
    for children in families:
        _check_children(children)
    check_slots(engine, record)


def _check_unique(names: Sequence[Name]) -> None:
    if len(set(names)) != len(names):
        raise WireError("bad_item", "a record names a series twice")


def _check_children(children: Sequence[Child]) -> None:
    _check_numbers(child.value for child in children)
    _check_histograms([child.buckets for child in children])


def _check_histograms(histograms: Iterable[Buckets | None]) -> None:
    for buckets in histograms:
        if buckets is not None:
            _check_numbers((buckets.total,))
            if extremes(buckets.counts)[1] > LARGEST:
                raise WireError("bad_item", TOO_LARGE)


def _check_numbers(values: Iterable[Amount]) -> None:
    if any(not -LARGEST <= _to_number(value) <= LARGEST for value in values):
        raise WireError("bad_item", TOO_LARGE)


def _to_number(value: Amount) -> float:
    return number_of(value) if isinstance(value, str) else value
