"""Observations of many items that wait for their histograms, each of which takes its own at once."""

from __future__ import annotations

from sidestep.metrics.engine import Engine


class ObservationBuffer:
    """Those of one engine.

    How many of them come together depends on when messages arrive. No sum may, not in
    its last digit: each is what it would be had every item been applied by itself.

    Attributes:
        columns: By slot of their histogram, in the order in which they came.
    """

    __slots__ = ("_engine", "columns")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.columns: list[list[float]] = [[] for _ in engine.histograms]

    def observe(self, slot: int) -> int:
        """Observe what waits for one histogram; how many were refused."""
        values, self.columns[slot] = self.columns[slot], []
        return self._engine.histogram(slot).observe_each(values)

    def settle(self) -> int:
        """Observe all that waits; how many were refused."""
        return sum(self.observe(slot) for slot, values in enumerate(self.columns) if values)
