"""Native histogram buckets in an engine's totals, in addition to the classic ones."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import Seconds

COARSEST, FINEST = -4, 8
"""Range of schemas that Prometheus supports."""
MAX_NATIVE = 512
"""Maximum buckets of one histogram; every release of sidestep uses fewer."""

Schema = Annotated[int, Meta(ge=COARSEST, le=FINEST)]
Index = Annotated[int, Meta(ge=-(1 << 20), le=1 << 20)]
Wide = Annotated[str, Meta(max_length=64)]
"""An integer over 64 bits."""


class NativeBuckets(msgspec.Struct, array_like=True, gc=False):
    """Counts of exponential buckets; with ``zeros`` they add up to the classic histogram's count.

    Attributes:
        zeros: Observations in the zero bucket.
        indices: Indices of the buckets, in any order.
        counts: Count of each bucket, not cumulative.
        created: Unix time at which counting started; 0.0 where unknown.
    """

    schema: Schema
    zeros: int | Wide = 0
    indices: Annotated[list[Index], Meta(max_length=MAX_NATIVE)] = []
    counts: Annotated[list[int | Wide], Meta(max_length=MAX_NATIVE)] = []
    created: Seconds = 0.0
