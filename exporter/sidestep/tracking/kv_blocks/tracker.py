"""One engine's blocks of both kinds, and the room that they share."""

from __future__ import annotations

from sidestep.protocol.block_events import BlockEvents, CacheEvents
from sidestep.protocol.iteration_stats import KVCacheEvictionEvent
from sidestep.tracking.kv_blocks.cached import CachedBlocks
from sidestep.tracking.kv_blocks.capacity import Room
from sidestep.tracking.kv_blocks.observations import CachedLives, Lives, Observation
from sidestep.tracking.kv_blocks.physical import PhysicalBlocks
from sidestep.tracking.kv_blocks.sampling import ALL, Sample

__all__ = ["CachedLives", "Lives", "Observation", "Residency"]


class Residency:
    """Follows the blocks of one engine, within ``capacity``.

    A cached hash is followed through all its events, on all ranks, or not at all, and
    what is sampled at one rate is sampled at every higher one. The price: lives
    of one hash are in the sample together or not at all.

    Where one life more would not fit, the ratio of both kinds halves, until it does: lives
    outside are let go by hash, the others stand for twice as many. It stays so,
    since load that was too much once will be again, until ``rate`` is set anew, to whatever value.

    Args:
        rate: Share of cached hashes to follow, 0 to 1.
        scale: Whether an observation counts for all blocks that it stands for, or for one.
        capacity: Lives to hold at most, physical and cached.
    """

    def __init__(self, *, rate: float, scale: bool, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._block_sample, self._hash_sample = Sample(scale=scale), Sample(scale=scale)
        self._room = Room(capacity, self._block_sample, self._hash_sample)
        out = Lives()
        self._physical = PhysicalBlocks(self._block_sample, self._room, out)
        self._cached = CachedBlocks(self._hash_sample, self._room, out)
        self._told = 0, 0, 0
        self.rate = rate

    @property
    def rate(self) -> float:
        """Share of cached hashes that the operator wants; setting it ends thinning."""
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError("rate must be within 0 and 1")
        self._rate = rate
        self._block_sample.limit(ALL)
        if self._hash_sample.limit(int(rate * ALL)):
            self._room.sweep()

    @property
    def capacity(self) -> int:
        """Lives to hold at most; where it becomes less than is held, the next ones halve the ratio."""
        return self._room.wanted

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        self._room.resize(capacity)

    @property
    def ratio(self) -> float:
        """Share of cached hashes that are followed: the rate, halved as often as it took."""
        return self._hash_sample.bound / ALL

    @property
    def block_ratio(self) -> float | None:
        """Share of physical blocks that are followed: the sender's, thinned; None without one."""
        rate = self._physical.rate
        return None if rate is None else rate * (self._block_sample.bound / ALL)

    @property
    def cached_ratio(self) -> float | None:
        """``ratio``, where a cache is followed."""
        return self.ratio if self._cached.known else None

    @property
    def tracked(self) -> int:
        """Lives held now, also such as were let go or ended by a reset and wait for their turn."""
        return self._room.tracked

    @property
    def waiting(self) -> bool:
        """Whether ``tell`` has more to tell, without another event."""
        return self._room.waiting

    @property
    def halvings(self) -> int:
        """Times that the ratio was halved."""
        return self._room.halvings

    @property
    def unknown(self) -> int:
        """Events of blocks whose birth was not seen, and stamps before the block's last one.

        Where the sender samples the block and none were let go here, that is.
        """
        return self._physical.unknown + self._cached.unknown

    @property
    def abandoned(self) -> int:
        """Lives whose end was not seen: allocated again, or the sender restarted."""
        return self._physical.abandoned + self._cached.abandoned

    def blocks(self, item: BlockEvents) -> Lives:
        """Follow physical blocks.

        Raises:
            WireError: The item contradicts itself; nothing of it was applied.
        """
        self._physical.apply(item)
        return self.tell()

    def evictions(self, events: list[KVCacheEvictionEvent], rate: float) -> Lives:
        """Take over lives that the engine followed itself, at its own ``rate``."""
        self._physical.take(events, rate)
        return self.tell()

    def cache(self, item: CacheEvents) -> Lives:
        """Follow cached blocks.

        Raises:
            WireError: The item is not one of an engine; nothing of it was applied.
        """
        self._cached.apply(item)
        return self.tell()

    def tell(self) -> Lives:
        """What there is to tell: lives of earlier calls, of either kind, are a part of it."""
        self._room.advance()
        out = self._physical.out
        counts = self.halvings, self.abandoned, self.unknown
        out.halvings, out.abandoned, out.unknown = (
            now - then for now, then in zip(counts, self._told, strict=True)
        )
        self._told = counts
        self._physical.out = self._cached.out = Lives()
        return out
