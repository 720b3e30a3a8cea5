"""An engine's process that connects to a hostile exporter: ``python -m fuzz.engine_under_attack ENDPOINT N``.

It runs N publishers, four at a time, each until its connection has ended.
It prints the most MiB by which the process grew, and the milliseconds of the longest push.
"""

from __future__ import annotations

import argparse
import resource
import time
from concurrent.futures import ThreadPoolExecutor

from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

PATIENCE = 2.0
"""Seconds for one connection to end; after that it is left."""
AT_ONCE = 4
"""Publishers that run at the same time, the most that an engine's process has."""
PACE = 0.001
ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})


def main() -> None:
    """Parse, connect, print."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.engine_under_attack", description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("connections", type=int)
    parser.add_argument("--idle", action="store_true", help="push nothing")
    options = parser.parse_args()
    before = peak_mib()
    longest = 0.0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for seconds in pool.map(
            lambda number: connect(options.endpoint, number, idle=options.idle),
            range(options.connections),
        ):
            longest = max(longest, seconds)
    print(f"{peak_mib() - before:.1f} {longest * 1e3:.1f}")


def connect(endpoint: str, number: int, *, idle: bool) -> float:
    """Publish until the connection has ended; return the seconds that the longest push took."""
    publisher = Publisher(endpoint, f"s{number}", [ENGINE], flush_interval=0.01)
    deadline = time.monotonic() + PATIENCE
    longest = 0.0
    while not publisher._link.problem and time.monotonic() < deadline:
        if not idle:
            item = VllmStep(0, time.monotonic(), time.time(), None, IterationStats(3))
            began = time.perf_counter()
            publisher.push(item)
            longest = max(longest, time.perf_counter() - began)
        time.sleep(PACE)
    publisher.close(0.0)
    return longest


def peak_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
