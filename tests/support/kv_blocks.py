"""Generated KV block events, and a naive model of what is observed of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from sidestep.protocol.block_events import (
    ALLOCATED,
    EVICTED,
    RESET,
    TOUCHED,
    BlockEvents,
    CacheChange,
    CacheEvents,
)
from sidestep.tracking.kv_blocks.tracker import BlockObservations, Observation

Event = tuple[int, int, float]
"""Kind, block, stamp."""
Change = tuple[str, list[int], str, float]
"""Kind, hashes, medium, stamp."""

PHYSICAL = ("lifetimes", "idles", "last_gaps", "gaps", "reuses", "reset_ages", "reset_idles")
CACHED = ("lifetimes", "idles", "gaps")


def block_item(events: list[Event], rate: float = 1.0, source: int = 1) -> BlockEvents:
    """Return one item of these block events."""
    kinds = bytes(kind for kind, _, _ in events)
    blocks = [block for _, block, _ in events]
    return BlockEvents(0, 0.0, source, rate, kinds, blocks, [stamp for _, _, stamp in events])


def cache_item(changes: list[Change], source: int = 1) -> CacheEvents:
    """Return one item of these cache changes."""
    structs = [
        CacheChange(kind, stamp, hashes, medium)  # type: ignore[arg-type] # a plain string
        for kind, hashes, medium, stamp in changes
    ]
    return CacheEvents(0, 0.0, source, structs)


def stored(hashes: list[int], stamp: float, medium: str = "GPU") -> CacheEvents:
    """Return an item with one change that stores hashes."""
    return cache_item([("stored", hashes, medium, stamp)])


def removed(hashes: list[int], stamp: float, medium: str = "GPU") -> CacheEvents:
    """Return an item with one change that removes hashes."""
    return cache_item([("removed", hashes, medium, stamp)])


def cleared(medium: str, stamp: float) -> CacheEvents:
    """Return an item with one change that clears a medium."""
    return cache_item([("cleared", [], medium, stamp)])


def values(observed: list[Observation]) -> list[float]:
    """Return the observed values in ascending order, without their weights."""
    return sorted(value for value, _ in observed)


def total(observed: list[Observation]) -> int:
    """Return how many blocks the observations stand for."""
    return sum(count for _, count in observed)


def physical(out: BlockObservations) -> dict[str, Any]:
    """Return the observations of physical blocks, without order."""
    return {"resets": out.resets} | {kind: values(getattr(out, kind)) for kind in PHYSICAL}


def cached(out: BlockObservations) -> dict[str, dict[str, list[float]]]:
    """Return the observations of each medium, without order."""
    return {
        name: {kind: values(getattr(observed, kind)) for kind in CACHED}
        for name, observed in out.cached.items()
    }


def gaps_of(hits: list[float]) -> list[float]:
    """Return the differences between neighbours."""
    return [later - earlier for earlier, later in pairwise(hits)]


def known_hits(birth: float, stamps: list[float]) -> list[float]:
    """Return the hits that are not earlier than the block's allocation or a former hit."""
    known: list[float] = []
    for stamp in stamps:
        if stamp >= max([birth, *known]):
            known.append(stamp)
    return known


class NaiveBlocks:
    """A model of physical blocks: each lifetime is a list of events, evaluated when it ends."""

    def __init__(self, events: list[Event]) -> None:
        self.out: dict[str, Any] = {"resets": 0} | {kind: [] for kind in PHYSICAL}
        self.unknown = self.abandoned = 0
        self.open: dict[int, list[float]] = {}
        for kind, block, stamp in events:
            if kind == RESET:
                for life in self.open.values():
                    self._end(life, stamp, "reset_ages", "reset_idles")
                self.open.clear()
                self.out["resets"] += 1
            elif kind == ALLOCATED:
                if block in self.open:
                    self.abandoned += 1
                    self._hits(self.open[block])
                self.open[block] = [stamp]
            elif block not in self.open:
                self.unknown += 1
            elif kind == TOUCHED:
                self.open[block].append(stamp)
            else:
                life = self.open.pop(block)
                hits = self._end(life, stamp, "lifetimes", "idles")
                self.out["last_gaps"] += gaps_of(hits[-4:])
                self.out["reuses"].append(len(life) - 1)
        for life in self.open.values():
            self._hits(life)
        self.out = {
            kind: sorted(seen) if isinstance(seen, list) else seen
            for kind, seen in self.out.items()
        }

    def _hits(self, life: list[float]) -> list[float]:
        birth, *stamps = life
        hits = known_hits(birth, stamps)
        self.unknown += len(stamps) - len(hits)
        self.out["gaps"] += gaps_of(hits)
        return hits

    def _end(self, life: list[float], stamp: float, age: str, idle: str) -> list[float]:
        hits = self._hits(life)
        last = max([life[0], *hits])
        if stamp < last:
            self.unknown += 1
        else:
            self.out[age].append(stamp - life[0])
            self.out[idle].append(stamp - last)
        return hits


