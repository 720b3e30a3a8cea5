"""Limits on the content of messages; sender and receiver enforce them."""

from __future__ import annotations

import json
from typing import Annotated

from msgspec import Meta

VERSION = 1

MAX_FRAME_BYTES = 1 << 20
MAX_ITEM_BYTES = 256 << 10
MAX_BATCH_ITEMS = 512
MAX_OBSERVATIONS = 4096
MAX_STRUCTS = 1024
"""Maximum finished requests, or evicted blocks, of one item."""
MAX_ENGINES_PER_STREAM = 256
MAX_LABELS = 128
MAX_LABEL_CHARS = 256
MAX_FAMILIES = 256
MAX_BOUNDS = 256
MAX_OPEN_VALUES = 64
"""Maximum label values that are not known in advance, per family and engine."""
OTHER = "__other__"
"""Label value that counts updates over the limit on label values."""
COUNT_LIMIT = 1 << 40
"""Maximum delta, gauge or id in an item: no engine handles 2**40 tokens per step."""
TOKENS_LIMIT = 1 << 20
"""Maximum tokens of one request per step, so that its running total fits 64 bits."""
FLOPS_LIMIT = 1 << 62
"""Maximum operations or bytes of one step: an H100 exceeds 2**40 in a millisecond."""
VALUE_LIMIT = 1e15
COARSEST, FINEST = -4, 8
"""Range of the schemas of native histograms that Prometheus supports."""

Count = Annotated[int, Meta(ge=0, le=COUNT_LIMIT)]
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_LIMIT)]
Volume = Annotated[int, Meta(ge=0, le=FLOPS_LIMIT)]
Number = Annotated[float, Meta(ge=-VALUE_LIMIT, le=VALUE_LIMIT)]
"""The bounds also reject NaN and infinities: msgspec compares, and NaN never compares true."""
Ratio = Annotated[float, Meta(ge=0.0, le=1e6)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, Meta(ge=0.0, le=VALUE_LIMIT)]
Schema = Annotated[int, Meta(ge=COARSEST, le=FINEST)]
Text = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
Identifier = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
LabelName = Annotated[str, Meta(pattern=r"^(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,127}\Z")]
FamilyName = Annotated[str, Meta(pattern=r"^[a-zA-Z_:][a-zA-Z0-9_:]{0,127}\Z")]
Seq = Annotated[int, Meta(ge=0, le=1 << 62)]
Random64 = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""63 bits: msgspec supports bounds only within signed 64-bit integers."""

# List elements are checked where they are used: the accumulators sort every batch anyway,
# so its two ends and its sum prove that all elements are finite.
Observations = Annotated[list[float], Meta(max_length=MAX_OBSERVATIONS)]
Counts = Annotated[list[Count], Meta(max_length=MAX_OBSERVATIONS)]
Tally = Annotated[dict[Text, Count], Meta(max_length=MAX_LABELS)]
Labels = Annotated[dict[LabelName, Text], Meta(max_length=MAX_LABELS)]


def is_printable(text: str) -> bool:
    """Return whether ``text`` is a valid label value: printable, so without newline or NUL."""
    return text.isprintable()


def escape(text: str) -> str:
    """Return ``text`` for a line of a log or a terminal, with unprintable characters escaped as in JSON.

    A name must not end the line, move the cursor or turn the text around.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return "\\u007f" if char == "\x7f" else json.dumps(char)[1:-1]


def printable(text: object) -> str:
    """Return ``text`` as a valid label value: at most MAX_LABEL_CHARS, no control characters."""
    cut = str(text)[:MAX_LABEL_CHARS]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)
