"""A process that scrapes a page at an interval, so that the sender in this process does not delay it.

``python -m benchmarks.scraper URL SECONDS`` scrapes until its standard input ends, and then
prints the seconds of each scrape as JSON.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator


@contextlib.contextmanager
def scraping(url: str, interval: float) -> Iterator[list[float]]:
    """Scrape ``url`` every ``interval`` seconds unless that is 0; the list is filled when the block ends."""
    spent: list[float] = []
    if not interval:
        yield spent
        return
    command = [sys.executable, "-m", "benchmarks.scraper", url, str(interval)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield spent
    finally:
        output, _ = process.communicate(timeout=60.0)
    spent += json.loads(output)


def main() -> None:
    """Scrape until standard input ends."""
    url, interval = sys.argv[1], float(sys.argv[2])
    spent = []
    # As in Prometheus, the duration of a scrape does not delay the next one.
    due = time.monotonic() + interval
    while not select.select([sys.stdin], [], [], max(due - time.monotonic(), 0.0))[0]:
        due += interval
        started = time.perf_counter()
        with urllib.request.urlopen(url, timeout=60.0) as response:
            response.read()
        spent.append(time.perf_counter() - started)
    print(json.dumps(spent))


if __name__ == "__main__":
    main()