class NaiveCache:
    """The same model for hashes in media."""

    def __init__(self, changes: list[Change]) -> None:
        self.unknown = self.unknown_removals = 0
        self.seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: {k: [] for k in CACHED})
        self.stores: list[float] = []
        self.absences: list[float] = []
        self.removed: list[tuple[int, float]] = []
        lives: dict[tuple[str, int], list[float]] = {}
        for kind, hashes, medium, stamp in changes:
            self._note(kind, hashes, medium, stamp, lives)
            if kind == "cleared":
                for key in [key for key in lives if medium in ("", key[0])]:
                    self._over(key[0], lives.pop(key), None)
            for key in [(medium, value) for value in hashes]:
                if kind == "stored":
                    lives.setdefault(key, []).append(stamp)
                elif kind == "removed" and key in lives:
                    self._over(medium, lives.pop(key), stamp)
                elif kind == "removed":
                    self.unknown_removals += 1
        self.tracked = len(lives)
        for (medium, _), life in lives.items():
            self._over(medium, life, None)
        self.out = {
            medium: {kind: sorted(of_kind) for kind, of_kind in kinds.items()}
            for medium, kinds in self.seen.items()
            if any(kinds.values())
        }

    def _note(
        self,
        kind: str,
        hashes: list[int],
        medium: str,
        stamp: float,
        resident: Iterable[tuple[str, int]],
    ) -> None:
        """Note what the GPU's cache stores again, before the change is made."""
        if kind == "cleared" and medium in {"", "GPU"}:
            self.removed = []
        elif medium == "GPU":
            ours = {value for name, value in resident if name == "GPU"}
            for value in dict.fromkeys(hashes):
                if kind == "stored" and value not in ours:
                    self._store(value, stamp)
                elif kind == "removed" and value in ours:
                    self.removed.append((value, stamp))

    def _store(self, value: int, stamp: float) -> None:
        hashes = [each for each, _ in self.removed]
        if value not in hashes:
            self.stores.append(math.inf)
            return
        later = hashes[hashes.index(value) + 1 :]
        _, since = self.removed.pop(-1 - len(later))
        self.stores.append(len(later))
        if stamp < since:
            self.unknown += 1
        else:
            self.absences.append(stamp - since)

    def _over(self, medium: str, life: list[float], stamp: float | None) -> None:
        birth, *stamps = life
        hits = known_hits(birth, stamps)
        last = max([birth, *hits])
        self.unknown += len(stamps) - len(hits)
        self.seen[medium]["gaps"] += gaps_of(hits)
        if stamp is None:
            return
        if stamp < last:
            self.unknown += 1
        else:
            self.seen[medium]["lifetimes"].append(stamp - birth)
            self.seen[medium]["idles"].append(stamp - last)


@st.composite
def legal_blocks(draw: st.DrawFn) -> list[Event]:
    """Generate events as an engine emits them: only free blocks are allocated, only used ones evicted."""
    resident: set[int] = set()
    events: list[Event] = []
    now = draw(st.floats(0, 1e6))
    for step in draw(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 99), st.booleans()))):
        advance, choice, again = step
        now += advance
        block = choice % 6
        if choice == 99:
            events.append((RESET, 0, now))
            resident.clear()
        elif block not in resident:
            events.append((ALLOCATED, block, now))
            resident.add(block)
        elif again or choice % 4:
            events.append((TOUCHED, block, now))
        else:
            events.append((EVICTED, block, now))
            resident.remove(block)
    return events


# Few stamps and blocks make rare sequences common.
stamps = st.one_of(st.integers(0, 12).map(float), st.floats(0, 1e15))
any_blocks = st.lists(st.tuples(st.integers(ALLOCATED, RESET), st.integers(0, 4), stamps))
kinds_of_change = st.sampled_from(["stored", "stored", "removed", "cleared"])
any_changes = st.lists(
    st.tuples(
        kinds_of_change,
        st.lists(st.integers(0, 5), max_size=5),
        st.sampled_from(["GPU", "CPU", ""]),
        stamps,
    )
)
chunks = st.lists(st.integers(0, 30))
