"""The hit-ratio curve of the lookups in a recording of ``sidestep record``, sent by taps."""

from __future__ import annotations

import gzip
import math
import os
from collections.abc import Sequence
from pathlib import Path

from sidestep.engines.dialects import DIALECTS
from sidestep.errors import ConfigError, WireError
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.limits import printable
from sidestep.tracking.kv_blocks.hit_ratio_curve import Point
from sidestep.tracking.kv_blocks.lookups import HORIZON, LookupSettings, LookupTracker
from sidestep_adapters.recording.format import MAGIC, Items, read


def is_recording(path: Path) -> bool:
    """Return whether a file is a recording of ``sidestep record``; False if it is no regular file."""
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises where a directory cannot be read
        return False
    for opener in (gzip.open, open):
        try:
            with opener(path, "rb") as file:
                return bool(file.read(len(MAGIC)) == MAGIC)
        except (OSError, EOFError):
            continue
    return False


class RecordedCurve:
    """Reuse distances of all engines of a recording, each of which has a cache of its own.

    Raises:
        ConfigError: The recording is damaged, or has no lookups.

    Attributes:
        sizes: Sizes that fit the present cache, in blocks; empty where that is unknown.
    """

    def __init__(self, path: Path) -> None:
        trackers: dict[tuple[str, int], LookupTracker] = {}
        for record in read(path):
            if not isinstance(record, Items):
                continue
            for raw in record.items:
                try:
                    item = DIALECTS.decode(raw)
                    if isinstance(item, CacheLookups):
                        engine = record.stream, item.engine
                        if engine not in trackers:
                            trackers[engine] = LookupTracker(LookupSettings(math.inf))
                        trackers[engine].apply(item)
                except WireError as error:
                    raise ConfigError(f"{path}: damaged: {printable(error)}") from None
        if not trackers:
            raise ConfigError(
                f"{path}: the recording has no lookups of blocks: engines with the tap send them if"
                " sidestep record has an exporter to --connect to"
            )
        self._reuses = [tracker.reuse for tracker in trackers.values()]
        self.block_size = max(tracker.block_size for tracker in trackers.values())
        capacity = max(tracker.capacity for tracker in trackers.values())
        largest = HORIZON * capacity
        self.sizes = [largest >> shift for shift in range(7, -1, -1) if largest >> shift]

    @property
    def accesses(self) -> int:
        """Number of lookups."""
        return round(sum(reuse.curve.lookups for reuse in self._reuses))

    @property
    def distinct(self) -> int:
        """Estimated number of distinct blocks within eight sizes of the cache."""
        return round(sum(reuse.tracked / reuse.rate for reuse in self._reuses))

    def points(self, capacities: Sequence[int]) -> list[Point]:
        """Return the mean of the engines' curves, weighted by lookups."""
        curves = [(reuse.curve.lookups, reuse.points(capacities)) for reuse in self._reuses]
        known = [(lookups, points) for lookups, points in curves if points]
        total = sum(lookups for lookups, _ in known)
        return [
            Point(
                capacity,
                *(
                    sum(lookups * points[index][field] for lookups, points in known) / total
                    for field in (1, 2, 3)
                ),
            )
            for index, capacity in enumerate(capacities)
        ]
