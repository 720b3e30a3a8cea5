"""Cache of text in blocks: only changed entries of a block are written again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple


class Block(NamedTuple):
    """Text of some entries, one after the other.

    Attributes:
        versions: An entry is unchanged while its version is the same object.
        sizes: Bytes of each entry's text.
    """

    versions: Sequence[object]
    sizes: Sequence[int]
    text: bytes


def changed_entries(block: Block | None, versions: Sequence[object]) -> Sequence[int]:
    """Return the indexes of ``versions`` whose text ``block`` does not have."""
    if block is None:
        return range(len(versions))
    # Versions are equal only if they are identical, and comparing lists is fast.
    if block.versions == versions:
        return ()
    pairs = zip(versions, block.versions, strict=True)
    return [place for place, (version, before) in enumerate(pairs) if version is not before]


def updated(block: Block | None, versions: Sequence[object], texts: Mapping[int, bytes]) -> Block:
    """Return ``block`` with new ``texts`` by index, in order; None needs a text for every index."""
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
