"""A native histogram's buckets, as they travel beside the classic ones."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import Seconds

COARSEST, FINEST = -4, 8
"""Schemas that Prometheus knows."""
MAX_NATIVE = 512
"""Buckets of one histogram: more than any release of ours keeps."""

Schema = Annotated[int, Meta(ge=COARSEST, le=FINEST)]
Index = Annotated[int, Meta(ge=-(1 << 20), le=1 << 20)]
Wide = Annotated[str, Meta(max_length=64)]
"""An integer that 64 bits do not hold."""


class NativeBuckets(msgspec.Struct, array_like=True, gc=False):
    """Counts of exponential buckets; with ``zeros`` they come to the classic histogram's count.

    Attributes:
        zeros: Observations of nothing, or of next to nothing.
        indices: Of the buckets, in any order.
        counts: Of each, not cumulative.
        created: Unix time since when they count; 0.0 where that is not told.
    """

    schema: Schema
    zeros: int | Wide = 0
    indices: Annotated[list[Index], Meta(max_length=MAX_NATIVE)] = []
    counts: Annotated[list[int | Wide], Meta(max_length=MAX_NATIVE)] = []
    created: Seconds = 0.0
