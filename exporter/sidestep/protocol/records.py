"""An engine's series as one value: what was folded while nothing could be sent, what is kept.

Positions mean what the head's lists of names say, so that two releases whose
catalogues differ understand each other. Amounts are checked where they are added
(``records``): what is kept may have grown over what a single item may say.
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
    Seconds,
    Text,
)
from sidestep.protocol.messages import Bounds, EngineInfo
from sidestep.protocol.native_buckets import NativeBuckets

MAX_PLACES = 4096
"""Scalars, histograms or self-described families of one engine."""
MAX_KEYED = 64
MAX_OPEN = 640
"""Families with label values that nobody knows, of the catalogue and not."""
MAX_CHILDREN = 256
MAX_OPEN_CHILDREN = 96
"""Of one family: more than the caps on label values let in, and few enough for all to be read."""
TOTAL_LIMIT = 1 << 62

Amount = int | float | str
"""A string is an integer that 64 bits do not hold: operations of a GPU are such."""
Total = Annotated[int, Meta(ge=0, le=TOTAL_LIMIT)]
Names = Annotated[list[Text], Meta(max_length=MAX_PLACES)]
# All adapters in use are one label value, as the engine has it: longer than any other.
Values = Annotated[list[Annotated[str, Meta(max_length=1 << 17)]], Meta(max_length=MAX_LABELS)]


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
    """A family that described itself."""

    name: FamilyName
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    labels: Values
    bounds: Annotated[list[Number], Meta(max_length=MAX_BOUNDS)] = []
    children: Annotated[list[Child], Meta(max_length=MAX_OPEN_CHILDREN)] = []


class Hits(msgspec.Struct, array_like=True, gc=False):
    """Cache lookups of the recent past, as one."""

    requests: Total = 0
    queries: Total = 0
    hits: Total = 0


class Head(msgspec.Struct, array_like=True, gc=False):
    """Which engine it is, and what the positions mean; changes with a Hello only.

    Attributes:
        engine: As its front ends say.
        core_info: Info metrics as its core says.
        scalars: Family and, where the family has a label, its value.
        histograms: Families.
        bounds: Of each of them.
        keyed: Families with label values that nobody knows beforehand.
    """

    engine: EngineInfo
    core_info: dict[Text, Labels]
    scalars: Annotated[list[tuple[Text, Text]], Meta(max_length=MAX_PLACES)]
    histograms: Names
    bounds: Annotated[list[Bounds], Meta(max_length=MAX_PLACES)]
    keyed: Annotated[list[Text], Meta(max_length=MAX_KEYED)]


class Totals(msgspec.Struct, array_like=True, gc=False):
    """The values.

    Attributes:
        scalars: None is no sample.
        histograms: None is not shown yet.
        gauge_stamp: Host-monotonic stamp of the newest gauges; 0.0 where there are none.
        held_tokens: Tokens of the step whose scheduler has not told of it.
        hits: Of the prefix cache, of an external one, and of the multimodal one.
        seen: Options whose families are shown.
        restarts: Times that a stream of the engine came back as a new process.
        limited: Updates that went to ``__other__``.
        cut_off: Requests that began in what was folded, and did not end in it; None
            where no request events were folded.
        blocks: Whether block events were folded.
        looked: The last statistics that were polled of the engine's server, if it is polled;
            encoded, in the form of its dialect.
        created: Unix time since when it counts; 0.0 where that is not told.
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
    looked: Annotated[list[msgspec.Raw], Meta(max_length=1)] = []
    created: Seconds = 0.0


class Record(msgspec.Struct, array_like=True, gc=False):
    """One engine."""

    head: Head
    totals: Totals


class EncodedRecord(msgspec.Struct, array_like=True, gc=False):
    """Likewise, with a head that is kept encoded."""

    head: msgspec.Raw
    totals: Totals
