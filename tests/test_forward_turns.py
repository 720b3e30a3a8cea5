"""How long the loop is held by what other exporters tell: by calls, as clocks differ."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.errors import WireError
from sidestep.federation import lives
from sidestep.federation.store import PATIENCE
from sidestep.metrics import record_codec as records
from sidestep.metrics.record_codec import decode_in_parts, decode_record
from sidestep.metrics.registry import GAUGES_EXPIRE_SECONDS
from sidestep.protocol.records import Record
from sidestep.protocol.self_described import Family, Sample, Samples
from test_forward import TOKENS, leaf, push, step, value
from trees import Node, frames_of, samples, wait

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


def crowd(count: int) -> tuple[Node, list[Node]]:
    """A root that takes all leaves' engines for one, and the leaves."""
    root = Node("root", merge=True)
    leaves = [leaf(f"leaf-{number}", 1, step(3)) for number in range(count)]
    for node in leaves:
        node.tell(root)
    wait(1.0, root)
    return root, leaves


def large(families: int, children: int = 64) -> Node:
    """A leaf whose engine has many series that describe themselves."""
    node = leaf("large", 1, step(3))
    for number in range(families):
        family = Family(f"own_{number}_seconds", "histogram", ["k"], help="H", bounds=[0.5, 1.0])
        family.samples = [
            Sample([f"v{child}"], observations=[0.25, 0.75, 3.0]) for child in range(children)
        ]
        push(node, Samples(0, 1.0, [family]))
    return node


def test_a_word_of_many_that_are_one_engine_takes_small_turns() -> None:
    """However many others there are; and all of them together cost what each of them does."""
    root, leaves = crowd(64)
    found: list[int] = []
    for node in leaves:
        push(node, step(2))
        for frame in node.frames():
            found += turns(root, frame)
    for _ in range(2):
        root.now += 1.0
        found.append(calls(lambda: root.intake.pass_time(root.now)))
        while root.intake.busy:
            found.append(calls(root.intake.work))

    assert value(root, TOKENS) == 64 * 5
    assert max(found) < MOST
    assert sum(found) < 64 * 2 * MOST


def test_a_word_of_few_that_are_one_engine_is_shown_at_once() -> None:
    """Nobody waits where it costs nothing."""
    root, leaves = crowd(4)
    for tokens, node in enumerate(leaves, 1):
        push(node, step(tokens))
        node.tell(root)

        assert value(root, TOKENS) == 4 * 3 + sum(range(tokens + 1))


def test_a_process_that_keeps_nothing_begins_anew_in_small_turns() -> None:
    """Though all lives before it are to be added up, and the oldest become one."""
    root = Node("root")
    boots = PATIENCE * lives.MAX_LIVES + 5
    found: list[int] = []
    for boot in range(1, boots + 1):
        wait(0.5, root)
        for frame in leaf("leaf", boot, step(3)).frames():
            found += turns(root, frame)

    assert len(root.intake.forwarded.lives) == PATIENCE * lives.MAX_LIVES + 1
    assert value(root, TOKENS) == 3 * boots
    assert max(found) < MOST

    for _ in range(int(GAUGES_EXPIRE_SECONDS)):
        root.now += 1.0
        root.intake.pass_time(root.now)
        while root.intake.busy:
            found.append(calls(root.intake.work))

    assert len(root.intake.forwarded.lives) == lives.MAX_LIVES + 1
    assert value(root, TOKENS) == 3 * boots
    assert max(found) < MOST


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


def test_what_did_not_change_of_a_large_record_is_not_made_anew() -> None:
    """Renderers keep its text."""
    node, root = large(8), Node("root")
    node.tell(root)
    (engine,) = root.intake.registry.engines.values()
    before = {name: dict(family.children) for name, family in engine.open_families.items()}
    push(node, step(4))
    node.tell(root)

    for name, family in engine.open_families.items():
        assert all(family.children[key] is child for key, child in before[name].items())


def test_an_engine_that_is_forgotten_meanwhile_is_there_again_with_the_next_word() -> None:
    """Time passes between two turns of one record."""
    node, root = large(28), Node("root")
    node.tell(root)
    (engine,) = root.intake.registry.engines.values()
    push(node, step(4))
    (frame,) = node.frames()
    root.intake.take(b"exporter", [frame], root.now)
    root.intake.work()
    root.intake.registry.discard(engine)
    root.intake.forwarded.pass_time(root.now)
    while root.intake.busy:
        root.intake.work()
    push(node, step(5))
    node.tell(root)

    assert ("bug",) not in root.rejected
    assert samples(root.page) == samples(node.page)


@pytest.mark.parametrize("merge", [False, True])
def test_going_on_with_a_snapshot_costs_a_word_what_it_holds(merge: bool) -> None:
    """Not all that stand before it, each time."""

    def cost(count: int) -> int:
        root = Node("root", merge=merge)
        root.intake.forwarded.lives.most = 100
        for boot in range(1, count + 1):
            name = f"leaf-{boot}" if merge else "leaf"
            leaf(name, boot, step(3)).tell(root)
        root.save()
        made = calls(lambda: Node("root", 2, merge=merge, disk=root.disk))
        again = Node("root", 2, merge=merge, disk=root.disk)
        assert value(again, TOKENS) == 3 * count
        return made

    few = cost(1)
    assert cost(41) - few < 1.5 * (cost(21) - few) * 2


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
