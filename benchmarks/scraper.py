"""A process that asks for a page at an interval, so that whoever feeds the exporter does not delay it.

``python -m benchmarks.scraper URL SECONDS`` goes on until its standard input ends, and then
prints how many seconds each page took, as JSON.
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
    """Have ``url`` asked for every ``interval`` seconds; 0 is never. The list is filled at the end."""
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
    """Ask until told to end."""
    url, interval = sys.argv[1], float(sys.argv[2])
    spent = []
    # As Prometheus does it: what a scrape takes does not delay the next one.
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
