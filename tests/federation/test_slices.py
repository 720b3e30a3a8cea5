"""Work that records of other exporters cause in one slice of the event loop, counted in calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from downstream import TOKENS, downstream, push, step, value
from nodes import Node, frames_of, samples
from sidestep.errors import WireError
from sidestep.federation import messages
from sidestep.metrics import record_codec as records
from sidestep.metrics.record_codec import decode_record
from sidestep.protocol.records import Record
from sidestep.protocol.self_described import Family, Sample, Samples

MAX_CALLS = 5000
"""Most calls of one slice, which take about 2 ms."""


def calls(work: Callable[[], object]) -> int:
    """Return the number of calls that ``work`` makes."""
    made = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return made


def slices(upstream: Node, frame: bytes) -> list[int]:
    """Return the number of calls of each slice of work that ``frame`` causes."""
    found = [calls(lambda: upstream.intake.accept(b"exporter", [frame], upstream.now))]
    while upstream.intake.busy:
        found.append(calls(upstream.intake.work))
    return found


def large(families: int, children: int = 64, boot: int = 1) -> Node:
    """Return a downstream exporter whose engine has many self-described series."""
    node = downstream("large", boot, step(3))
    for number in range(families):
        family = Family(f"own_{number}_seconds", "histogram", ["k"], help="H", bounds=[0.5, 1.0])
        family.samples = [
            Sample([f"v{child}"], observations=[0.25, 0.75, 3.0]) for child in range(children)
        ]
        push(node, Samples(0, 1.0, [family]))
    return node


def test_large_record_is_applied_in_small_slices() -> None:
    """The page stays as it was until the last slice."""
    node, upstream = large(28), Node("upstream")
    (first,) = node.frames()
    found = slices(upstream, first)
    push(node, step(4))
    (second,) = node.frames()
    pages = {value(upstream, TOKENS)}
    upstream.intake.accept(b"exporter", [second], upstream.now)
    while upstream.intake.busy:
        found.append(calls(upstream.intake.work))
        pages.add(value(upstream, TOKENS))

    assert pages == {3, 7}
    assert samples(upstream.page) == samples(node.page)
    assert max(found) < MAX_CALLS
    assert upstream.rejected == node.rejected == {}


@pytest.mark.parametrize("families", [0, 28])
def test_new_epoch_is_applied_in_small_slices(families: int) -> None:
    """The cost does not depend on the number of ended epochs, which are one sum."""
    upstream = Node("upstream")
    found: list[int] = []
    for boot in range(1, 6):
        for frame in large(families, boot=boot).frames():
            found += slices(upstream, frame)

    assert value(upstream, TOKENS) == 5 * 3
    assert value(upstream, "own_0_seconds_count") == (5 * 3 * 64 if families else 0)
    assert max(found) < MAX_CALLS
    assert upstream.rejected == {}


def test_engine_discarded_between_two_slices_returns_with_the_next_record() -> None:
    """The interrupted record is dropped without an error."""
    node, upstream = large(28), Node("upstream")
    node.forward_to(upstream)
    (engine,) = upstream.intake.registry.engines.values()
    push(node, step(4))
    (frame,) = node.frames()
    upstream.intake.accept(b"exporter", [frame], upstream.now)
    upstream.intake.work()
    upstream.intake.registry.discard(engine)
    upstream.intake.federation.expire(upstream.now)
    while upstream.intake.busy:
        upstream.intake.work()
    push(node, step(5))
    node.forward_to(upstream)

    assert ("bug",) not in upstream.rejected
    assert samples(upstream.page) == samples(node.page)
    assert upstream.intake.federation.bytes == sum(each.size for each in upstream.intake.federation)


def encoded(make: Callable[[], Record]) -> bytes:
    """Return the record that ``make`` returns, encoded; empty if it is rejected."""
    try:
        return msgspec.msgpack.encode(make())
    except WireError:
        return b""


RECORD = large(3, 5).due()[0].message.data


@given(st.data())
def test_record_decoded_in_parts_is_equal(data: st.DataObject) -> None:
    """Both ways reject the same records."""
    fields = msgspec.msgpack.decode(RECORD)
    for part, column in data.draw(st.sets(st.sampled_from([(0, 4), (1, 0), (1, 1), (1, 2)]))):
        # Columns of different lengths.
        del fields[part][column][-1:]
    if data.draw(st.booleans()):
        # A histogram without one of its buckets.
        del next(filter(None, fields[1][1]))[1][-1:]
    raw = bytearray(msgspec.msgpack.encode(fields))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    whole = encoded(lambda: decode_record(bytes(raw)))
    before, records.PART_BYTES = records.PART_BYTES, 64
    try:
        found = encoded(lambda: decode_record(bytes(raw)))
    finally:
        records.PART_BYTES = before

    assert found == whole


def test_record_over_the_size_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender rejects it."""
    monkeypatch.setattr(messages, "MAX_RECORD_BYTES", 20_000)
    node = large(8)
    (due,) = node.due()
    with pytest.raises(WireError, match="too_big"):
        frames_of(due)
