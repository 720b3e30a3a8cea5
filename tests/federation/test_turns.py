"""How long records of other exporters hold the loop: counted in calls, as clocks differ."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from downstream import TOKENS, leaf, push, step, value
from sidestep.errors import WireError
from sidestep.metrics import record_codec as records
from sidestep.metrics.record_codec import decode_in_parts, decode_record
from sidestep.protocol.records import Record
from sidestep.protocol.self_described import Family, Sample, Samples
from trees import Node, frames_of, samples

MOST = 5000
"""Calls of one turn: 2 ms, about."""


def calls(work: Callable[[], object]) -> int:
    """How many calls ``work`` makes."""
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


def turns(root: Node, frame: bytes) -> list[int]:
    """Calls of each turn that ``frame`` takes."""
    found = [calls(lambda: root.intake.take(b"exporter", [frame], root.now))]
    while root.intake.busy:
        found.append(calls(root.intake.work))
    return found


def large(families: int, children: int = 64, boot: int = 1) -> Node:
    """A leaf whose engine has many self-described series."""
    node = leaf("large", boot, step(3))
    for number in range(families):
        family = Family(f"own_{number}_seconds", "histogram", ["k"], help="H", bounds=[0.5, 1.0])
        family.samples = [
            Sample([f"v{child}"], observations=[0.25, 0.75, 3.0]) for child in range(children)
        ]
        push(node, Samples(0, 1.0, [family]))
    return node


def test_a_large_record_takes_small_turns() -> None:
    """Each of which leaves the page as it was, until the last one."""
    node, root = large(28), Node("root")
    (first,) = node.frames()
    found = turns(root, first)
    push(node, step(4))
    (second,) = node.frames()
    pages = {value(root, TOKENS)}
    root.intake.take(b"exporter", [second], root.now)
    while root.intake.busy:
        found.append(calls(root.intake.work))
        pages.add(value(root, TOKENS))

    assert pages == {3, 7}
    assert samples(root.page) == samples(node.page)
    assert max(found) < MOST
    assert root.rejected == node.rejected == {}


@pytest.mark.parametrize("families", [0, 28])
def test_a_new_epoch_takes_small_turns(families: int) -> None:
    """However many ended before it: they are one sum already."""
    root = Node("root")
    found: list[int] = []
    for boot in range(1, 6):
        for frame in large(families, boot=boot).frames():
            found += turns(root, frame)

    assert value(root, TOKENS) == 5 * 3
    assert value(root, "own_0_seconds_count") == (5 * 3 * 64 if families else 0)
    assert max(found) < MOST
    assert root.rejected == {}


def test_an_engine_that_is_forgotten_between_two_turns_is_there_again_with_the_next_record() -> (
    None
):
    """Time passes between two turns of one record."""
    node, root = large(28), Node("root")
    node.tell(root)
    (engine,) = root.intake.registry.engines.values()
    push(node, step(4))
    (frame,) = node.frames()
    root.intake.take(b"exporter", [frame], root.now)
    root.intake.work()
    root.intake.registry.discard(engine)
    root.intake.federation.pass_time(root.now)
    while root.intake.busy:
        root.intake.work()
    push(node, step(5))
    node.tell(root)

    assert ("bug",) not in root.rejected
    assert samples(root.page) == samples(node.page)
    assert root.intake.federation.bytes == sum(each.size for each in root.intake.federation)


def either(make: Callable[[], Record]) -> bytes:
    """What ``make`` makes, as bytes; nothing, where that is refused."""
    try:
        return msgspec.msgpack.encode(make())
    except WireError:
        return b""


def in_parts(raw: bytes) -> Record:
    """The record in ``raw``, decoded in as many parts as there may be."""
    steps = decode_in_parts(raw)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Record = end.value
            return found


RECORD = large(3, 5).due()[0].message.data


@given(st.data())
def test_a_record_in_parts_is_the_same_record(data: st.DataObject) -> None:
    """Or refused as well, whatever was done to it."""
    fields = msgspec.msgpack.decode(RECORD)
    for part, column in data.draw(st.sets(st.sampled_from([(0, 4), (1, 0), (1, 1), (1, 2)]))):
        # Columns that differ in length.
        del fields[part][column][-1:]
    if data.draw(st.booleans()):
        # A histogram that lacks a bucket.
        del next(filter(None, fields[1][1]))[1][-1:]
    raw = bytearray(msgspec.msgpack.encode(fields))
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw))) :]
    whole = either(lambda: decode_record(bytes(raw)))
    before, records.PART_BYTES = records.PART_BYTES, 64
    try:
        found = either(lambda: in_parts(bytes(raw)))
    finally:
        records.PART_BYTES = before

    assert found == whole


def test_the_largest_record_is_told_in_frames_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is larger is refused by whoever would tell of it."""
    monkeypatch.setattr("sidestep.federation.messages.MAX_RECORD_BYTES", 20_000)
    node = large(8)
    (due,) = node.due()
    with pytest.raises(WireError, match="too_big"):
        frames_of(due)
