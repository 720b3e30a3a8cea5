"""The final scrape: the first that has the last counts of engines that have all ended."""

from __future__ import annotations

from collections.abc import Callable

from sidestep.ingest.intake import Intake


class FinalScrape:
    """Detects whether the last counts of all engines have been scraped.

    Once Prometheus has scraped the exporter, other clients' scrapes do not count: routers poll the
    page many times a second, and store nothing. ``clock`` is the monotonic clock of the intake.
    """

    def __init__(self, intake: Intake, clock: Callable[[], float]) -> None:
        self._intake = intake
        self._clock = clock
        self._scraped_at = 0.0
        self._by_prometheus = False

    def stamp(self) -> float:
        """Return the time, for a page that is rendered from now on; 0 while items wait to be applied."""
        return 0.0 if self._intake.busy else self._clock()

    def note(self, stamp: float, *, by_prometheus: bool) -> None:
        """Record the scrape of a page whose rendering began at ``stamp``."""
        if by_prometheus and not self._by_prometheus:
            self._by_prometheus, self._scraped_at = True, 0.0
        if by_prometheus or not self._by_prometheus:
            self._scraped_at = max(self._scraped_at, stamp)

    def done(self) -> bool:
        """Return whether nothing is left to scrape: all engines have ended, and a later page was scraped."""
        engines = self._intake.registry.engines.values()
        ended = not self._intake.busy and not any(engine.feeds.streams for engine in engines)
        return ended and all(engine.feeds.seen_at < self._scraped_at for engine in engines)
