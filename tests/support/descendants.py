"""What processes that descend from a main process by multiprocessing know of their server."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from sidestep_adapters.publisher.environment import namespace
from sidestep_adapters.publisher.server_identity import server_key

Known = tuple[str, str]


def known(method: str, depth: int) -> list[Known]:
    """Return namespace and key here, and in ``depth`` generations of processes."""
    found = [(namespace(), server_key())]
    if depth:
        with ProcessPoolExecutor(1, multiprocessing.get_context(method)) as pool:
            found += pool.submit(known, method, depth - 1).result()
    return found
