"""Encoder of Prometheus' protobuf exposition (client_model's ``MetricFamily``).

Field numbers are those of the schema; a tag is the number and the wire type in one byte. A page
is a sequence of families, each with its length before it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from operator import sub
from struct import Struct

from sidestep.catalog.buckets import Bounds
from sidestep.metrics.exemplars import NO_EXEMPLARS, Exemplar, Exemplars
from sidestep.metrics.exponential_buckets import ZERO_THRESHOLD
from sidestep.metrics.native_histogram import NativeHistogram

KINDS: Mapping[str, int] = {
    "counter": 0,
    "gauge": 1,
    "summary": 2,
    "untyped": 3,
    "histogram": 4,
}
VALUE_TAGS: Mapping[str, bytes] = {"gauge": b"\x12", "counter": b"\x1a", "untyped": b"\x2a"}
"""Tag of the field of ``Metric`` that holds a single value, by kind."""
MAX_COUNT = 1 << 62
"""Highest count: one that does not fit into 64 bits would make the whole page unreadable."""
MAX_GAP = 2
"""Empty buckets that take fewer bytes than a new span."""

_double = Struct("<d").pack
_HISTOGRAM, _SUMMARY, _NATIVE_EXEMPLAR = b"\x3a", b"\x22", b"\x82\x01"
_NATIVE_ZERO = b"\x31" + _double(ZERO_THRESHOLD)


def varint(number: int) -> bytes:
    """Encode a 64-bit integer, 7 bits per byte; a negative one takes ten bytes."""
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
    """Encode a signed integer so that small absolute values are short."""
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def sized(tag: bytes, body: bytes) -> bytes:
    """Encode a field that is a message or text."""
    return b"%b%b%b" % (tag, varint(len(body)), body)


def labels(pairs: Iterable[tuple[str, str]]) -> bytes:
    """Encode the labels of a series, in this order."""
    return b"".join(
        sized(b"\x0a", sized(b"\x0a", name.encode()) + sized(b"\x12", value.encode()))
        for name, value in pairs
    )


def family(name: str, kind: str, text: str, metrics: Sequence[bytes]) -> list[bytes]:
    """Return a family, in pieces, of series that ``metric`` encoded."""
    head = sized(b"\x0a", name.encode()) + sized(b"\x12", text.encode())
    head += b"\x18" + varint(KINDS[kind])
    length = len(head) + sum(map(len, metrics))
    return [varint(length) + head, *metrics]


def metric(own: bytes, value: bytes, stamp: int | None = None) -> bytes:
    """Encode a series: labels, value, and its timestamp in milliseconds if it has one."""
    time = b"" if stamp is None else b"\x30" + varint(stamp)
    return b"\x22%b%b%b%b" % (varint(len(own) + len(value) + len(time)), own, value, time)


def single(kind: str, value: float, created: float = 0.0) -> bytes:
    """Encode the value of a counter, a gauge or an untyped metric."""
    body = b"\x09" + _double(value)
    if created and kind == "counter":
        body += timestamp(b"\x1a", created)
    return VALUE_TAGS[kind] + bytes((len(body),)) + body


def summary(
    count: int, total: float, quantiles: Iterable[tuple[float, float]] = (), created: float = 0.0
) -> bytes:
    """Encode the value of a summary."""
    parts = [b"\x08", varint(min(count, MAX_COUNT)), b"\x11", _double(total)]
    for quantile, value in quantiles:
        parts.append(sized(b"\x1a", b"\x09" + _double(quantile) + b"\x11" + _double(value)))
    if created:
        parts.append(timestamp(b"\x22", created))
    return sized(_SUMMARY, b"".join(parts))


def histogram(
    total: float,
    bounds: Bounds,
    counts: Sequence[int],
    native: NativeHistogram | None = None,
    exemplars: Exemplars = NO_EXEMPLARS,
) -> bytes:
    """Encode the value of a histogram.

    Args:
        total: Sum of the observations.
        bounds: Bounds of the classic buckets, +Inf included; empty to leave them out.
        counts: Cumulative counts; the last is the number of all observations.
        native: Source of native buckets; None to leave them out.
        exemplars: Those of the classic buckets; with native buckets they follow these as well, where
            Prometheus looks for them.
    """
    encoded = {bucket: _exemplar(one) for bucket, one in exemplars.items()} if exemplars else {}
    parts = [b"\x08", varint(min(counts[-1], MAX_COUNT)), b"\x11", _double(total)]
    for bucket, (count, bound) in enumerate(zip(counts, _bound_fields(bounds), strict=False)):
        number = varint(min(count, MAX_COUNT))
        if bucket in encoded:
            body = b"\x08" + number + bound + sized(b"\x1a", encoded[bucket])
            parts.append(sized(b"\x1a", body))
        else:
            parts += (b"\x1a", bytes((len(number) + 10,)), b"\x08", number, bound)
    if native is not None and counts[-1] <= MAX_COUNT:
        parts.append(_native(native))
        if native.created:
            parts.append(timestamp(b"\x7a", native.created))
        parts += [sized(_NATIVE_EXEMPLAR, one) for one in encoded.values()]
    return sized(_HISTOGRAM, b"".join(parts))


@functools.lru_cache(maxsize=1024)
def _bound_fields(bounds: Bounds) -> list[bytes]:
    return [b"\x11" + _double(bound) for bound in bounds]


def _exemplar(one: Exemplar) -> bytes:
    context = labels((("trace_id", one.trace_id), ("span_id", one.span_id)))
    return context + b"\x11" + _double(one.value) + _timestamp(b"\x1a", one.time)


@functools.lru_cache(maxsize=4096)
def timestamp(tag: bytes, stamp: float) -> bytes:
    """Encode a time in seconds; cached, as most series of an engine have the same."""
    return _timestamp(tag, stamp)


def _timestamp(tag: bytes, stamp: float) -> bytes:
    seconds = int(stamp)
    nanos = min(int((stamp - seconds) * 1e9), 999_999_999)
    return sized(tag, b"\x08" + varint(seconds) + b"\x10" + varint(nanos))


def _native(native: NativeHistogram) -> bytes:
    """Encode schema, zero bucket, spans of adjacent buckets, and differences of counts."""
    spans: list[tuple[int, int]] = []
    counts: list[int] = []
    offset = following = start = 0
    for index, count in sorted(native.buckets.items()):
        gap = index - following
        if not counts:
            offset = gap
        elif gap > MAX_GAP:
            spans.append((offset, len(counts) - start))
            offset, start = gap, len(counts)
        elif gap:
            counts += (0,) * gap
        counts.append(count)
        following = index + 1
    # An empty span marks a histogram without observations as native.
    spans.append((offset, len(counts) - start))
    parts = [b"\x28", zigzag(native.schema), _NATIVE_ZERO, b"\x38", varint(native.zeros)]
    for after, length in spans:
        parts.append(sized(b"\x62", b"\x08" + zigzag(after) + b"\x10" + varint(length)))
    parts += map(_delta, map(sub, counts, (0, *counts)))
    return b"".join(parts)


@functools.lru_cache(maxsize=4096)
def _delta(number: int) -> bytes:
    """Encode a difference of counts; cached, as most are small and repeat."""
    return b"\x68" + zigzag(number)
