"""Messages of Prometheus' protobuf exposition (client_model's ``MetricFamily``) as bytes.

Field numbers are those of the schema; a tag is the number and the wire type in one byte. A page
is all families, each with its length before it, and nothing between.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from operator import sub
from struct import Struct

from sidestep.catalog.buckets import Bounds
from sidestep.metrics.exponential_buckets import ZERO_THRESHOLD
from sidestep.metrics.native_histogram import NativeHistogram

KINDS: Mapping[str, int] = {
    "counter": 0,
    "gauge": 1,
    "summary": 2,
    "untyped": 3,
    "histogram": 4,
}
VALUES: Mapping[str, bytes] = {"gauge": b"\x12", "counter": b"\x1a", "untyped": b"\x2a"}
"""Tag of the field of ``Metric`` that holds a single value, by kind."""
LARGEST = 1 << 62
"""What a count is at most: one that 64 bits do not hold would cost the whole page."""
GAP = 2
"""Empty buckets that are cheaper than a new span."""

_double = Struct("<d").pack
_HISTOGRAM, _SUMMARY = b"\x3a", b"\x22"
_NATIVE_ZERO = b"\x31" + _double(ZERO_THRESHOLD)


def varint(number: int) -> bytes:
    """A whole number of 64 bits, 7 to a byte; a negative one takes ten bytes."""
    if 0 <= number < 128:  # noqa: PLR2004 - most are
        return bytes((number,))
    rest = number & (1 << 64) - 1
    out = bytearray()
    while rest > 127:  # noqa: PLR2004
        out.append(rest & 127 | 128)
        rest >>= 7
    out.append(rest)
    return bytes(out)


def zigzag(number: int) -> bytes:
    """Likewise, one that is small in either direction."""
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def sized(tag: bytes, body: bytes) -> bytes:
    """A field that is a message or text."""
    return b"%b%b%b" % (tag, varint(len(body)), body)


def labels(pairs: Iterable[tuple[str, str]]) -> bytes:
    """The labels of a child, in this order."""
    return b"".join(
        sized(b"\x0a", sized(b"\x0a", name.encode()) + sized(b"\x12", value.encode()))
        for name, value in pairs
    )


def family(name: str, kind: str, text: str, metrics: Sequence[bytes]) -> list[bytes]:
    """A family of children, each as ``metric`` made it, as pieces."""
    head = sized(b"\x0a", name.encode()) + sized(b"\x12", text.encode())
    head += b"\x18" + varint(KINDS[kind])
    length = len(head) + sum(map(len, metrics))
    return [varint(length) + head, *metrics]


def metric(own: bytes, value: bytes, stamp: int | None = None) -> bytes:
    """A child: its labels, its value, and its time in milliseconds where it has one."""
    time = b"" if stamp is None else b"\x30" + varint(stamp)
    return b"\x22%b%b%b%b" % (varint(len(own) + len(value) + len(time)), own, value, time)


def single(kind: str, value: float, created: float = 0.0) -> bytes:
    """The value of a counter, a gauge or what has no type."""
    body = b"\x09" + _double(value)
    if created and kind == "counter":
        body += timestamp(b"\x1a", created)
    return VALUES[kind] + bytes((len(body),)) + body


def summary(
    count: int, total: float, quantiles: Iterable[tuple[float, float]] = (), created: float = 0.0
) -> bytes:
    """The value of a summary."""
    parts = [b"\x08", varint(min(count, LARGEST)), b"\x11", _double(total)]
    for quantile, value in quantiles:
        parts.append(sized(b"\x1a", b"\x09" + _double(quantile) + b"\x11" + _double(value)))
    if created:
        parts.append(timestamp(b"\x22", created))
    return sized(_SUMMARY, b"".join(parts))


def histogram(
    total: float, bounds: Bounds, counts: Sequence[int], native: NativeHistogram | None = None
) -> bytes:
    """The value of a histogram.

    Args:
        total: The sum of what was observed.
        bounds: Of its classic buckets, +Inf included; empty where they are not to be told.
        counts: Cumulative; the last is the number of all observations.
        native: Where its native buckets are to be told: whose.
    """
    parts = [b"\x08", varint(min(counts[-1], LARGEST)), b"\x11", _double(total)]
    for count, bound in zip(counts, _bound_fields(bounds), strict=False):
        number = varint(min(count, LARGEST))
        parts += (b"\x1a", bytes((len(number) + 10,)), b"\x08", number, bound)
    if native is not None and counts[-1] <= LARGEST:
        parts.append(_native(native))
        if native.created:
            parts.append(timestamp(b"\x7a", native.created))
    return sized(_HISTOGRAM, b"".join(parts))


@functools.lru_cache(maxsize=1024)
def _bound_fields(bounds: Bounds) -> list[bytes]:
    return [b"\x11" + _double(bound) for bound in bounds]


@functools.lru_cache(maxsize=4096)
def timestamp(tag: bytes, stamp: float) -> bytes:
    """A time in seconds: most children of an engine have the same."""
    seconds = int(stamp)
    nanos = min(int((stamp - seconds) * 1e9), 999_999_999)
    return sized(tag, b"\x08" + varint(seconds) + b"\x10" + varint(nanos))


def _native(native: NativeHistogram) -> bytes:
    """Schema, zero bucket, spans of buckets in a row, and each count less the one before."""
    spans: list[tuple[int, int]] = []
    counts: list[int] = []
    offset = following = start = 0
    for index, count in sorted(native.buckets.items()):
        gap = index - following
        if not counts:
            offset = gap
        elif gap > GAP:
            spans.append((offset, len(counts) - start))
            offset, start = gap, len(counts)
        elif gap:
            counts += (0,) * gap
        counts.append(count)
        following = index + 1
    # One without observations is known for native by a span that holds nothing.
    spans.append((offset, len(counts) - start))
    parts = [b"\x28", zigzag(native.schema), _NATIVE_ZERO, b"\x38", varint(native.zeros)]
    for after, length in spans:
        parts.append(sized(b"\x62", b"\x08" + zigzag(after) + b"\x10" + varint(length)))
    parts += map(_delta, map(sub, counts, (0, *counts)))
    return b"".join(parts)


@functools.lru_cache(maxsize=4096)
def _delta(number: int) -> bytes:
    """Most are small, and come again."""
    return b"\x68" + zigzag(number)
