"""The codec of an engine's totals, which are in snapshots and in batches of folded items."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import msgspec

from sidestep.catalog.dialect import DialectTables, Polled
from sidestep.errors import WireError
from sidestep.metrics.derived_counters import update_derived
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import Number, OpenFamily, Part
from sidestep.metrics.exponential_buckets import check_native
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.recent_steps import RecentSteps
from sidestep.protocol.engine_totals import (
    Amount,
    Buckets,
    Child,
    EncodedTotals,
    EngineTotals,
    Head,
    OpenTotals,
    Totals,
)
from sidestep.protocol.messages import DECODE_ERRORS, EngineInfo

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[EngineTotals] = msgspec.msgpack.Decoder(EngineTotals)
INT_LIMIT = 1 << 63
MAX_DIGITS = 64
SAVED_PARTS: Sequence[type[Part]] = (RecentSteps,)
"""Parts of an engine with state that outlives the process."""


def encode_totals(engine: Engine, totals: Totals) -> bytes:
    """Encode ``totals`` of ``engine`` with their head."""
    encoded = EncodedTotals(msgspec.Raw(_head(engine)), totals)
    try:
        return _encoder.encode(encoded)
    except OverflowError:
        _encode_large_ints(totals)
        return _encoder.encode(encoded)


def decode_totals(raw: bytes | msgspec.Raw) -> EngineTotals:
    """Decode the totals in ``raw``."""
    try:
        found = _decoder.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError("bad_item", str(error)) from None
    _check_columns(found)
    for bounds, buckets in zip(found.head.bounds, found.totals.histograms, strict=True):
        if buckets is not None:
            check_buckets(buckets, bounds)
    return found


def _check_columns(found: EngineTotals) -> None:
    head, totals = found.head, found.totals
    columns = (
        (head.scalars, totals.scalars),
        (head.histograms, totals.histograms),
        (head.histograms, head.bounds),
        (head.keyed, totals.keyed),
    )
    if any(len(names) != len(values) for names, values in columns):
        raise WireError("bad_item", "the columns of totals differ in length")


def decode_polled(tables: DialectTables, data: msgspec.Raw) -> Polled:
    """Decode the last statistics that were polled of an engine's server."""
    if tables.polled is None:
        raise WireError("bad_item", f"no statistics are polled of {tables.name}")
    try:
        return msgspec.msgpack.decode(data, type=tables.polled)
    except DECODE_ERRORS as error:
        raise WireError("bad_item", str(error)) from None


def totals_of(engine: Engine) -> Totals:
    """Return the current totals and gauges of ``engine``."""
    update_derived(engine)
    totals = Totals(
        list(engine.values),
        [None if h is None else h.to_wire() for h in engine.histograms],
        [[Child(list(key), value) for key, value in c.items()] for c in engine.keyed],
        [_open_totals(family) for family in engine.open_families.values()],
        engine.gauge_stamp,
        seen=sorted(engine.exposed_paths),
        restarts=engine.restarts,
        last_seen=engine.last_seen,
        created=engine.created,
    )
    if engine.statistics is not None:
        totals.polled.append(msgspec.Raw(_encoder.encode(engine.statistics)))
    for kind in SAVED_PARTS:
        engine.part(kind).save(totals)
    return totals


def _head(engine: Engine) -> bytes:
    description, layout = engine.description, engine.layout
    if not description.encoded_head:
        info = EngineInfo(
            engine.id,
            layout.dialect,
            engine.sent_labels,
            dict(description.front_info),
            dict(description.sent_bounds),
            sorted(description.features),
            dict(description.closed),
        )
        head = Head(
            info,
            dict(description.core_info),
            list(layout.scalar_names),
            list(layout.histogram_names),
            [list(engine.bounds_of(slot)) for slot in range(len(layout.histograms))],
            [row.name for row in layout.keyed],
        )
        description.encoded_head = _encoder.encode(head)
    return description.encoded_head


def _open_totals(family: OpenFamily) -> OpenTotals:
    children = [
        Child(list(key), 0, value.to_wire())
        if isinstance(value, Histogram)
        else Child(list(key), value)
        for key, value in family.children.items()
    ]
    return OpenTotals(
        family.name, family.kind, family.help, list(family.labels), list(family.bounds), children
    )


def check_buckets(buckets: Buckets, bounds: Sequence[float]) -> None:
    """Check that ``buckets`` are valid for a histogram with these bounds."""
    if len(buckets.counts) != len(bounds) + 1 or sorted(set(bounds)) != list(bounds):
        raise WireError("bad_bounds", "a histogram's bounds and counts do not fit")
    if extremes(buckets.counts)[0] < 0:
        raise WireError("bad_item", "a histogram cannot have these counts")
    number_of(buckets.total)
    if buckets.native is not None:
        check_native(buckets.native, sum(map(int, buckets.counts)))


def extremes(counts: Sequence[int | str]) -> tuple[Number, Number]:
    """Return the lowest and the highest of ``counts``."""
    # Text is rare, and does not compare with numbers.
    with contextlib.suppress(TypeError):
        lowest, highest = min(counts), max(counts)
        if isinstance(lowest, int) and isinstance(highest, int):
            return lowest, highest
    numbers = [n if isinstance(n, int) else number_of(n) for n in counts]
    return min(numbers), max(numbers)


def number_of(value: Amount, *, negative: bool = False) -> Number:
    """Return ``value`` as a number that can be added.

    Raises:
        WireError: The value is no number, not finite, or negative without ``negative``.
    """
    if isinstance(value, str):
        if not (value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS):
            raise WireError("bad_item", "text that is no number")
        return int(value)
    if not math.isfinite(value) or (value < 0 and not negative):
        raise WireError("bad_item", "a number that cannot be counted")
    return value


def _encode_large_ints(totals: Totals) -> None:
    """Replace integers that do not fit into 64 bits by text."""
    totals.scalars = [v if v is None else _as_text(v) for v in totals.scalars]
    children = [child for found in totals.keyed for child in found]
    children += [child for family in totals.open for child in family.children]
    for child in children:
        child.value = _as_text(child.value)
    for buckets in (*totals.histograms, *(child.buckets for child in children)):
        if buckets is not None:
            buckets.counts = _all_as_text(buckets.counts)
            native = buckets.native
            if native is not None:
                native.counts = _all_as_text(native.counts)
                (native.zeros,) = _all_as_text([native.zeros])


def _all_as_text(counts: list[int | str]) -> list[int | str]:
    return [str(n) if int(n) >= INT_LIMIT else n for n in counts]


def _as_text(value: Amount) -> Amount:
    return str(value) if isinstance(value, int) and value >= INT_LIMIT else value
