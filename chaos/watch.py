"""A scraper that scrapes many times a second and remembers every series.

Prometheus takes a value below the last one for a restart and counts it in full, so a
counter that decreases by one adds its whole value to a rate.
"""

from __future__ import annotations

import dataclasses
import http.client
import threading
import time
from collections.abc import Mapping

from sidestep.telemetry.rows import BY_NAME

Page = Mapping[str, float]
EXAMPLES = 5
RATE = 30.0
"""Scrapes a second."""


def parse(text: str, model: str) -> dict[str, float]:
    """Return counters and histograms of the engines of ``model``, by the text before their values.

    The exporter's own metrics may start again with it, and are left out.
    """
    mark = f'model_name="{model}"'
    found: dict[str, float] = {}
    wanted = False
    for line in text.splitlines():
        if line.startswith("#"):
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                wanted = kind in ("counter", "histogram") and name not in BY_NAME
        elif wanted and mark in line:
            key, _, value = line.rpartition(" ")
            found[key] = float(value)
    return found


def total(text: str, name: str) -> float:
    """Return the sum of the samples of ``name``; 0 if there are none."""
    lines = (line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Decrease:
    """A series that decreased."""

    at: float
    series: str
    before: float
    after: float


class Monotony:
    """Last value of every series, and the decreases.

    Attributes:
        decreases: Number of decreases of series.
        pages: Pages with a decrease.
        examples: The first few decreases.
    """

    def __init__(self) -> None:
        self.decreases = self.pages = 0
        self.examples: list[Decrease] = []
        self._last: dict[str, float] = {}

    def look(self, page: Page, at: float) -> int:
        """Compare ``page`` with the previous ones; return how many series decreased."""
        found = 0
        last = self._last
        for series, value in page.items():
            before = last.get(series)
            if before is not None and value < before:
                found += 1
                if len(self.examples) < EXAMPLES:
                    self.examples.append(Decrease(at, series, before, value))
        # One that is not on this page keeps its value: it may come back lower.
        last.update(page)
        self.decreases += found
        self.pages += found > 0
        return found


class Watch:
    """Scraper in a thread, until it is closed.

    Attributes:
        interval: Seconds between two scrapes; set it at any time.
        page: The last page, parsed; empty before the first.
        text: The text of the last page.
        at: Monotonic time of its answer.
        requested: Monotonic time of its request.
        scrapes: Number of pages read.
        errors: Number of scrapes that failed.
    """

    def __init__(self, port: int, model: str, rate: float = RATE, timeout: float = 1.0) -> None:
        self.monotony = Monotony()
        self.page: Page = {}
        self.text = ""
        self.at = self.requested = 0.0
        self.scrapes = self.errors = 0
        self._model = model
        self.interval = 1.0 / rate
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop scraping."""
        self._stop.set()
        self._thread.join()

    def look(self, page: Page) -> None:
        """Check a page; subclasses do."""

    def _run(self) -> None:
        looked = 0.0
        # Seldom scrapes are waited for in short steps: the interval may end at any time.
        while not self._stop.wait(min(self.interval, 1 / RATE)):
            if time.monotonic() - looked >= self.interval * 0.9:
                looked = time.monotonic()
                self._scrape()
        self._connection.close()

    def _scrape(self) -> None:
        requested = time.monotonic()
        try:
            self._connection.request("GET", "/metrics")
            response = self._connection.getresponse()
            text = response.read().decode()
            if response.status != http.HTTPStatus.OK:
                raise http.client.HTTPException(response.status)  # noqa: TRY301 - one place counts
        except (OSError, http.client.HTTPException):
            self._connection.close()
            self.errors += 1
            return
        page = parse(text, self._model)
        self.look(page)
        now = time.monotonic()
        self.monotony.look(page, now)
        self.text, self.page, self.at, self.requested = text, page, now, requested
        self.scrapes += 1
