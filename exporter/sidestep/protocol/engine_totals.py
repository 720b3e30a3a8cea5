"""Totals of an engine: its series as one value, in snapshots and for items that a sender folds.

The head names what each position of a list means, so that releases with different catalogues
are compatible. Amounts are checked where they are added (``metrics.merge``): the
totals may exceed the limits of a single item.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sidestep.protocol.limits import (
    MAX_BOUNDS,
    MAX_LABELS,
    Count,
    FamilyName,
    Labels,
    Number,
    Schema,
    Seconds,
    Text,
)
from sidestep.protocol.messages import Bounds, EngineInfo
from sidestep.protocol.request_events import MAX_CLIENTS

MAX_PLACES = 4096
"""Maximum number of scalars, histograms or self-described families of one engine."""
MAX_KEYED = 64
MAX_OPEN = 640
"""Maximum number of families whose label values are not known in advance, in the catalogue or not."""
MAX_CHILDREN = 256
MAX_OPEN_CHILDREN = 96
"""Maximum children of one family: above the limits on label values, and few enough to decode."""
TOTAL_LIMIT = 1 << 62
MAX_NATIVE = 512
"""Maximum native buckets of one histogram; every release of sidestep uses fewer."""

Amount = int | float | str
"""A string is an integer over 64 bits, such as the operations of a GPU."""
Total = Annotated[int, Meta(ge=0, le=TOTAL_LIMIT)]
Index = Annotated[int, Meta(ge=-(1 << 20), le=1 << 20)]
Wide = Annotated[str, Meta(max_length=64)]
"""An integer over 64 bits."""
Names = Annotated[list[Text], Meta(max_length=MAX_PLACES)]
# All LoRA adapters in use form one label value, as in the engine: longer than any other.
Values = Annotated[list[Annotated[str, Meta(max_length=1 << 17)]], Meta(max_length=MAX_LABELS)]


class NativeBuckets(msgspec.Struct, array_like=True, gc=False):
    """Counts of exponential buckets; with ``zeros`` they add up to the classic histogram's count.

    Attributes:
        indices: Indices of the buckets, in any order.
        counts: Count of each bucket, not cumulative.
        created: Unix time at which counting started; 0.0 where unknown.
    """

    schema: Schema
    zeros: int | Wide = 0
    indices: Annotated[list[Index], Meta(max_length=MAX_NATIVE)] = []
    counts: Annotated[list[int | Wide], Meta(max_length=MAX_NATIVE)] = []
    created: Seconds = 0.0


class Buckets(msgspec.Struct, array_like=True, gc=False):
    """A histogram's sum, and its counts per bucket, not cumulative, the last for +Inf."""

    total: float = 0.0
    counts: Annotated[list[int | str], Meta(max_length=MAX_BOUNDS + 1)] = []
    native: NativeBuckets | None = None


class Child(msgspec.Struct, array_like=True, gc=False):
    """One child of a family: a number, or a histogram where ``buckets`` is given."""

    labels: Values
    value: Amount = 0
    buckets: Buckets | None = None


Children = Annotated[list[Child], Meta(max_length=MAX_CHILDREN)]


class OpenTotals(msgspec.Struct, array_like=True, gc=False):
    """A self-described family."""

    name: FamilyName
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    labels: Values
    bounds: Annotated[list[Number], Meta(max_length=MAX_BOUNDS)] = []
    children: Annotated[list[Child], Meta(max_length=MAX_OPEN_CHILDREN)] = []


class Hits(msgspec.Struct, array_like=True, gc=False):
    """Sum of recent cache lookups."""

    requests: Total = 0
    queries: Total = 0
    hits: Total = 0


class Head(msgspec.Struct, array_like=True, gc=False):
    """Description of the engine and of the positions in ``Totals``; only a Hello changes it.

    Attributes:
        engine: Description by the engine's front ends.
        core_info: Info metrics from the engine's core.
        scalars: Family of each scalar and, where the family has a label, its value.
        keyed: Families whose label values are not known in advance.
    """

    engine: EngineInfo
    core_info: dict[Text, Labels]
    scalars: Annotated[list[tuple[Text, Text]], Meta(max_length=MAX_PLACES)]
    histograms: Names
    bounds: Annotated[list[Bounds], Meta(max_length=MAX_PLACES)]
    keyed: Annotated[list[Text], Meta(max_length=MAX_KEYED)]


class Totals(msgspec.Struct, array_like=True, gc=False):
    """Values of an engine's series.

    Attributes:
        scalars: Values; None: no sample.
        histograms: Histograms; None: not exposed yet.
        gauge_stamp: Host-monotonic stamp of the newest gauges; 0.0 where there are none.
        held_tokens: Tokens of a step whose scheduler event has not arrived.
        hits: Lookups of the prefix cache, of an external cache, and of the multimodal cache.
        seen: Options whose families are exposed.
        restarts: Times that a stream of the engine resumed with a new process.
        limited: Updates that were counted under ``__other__``.
        cut_off: Requests that began in the folded items and did not end in them; None
            where no request events were folded.
        process: Number of the process that folded the events, among ``processes`` that send some.
        blocks: Whether block events were folded.
        polled: Last polled statistics of the engine's server, if it is polled; encoded in the
            format of its dialect.
        created: Unix time at which counting started; 0.0 where unknown.
    """

    scalars: Annotated[list[Amount | None], Meta(max_length=MAX_PLACES)] = []
    histograms: Annotated[list[Buckets | None], Meta(max_length=MAX_PLACES)] = []
    keyed: Annotated[list[Children], Meta(max_length=MAX_KEYED)] = []
    open: Annotated[list[OpenTotals], Meta(max_length=MAX_OPEN)] = []
    gauge_stamp: Seconds = 0.0
    held_tokens: Total = 0
    hits: Annotated[list[Hits], Meta(max_length=8)] = []
    seen: Names = []
    restarts: Total = 0
    last_seen: Seconds = 0.0
    limited: Count = 0
    cut_off: Count | None = None
    blocks: bool = False
    polled: Annotated[list[msgspec.Raw], Meta(max_length=1)] = []
    created: Seconds = 0.0
    process: Count = 0
    processes: Annotated[int, Meta(ge=1, le=MAX_CLIENTS)] = 1


class EngineTotals(msgspec.Struct, array_like=True, gc=False):
    """Totals of one engine."""

    head: Head
    totals: Totals


class EncodedTotals(msgspec.Struct, array_like=True, gc=False):
    """Totals of one engine whose head is encoded already, since it is cached."""

    head: msgspec.Raw
    totals: Totals
