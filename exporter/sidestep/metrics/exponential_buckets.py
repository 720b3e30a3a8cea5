"""The exponential buckets of native histograms.

Bucket ``i`` of schema ``s`` holds values above ``2**((i - 1) / 2**s)`` and at most
``2**(i / 2**s)``. Schema 3 has eight buckets to a power of two, so that the midpoint of a bucket
is within 4.4 % of every value in it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from sidestep.catalog.buckets import Bounds
from sidestep.errors import WireError
from sidestep.protocol.engine_totals import NativeBuckets
from sidestep.protocol.limits import FINEST, VALUE_LIMIT

ZERO_THRESHOLD = 2.0**-128
"""The highest value that counts in the zero bucket."""
MAX_BUCKETS = 160
"""Most buckets of one histogram; beyond that, the resolution is halved."""


DIVISIONS: Sequence[Bounds] = [
    tuple(0.5 * 2.0 ** (part / (1 << schema)) for part in range(1 << schema))
    for schema in range(FINEST + 1)
]
"""By schema: the upper bounds of the buckets within a power of two, as fractions from ``frexp``.

A logarithm is inexact for values that lie on a bound; these are exact."""


def index_of(schema: int, value: float) -> int:
    """Return the index of the bucket that holds ``value``, which is over ``ZERO_THRESHOLD``."""
    fraction, exponent = math.frexp(value)
    if schema >= 0:
        return bisect_left(DIVISIONS[schema], fraction) + ((exponent - 1) << schema)
    return -(-(bisect_left(DIVISIONS[0], fraction) + exponent - 1) >> -schema)


def upper(schema: int, index: int) -> float:
    """Return the upper bound of a bucket, which is the largest value that it holds."""
    if schema < 0:
        return math.ldexp(1.0, index << -schema)
    power, part = divmod(index, 1 << schema)
    return math.ldexp(DIVISIONS[schema][part], power + 1)


def coarser(buckets: Mapping[int, int], steps: int = 1) -> dict[int, int]:
    """Return counts by index for a schema that is lower by ``steps``; each step merges bucket pairs."""
    found: dict[int, int] = {}
    for index, count in buckets.items():
        wider = -(-index >> steps)
        found[wider] = found.get(wider, 0) + count
    return found


def as_classic(native: NativeBuckets) -> tuple[Bounds, list[int]]:
    """Return native buckets as bounds and counts, not cumulative, with an empty one for +Inf."""
    found = sorted(zip(native.indices, map(int, native.counts), strict=True))
    bounds = (0.0, *(upper(native.schema, index) for index, _ in found))
    return bounds, [int(native.zeros), *(count for _, count in found), 0]


def check_native(native: NativeBuckets, count: int) -> None:
    """Check that ``native`` holds ``count`` observations in valid buckets."""
    indices, schema = native.indices, native.schema
    if not len(indices) == len(native.counts) == len(set(indices)):
        raise WireError("bad_bounds", "native buckets and their counts do not fit")
    lowest, highest = (
        index_of(schema, math.nextafter(ZERO_THRESHOLD, 1.0)),
        index_of(schema, 2 * VALUE_LIMIT),
    )
    if indices and not lowest <= min(indices) <= max(indices) <= highest:
        raise WireError("bad_bounds", "a native bucket that no value has")
    counts = [n if isinstance(n, int) else _number(n) for n in (native.zeros, *native.counts)]
    if min(counts) < 0:
        raise WireError("bad_item", "a native bucket cannot have this count")
    if sum(counts) != count:
        raise WireError("bad_item", "native buckets hold another number of observations")


def _number(text: str) -> int:
    """Parse a count that does not fit into 64 bits; return -1 if ``text`` is no number."""
    return int(text) if text.isascii() and text.isdecimal() else -1
