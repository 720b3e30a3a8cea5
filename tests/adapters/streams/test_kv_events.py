"""KV events in every form that engines have used, and invalid ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.errors import WireError
from sidestep.protocol.block_events import CacheChange
from sidestep.protocol.limits import MAX_OBSERVATIONS
from sidestep_adapters.streams.kv_events import (
    MAX_EVENT_HASHES,
    MAX_EVENTS,
    Changes,
    decode,
    pieces,
)

MASK = (1 << 64) - 1
SHA = bytes(range(32))


def found(*events: Any) -> tuple[list[CacheChange], dict[str, int]]:
    """Return the changes in a message of ``events``."""
    batch = decode(msgspec.msgpack.encode([1.5, list(events), 3]))
    assert (batch.stamp, batch.rank) == (1.5, 3)
    changes = Changes(batch.events, batch.stamp)
    return changes.found, dict(changes.rejected)


def stored(*hashes: int, medium: str = "GPU") -> CacheChange:
    """Return a change that stored these hashes."""
    return CacheChange("stored", 1.5, list(hashes), medium)


EVENTS: list[Any] = [
    {"type": "BlockStored", "block_hashes": [7, 8], "parent_block_hash": 6, "token_ids": [1, 2]},
    {"type": "BlockStored", "block_hashes": [7, 8], "group_idx": 0, "session_id": "s", "new": {}},
    ["BlockStored", [7, 8], 6, [1, 2], 16, None],
    ["BlockStored", [7, 8], b"p", [1, 2], 16, 1, None, "lora", [None], 0, "full_attention", 9],
    {"type": "BlockStored", "block_hashes": ["0x7", "0008"]},
    {"type": "BlockStored", "block_hashes": [bytes(31) + b"\x07", b"\x08"]},
    ["BlockStored", ["7", 8], None],
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_has_many_forms(event: object) -> None:
    """An event is a map or an array, with more or fewer fields, and hashes of each kind."""
    assert found(event) == ([stored(7, 8)], {})


def test_other_kinds_of_event() -> None:
    """Removals and clears are read as maps and as arrays; a missing medium is empty."""
    removed = CacheChange("removed", 1.5, [7], "DISK")
    cleared = CacheChange("cleared", 1.5, [], "")

    assert found({"type": "BlockRemoved", "block_hashes": [7], "medium": "DISK"})[0] == [removed]
    assert found(["BlockRemoved", [7], "DISK"])[0] == [removed]
    assert found({"type": "AllBlocksCleared"})[0] == [cleared]
    assert found(["AllBlocksCleared"])[0] == [cleared]


def test_hashes_are_64_bits_without_sign() -> None:
    """A signed number keeps its bits; of bytes the last eight count."""
    last = int.from_bytes(SHA[-8:], "big")

    hashes = [-1, -(1 << 63), 1 << 63]
    assert found({"type": "BlockStored", "block_hashes": hashes})[0][0].hashes == [
        MASK, 1 << 63, 1 << 63,
    ]  # fmt: skip
    for one in (SHA, SHA.hex(), "0x" + SHA.hex()):
        assert found({"type": "BlockStored", "block_hashes": [one]})[0][0].hashes == [last]


def test_groups_have_hashes_of_their_own() -> None:
    """The first group has the hashes of an event without groups."""
    events = [
        {"type": kind, "block_hashes": [5], "group_idx": group}
        for kind in ("BlockStored", "BlockRemoved")
        for group in (None, 0, 1, 2)
    ]
    (first, *others), (_, *gone) = (
        [found(event)[0][0].hashes[0] for event in events[begin : begin + 4]] for begin in (0, 4)
    )

    assert first == 5
    assert others == gone
    assert others[0] == 5
    assert len({5, *others[1:]}) == 3


def test_events_of_one_kind_become_one_change() -> None:
    """A change has a maximum size; order is kept."""
    one = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    changes, _ = found(*[one] * 3, EVENTS[0], one, {**one, "medium": "CPU_PINNED"})

    assert [(change.kind, change.medium, len(change.hashes)) for change in changes] == [
        ("removed", "GPU", 3),
        ("stored", "GPU", 2),
        ("removed", "GPU", 1),
        ("removed", "CPU_PINNED", 1),
    ]
    long, _ = found({"type": "BlockStored", "block_hashes": list(range(MAX_OBSERVATIONS + 5))})
    assert [len(change.hashes) for change in long] == [MAX_OBSERVATIONS, 5]
    assert [each for change in long for each in change.hashes] == list(range(MAX_OBSERVATIONS + 5))


REFUSED = [
    ({"type": "BlockPinned", "block_hashes": [1]}, "unknown_event"),
    ({"type": "BlockStored"}, "bad_event"),
    ({"type": "BlockStored", "block_hashes": [1.5]}, "bad_event"),
    ({"type": "BlockStored", "block_hashes": ["1_0"]}, "bad_event"),
    ({"type": "BlockStored", "block_hashes": [b"x" * 65]}, "bad_event"),
    ({"type": "BlockStored", "block_hashes": [1], "medium": "G\nU"}, "bad_event"),
    ({"type": "BlockStored", "block_hashes": [1], "medium": "G" * 257}, "bad_event"),
    ({"type": "BlockStored", "block_hashes": [1], "group_idx": -1}, "bad_event"),
    ({"type": "BlockStored", "block_hashes": [*[0] * MAX_EVENT_HASHES, 999]}, "bad_event"),
    (["BlockStored", {}, None], "bad_event"),
    ([], "bad_event"),
    (None, "bad_event"),
]


@pytest.mark.parametrize(("event", "reason"), REFUSED)
def test_an_invalid_event_is_counted_and_left_out(event: object, reason: str) -> None:
    """The events beside it count, in either form."""
    assert found(EVENTS[0], event, EVENTS[3]) == ([stored(7, 8, 7, 8)], {reason: 1})


@pytest.mark.parametrize(
    "payload",
    [
        [1.0],
        [-1.0, []],
        [float("nan"), []],
        ["now", []],
        [1.0, [0] * (MAX_EVENTS + 1)],
        [1.0, [], -1],
        {"events": []},
        3,
    ],
)
def test_invalid_messages_are_rejected(payload: object) -> None:
    """A message has no time, or exceeds a limit."""
    with pytest.raises(WireError, match="bad_message"):
        decode(msgspec.msgpack.encode(payload))


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda end: b"\x93\x01\x91" + end))
def test_any_bytes_are_changes_or_rejected(payload: bytes) -> None:
    """No other exception is raised."""
    try:
        batch = decode(payload)
    except WireError:
        return
    for events in pieces(batch.events):
        for change in Changes(events, batch.stamp).found:
            assert all(0 <= value <= MASK for value in change.hashes)


OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), MASK) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=40) | st.sampled_from(["BlockStored", "BlockRemoved", "GPU"]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["type", "block_hashes", "medium", "group_idx"]) | st.text(max_size=3),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.lists(OBJECTS, max_size=6))
def test_any_events_are_changes_or_counted(events: list[object]) -> None:
    """Each event is one or the other."""
    changes, rejected = found(*events)

    assert len(changes) + sum(rejected.values()) <= len(events)
    for change in changes:
        assert all(0 <= value <= MASK for value in change.hashes)


LONG = 5000
KINDS_OF_HASHES: list[list[Any]] = [
    [(number << 40) - (1 << 62) for number in range(LONG)],
    [(number << 40) | 1 << 63 for number in range(LONG)],
    [number.to_bytes(32, "big") for number in range(LONG)],
    [f"{number:064x}" for number in range(LONG)],
    [7] * (4 * LONG),
    [number << 20 for number in range(3 * LONG)],
]


@pytest.mark.parametrize("hashes", KINDS_OF_HASHES, ids=range(len(KINDS_OF_HASHES)))
@pytest.mark.parametrize("is_map", [True, False])
def test_a_long_event_is_decoded_in_parts(hashes: list[Any], is_map: bool) -> None:
    """If its hashes have one length, the parts equal the whole."""
    made: Any = ["BlockRemoved", hashes, "DISK", 2]
    if is_map:
        made = {"type": made[0], "block_hashes": hashes, "medium": "DISK", "group_idx": 2}
    batch = decode(msgspec.msgpack.encode([1.5, [EVENTS[0], made, EVENTS[3]]]))
    parts = [list(part) for part in pieces(batch.events)]
    apart = [change for part in parts for change in Changes(part, 1.5).found]
    whole = Changes(batch.events, 1.5)

    def flat(changes: list[CacheChange]) -> list[tuple[str, str, int]]:
        return [(change.kind, change.medium, one) for change in changes for one in change.hashes]

    # Numbers of all sizes take as many bytes each by chance only.
    assert len(parts) > 4 or hashes is KINDS_OF_HASHES[-1]
    if len(hashes) <= MAX_EVENT_HASHES:
        assert flat(apart) == flat(whole.found)
    assert len(flat(apart)) == len(hashes) + 4
