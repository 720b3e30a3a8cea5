"""What is to be said to another exporter now: what is new, and all of it now and then.

No answer is needed: whatever is lost on the way is said again within ``REFRESH`` seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

REFRESH = 10.0


class Outgoing:
    """Knows what was said last, by whom it is about."""

    def __init__(self) -> None:
        self._said: dict[Hashable, tuple[Hashable, float]] = {}
        self._changed: dict[Hashable, float] = {}
        """Since when there is something new to say."""

    def due(self, key: Hashable, state: Hashable, now: float) -> bool:
        """Whether ``state`` of ``key`` is to be said."""
        said, at = self._said.get(key, (None, 0.0))
        if said is None or said != state:
            self._changed.setdefault(key, now)
            return True
        return now - at >= REFRESH

    def sent(self, key: Hashable, state: Hashable, now: float) -> None:
        """It was."""
        self._said[key] = state, now
        self._changed.pop(key, None)

    def renew(self) -> None:
        """Somebody else listens, who has heard nothing yet."""
        self._said.clear()

    def keep(self, keys: Collection[Hashable]) -> None:
        """Forget all that is about none of ``keys``."""
        for known in (self._said, self._changed):
            for key in known.keys() - set(keys):
                del known[key]

    def lag(self, now: float) -> float:
        """Seconds for which something new has not been said."""
        return now - min(self._changed.values(), default=now)
