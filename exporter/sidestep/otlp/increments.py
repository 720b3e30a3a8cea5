"""Delta temporality: increments since the last push that the receiver accepted."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

import msgspec

from sidestep.errors import WireError
from sidestep.metrics.exponential_buckets import coarser
from sidestep.otlp.page_families import NANOS, Exponential, Series, SeriesFamily, Value
from sidestep.snapshot.state_file import StateDirectory

log = logging.getLogger(__name__)

FILE = "otlp-totals"
"""The file of the state directory that has the totals."""
KEPT = 24 * 3600 * NANOS
"""Nanoseconds for which the total of a series that has left the page is kept."""
PER_PIECE = 1000
"""Totals that are encoded at once: other threads run in between."""

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Name of the family and sorted labels."""


class Total(msgspec.Struct, frozen=True, array_like=True):
    """The value that a receiver knows of a series, when counting began, and the time of the push."""

    value: Value
    start: int
    stamp: int


Totals = list[tuple[Key, Total]]


class Increments:
    """Increments of the series of some kinds of families.

    An increment that was not accepted is part of the next one. With a state directory, the totals
    outlive the process, as the counters do.
    """

    def __init__(self, kinds: Collection[str], directory: StateDirectory | None) -> None:
        self.kinds = kinds
        self._directory = directory
        self._accepted: dict[Key, Total] = {}
        self._sent: dict[Key, Total] = {}
        """Totals of series read since the last commit."""
        self._read: set[Key] = set()
        """Series read since the totals were last written."""
        if kinds and directory is not None:
            self._accepted = dict(_read(directory))

    def of(self, families: Iterable[SeriesFamily], stamp: int) -> Iterator[SeriesFamily]:
        """Yield the families with increments, of the time ``stamp``, in place of totals."""
        for family in families:
            if family.kind in self.kinds:
                yield family._replace(series=self._of_family(family, stamp))
            else:
                yield family

    def _of_family(self, family: SeriesFamily, stamp: int) -> Iterator[Series]:
        for one in family.series:
            if isinstance(one.value, int):
                # The file has no integers over 64 bits, which operations of a GPU are in hours.
                one = one._replace(value=float(one.value))  # noqa: PLW2901
            key = family.name, tuple(sorted(one.labels.items()))
            known = self._accepted.get(key)
            self._sent[key] = Total(one.value, one.start, stamp)
            self._read.add(key)
            if known is not None:
                # Where the clock was set back, a restart, or another engine in a sum, makes the start an
                # earlier one, although the total continues.
                value = difference(one.value, known.value) if one.start <= known.start else None
                if value is None:
                    # Counting began again.
                    yield one._replace(start=max(one.start, known.stamp))
                else:
                    yield Series(one.labels, value, known.stamp)
            elif one.start:
                yield one
            # Else another exporter may have counted for years: its first total is no increment.

    def commit(self) -> None:
        """Note that the receiver has accepted all series read since the last call."""
        self._accepted.update(self._sent)
        self._sent.clear()

    def discard(self) -> None:
        """Note that it has not."""
        self._sent.clear()

    def save(self, stamp: int, *, has_read_all: bool = True) -> None:
        """Write the totals to the state directory, without those of series that left long ago.

        These are known only if all series were read. The total of one that is on the page has any age:
        the receiver may have accepted nothing for days, or the clock may have been set.
        """
        if not self.kinds:
            return
        if has_read_all:
            self._accepted = {
                key: total
                for key, total in self._accepted.items()
                if key in self._read or total.stamp > stamp - KEPT
            }
        self._read.clear()
        if self._directory is None:
            return
        items = iter(self._accepted.items())
        pieces = []
        try:
            while some := list(islice(items, PER_PIECE)):
                pieces.append(msgspec.msgpack.encode(some))
            self._directory.write(pieces, FILE)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            log.warning("cannot write the totals sent by OTLP: %s", reason)


def _read(directory: StateDirectory) -> Iterator[tuple[Key, Total]]:
    try:
        for piece in directory.read(FILE) or ():
            yield from msgspec.msgpack.decode(piece, type=Totals)
    except (WireError, msgspec.MsgspecError) as error:
        log.warning(
            "cannot read the totals sent by OTLP, so that increments are sent twice: %s", error
        )


def difference(value: Value, before: Value) -> Value | None:
    """Return by how much a value has grown; None if it cannot have grown from ``before``."""
    if isinstance(value, Exponential):
        return _grown(value, before) if isinstance(before, Exponential) else None
    if isinstance(value, tuple):
        if not isinstance(before, tuple) or value[0] != before[0]:
            return None
        counts = [count - known for count, known in zip(value[1], before[1], strict=True)]
        return None if min(counts) < 0 else (value[0], counts, value[2] - before[2])
    if isinstance(before, int | float) and value >= before:
        return value - before
    return None


def _grown(value: Exponential, before: Exponential) -> Exponential | None:
    """Return the increment; the resolution of a histogram only decreases while it counts."""
    if before.scale < value.scale or before.zeros > value.zeros:
        return None
    known = coarser(before.buckets, before.scale - value.scale)
    if any(count > value.buckets.get(index, 0) for index, count in known.items()):
        return None
    buckets = {index: count - known.get(index, 0) for index, count in value.buckets.items()}
    return Exponential(
        value.scale,
        value.zeros - before.zeros,
        {index: count for index, count in buckets.items() if count},
        value.total - before.total,
    )
