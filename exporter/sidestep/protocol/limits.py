"""Bounds on everything a sender may say; both ends hold them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

VERSION = 1

MAX_FRAME_BYTES = 1 << 20
MAX_ITEM_BYTES = 256 << 10
MAX_BATCH_ITEMS = 512
MAX_OBSERVATIONS = 4096
MAX_STRUCTS = 1024
"""Finished requests, or evicted blocks, of one item."""
MAX_ENGINES_PER_STREAM = 256
MAX_LABELS = 128
MAX_LABEL_CHARS = 256
MAX_FAMILIES = 256
MAX_BOUNDS = 256
MAX_OPEN_VALUES = 64
"""Label values that nobody knows beforehand, per family and engine."""
OTHER = "__other__"
"""The label value that takes what no other may."""
COUNT_LIMIT = 1 << 40
"""No delta, gauge or id of one item is larger: 2**40 tokens a step is not an engine."""
TOKENS_LIMIT = 1 << 20
"""Nor does one request get more tokens out of one step: its running total fits into 64 bits."""
FLOPS_LIMIT = 1 << 62
"""Operations and bytes of one step are the exception: an H100 passes 2**40 in a millisecond."""
VALUE_LIMIT = 1e15

Count = Annotated[int, Meta(ge=0, le=COUNT_LIMIT)]
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_LIMIT)]
Volume = Annotated[int, Meta(ge=0, le=FLOPS_LIMIT)]
Number = Annotated[float, Meta(ge=-VALUE_LIMIT, le=VALUE_LIMIT)]
"""A bound also keeps NaN and the infinities out: msgspec compares, and NaN never fits."""
Ratio = Annotated[float, Meta(ge=0.0, le=1e6)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=VALUE_LIMIT)]
Text = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
Identifier = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
LabelName = Annotated[str, Meta(pattern=r"^(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,127}\Z")]
FamilyName = Annotated[str, Meta(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]{0,127}\Z")]
Seq = Annotated[int, Meta(ge=0, le=1 << 62)]
Random64 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""63 bits: msgspec bounds integers within a signed 64-bit word."""

# What a list holds is checked where it is used: the accumulators sort every
# batch anyway, so its two ends and its sum prove the rest finite.
Observations = Annotated[list[float], Meta(max_length=MAX_OBSERVATIONS)]
Counts = Annotated[list[Count], Meta(max_length=MAX_OBSERVATIONS)]
Tally = Annotated[dict[Text, Count], Meta(max_length=MAX_LABELS)]
Labels = Annotated[dict[LabelName, Text], Meta(max_length=MAX_LABELS)]


def is_printable(text: str) -> bool:
    """Whether ``text`` may be a label value: printable, so never a newline or a NUL."""
    return text.isprintable()
