"""A buffer for observations of many items, so that each histogram is updated once."""

from __future__ import annotations

from sidestep.metrics.engine import Engine


class ObservationBuffer:
    """Buffered observations of one engine.

    How many observations come together depends on when messages arrive. The sums do not, not even
    in their last digit: each equals the sum after applying every item by itself.

    Attributes:
        columns: Values by histogram slot, in the order in which they arrived.
    """

    __slots__ = ("_engine", "columns")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.columns: list[list[float]] = [[] for _ in engine.histograms]

    def observe(self, slot: int) -> int:
        """Observe the buffered values of one histogram; return how many were refused."""
        values, self.columns[slot] = self.columns[slot], []
        return self._engine.histogram(slot).observe_in_order(values)

    def flush(self) -> int:
        """Observe all buffered values; return how many were refused."""
        return sum(self.observe(slot) for slot, values in enumerate(self.columns) if values)
