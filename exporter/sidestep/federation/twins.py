"""Two exporters under one name: each is heard for a while during which the other is as well.

Processes that follow each other are not: the last one's words may come late, or be said again by
an exporter on the way, but they tell of the time before.
"""

from __future__ import annotations

from collections.abc import Iterable

Process = tuple[int, int]
"""Life and run."""

OVERLAP = 30.0
"""Seconds: longer than it takes to replace one process by another that is started before it ends."""
MAX_PROCESSES = 4
"""Of one source, the latest heard."""
MAX_SOURCES = 4096


class Twins:
    """Knows when each process was heard, by the source that it says it is."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[Process, tuple[float, float]]] = {}

    def note(self, source: str, process: Process, heard: float) -> bool:
        """Take note that ``process`` counted at the moment ``heard``.

        Returns:
            Whether another one of that name has been heard beside it for too long.
        """
        known = self._heard.get(source)
        if known is None:
            if len(self._heard) >= MAX_SOURCES:
                return False
            known = self._heard[source] = {}
        first, last = known.get(process, (heard, heard))
        found = known[process] = min(first, heard), max(last, heard)
        if len(known) > MAX_PROCESSES:
            del known[min(known, key=lambda each: known[each][1])]
        others = [times for each, times in known.items() if each != process]
        return any(
            _overlap(found, times) > OVERLAP and heard - times[1] <= OVERLAP for times in others
        )

    def forget(self, before: float) -> None:
        """Forget what was not heard since the moment ``before``."""
        for source, known in list(self._heard.items()):
            for process in [each for each, (_, last) in known.items() if last < before]:
                del known[process]
            if not known:
                del self._heard[source]


def _overlap(*spans: Iterable[float]) -> float:
    firsts, lasts = zip(*spans, strict=True)
    return float(min(lasts) - max(firsts))
