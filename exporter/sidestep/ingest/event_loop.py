"""The exporter's event loop: uvloop's where uvloop is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

try:
    import uvloop
except ImportError:
    NAME = "asyncio"
else:
    NAME = "uvloop"


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` until it ends."""
    if NAME == "uvloop":
        uvloop.run(main)
    else:
        asyncio.run(main)
