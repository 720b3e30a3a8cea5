"""Texts that are kept in blocks: of a block only what has changed is written again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class Block(NamedTuple):
    """The text of some entries, one after the other.

    Attributes:
        marks: What was told apart by: an entry is as it was while its mark is the same object.
        sizes: Of each entry's text, in bytes.
    """

    versions: Sequence[object]
    sizes: Sequence[int]
    text: bytes


def changed_entries(block: Block | None, versions: Sequence[object]) -> Sequence[int]:
    """The places of ``marks`` whose text ``block`` does not have."""
    if block is None:
        return range(len(versions))
    # Marks are equal only where they are the same, and lists are compared at once.
    if block.versions == versions:
        return ()
    pairs = zip(versions, block.versions, strict=True)
    return [place for place, (version, before) in enumerate(pairs) if version is not before]


def updated(block: Block | None, versions: Sequence[object], texts: Mapping[int, bytes]) -> Block:
    """``block`` with other ``texts`` at some places, in their order; of no block, at all places."""
    if block is None or len(texts) == len(versions):
        found = list(texts.values())
        return Block(versions, list(map(len, found)), b"".join(found))
    starts = [0, *accumulate(block.sizes)]
    sizes = list(block.sizes)
    before = memoryview(block.text)
    pieces: list[bytes | memoryview] = []
    done = 0
    for place, text in texts.items():
        pieces += (before[starts[done] : starts[place]], text)
        sizes[place] = len(text)
        done = place + 1
    pieces.append(before[starts[done] :])
    return Block(versions, sizes, b"".join(pieces))
