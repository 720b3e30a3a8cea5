"""A middleware of vLLM's API servers that blocks the event loop of the one which receives a request."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

HEADER = "x-hold-loop"


async def hold_loop(request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """Block the loop for as long as the file that ``HEADER`` names is in the folder ``$WEDGES``."""
    if (name := request.headers.get(HEADER)) is not None:
        hold_while_set(Path(os.environ["WEDGES"]) / name)
    return await call_next(request)


def hold_while_set(wedge: Path) -> None:
    """Sleep until the test releases the wedge."""
    while wedge.exists():
        time.sleep(0.02)
