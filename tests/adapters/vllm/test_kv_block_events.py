"""Sampled block events from vLLM's block pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sidestep.protocol.block_events import ALLOCATED, EVICTED, RESET, TOUCHED, BlockEvents
from sidestep.protocol.limits import MAX_OBSERVATIONS
from sidestep_adapters.vllm.kv_cache import BlockTap


def blocks(tap: BlockTap, *calls: tuple[str, int]) -> None:
    """Call the block pool's methods, given by the end of their names."""
    for name, number in calls:
        block = SimpleNamespace(block_id=number)
        getattr(tap, f"on_block_{name}")(block)


def test_block_events_come_in_order() -> None:
    """All events of a sampled block are sent, at the rate in force, once per flush."""
    pushed: list[BlockEvents] = []
    tap = BlockTap(pushed.append)
    tap.flush(1.0)
    blocks(tap, ("allocated", 4), ("accessed", 4), ("evicted", 4), ("allocated", 4))
    blocks(tap, ("accessed", 9), ("evicted", 9))
    tap.reset()
    blocks(tap, ("evicted", 4))
    tap.flush(0.5)
    tap.flush(0.5)

    (item,) = pushed
    assert bytes([ALLOCATED, TOUCHED, EVICTED, ALLOCATED, RESET]) == item.kinds
    assert [4, 4, 4, 4, 0] == item.blocks
    assert sorted(item.stamps) == item.stamps
    assert 1.0 == item.rate


def test_blocks_are_sampled_at_the_exporters_rate() -> None:
    """About that share of allocations is sampled, evenly over the blocks; none at 0."""
    pushed: list[BlockEvents] = []
    tap = BlockTap(pushed.append)
    shares = []
    for rate in (0.0, 0.01, 0.25):
        tap.flush(rate)
        pushed.clear()
        for birth in range(40_000):
            blocks(tap, ("evicted", birth % 500), ("allocated", birth % 500))
        tap.flush(rate)
        shares.append(sum(item.kinds.count(ALLOCATED) for item in pushed) / 40_000)
        assert {rate} >= {item.rate for item in pushed}
        assert all(len(item.kinds) <= MAX_OBSERVATIONS for item in pushed)

    assert shares[0] == 0.0
    assert shares[1:] == pytest.approx([0.01, 0.25], rel=0.15)


def test_after_a_drop_other_blocks_are_sampled() -> None:
    """The source changes with the next flush; earlier events have the old one."""
    pushed: list[BlockEvents] = []
    tap = BlockTap(pushed.append)
    tap.flush(1.0)
    blocks(tap, ("allocated", 4))
    tap.resample = True
    tap.flush(1.0)
    blocks(tap, ("accessed", 4), ("evicted", 4), ("allocated", 5))
    tap.flush(1.0)

    first, second = pushed
    assert [[4], [5]] == [first.blocks, second.blocks]
    assert first.source != second.source
