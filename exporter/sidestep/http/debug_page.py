"""The exporter's own state as text: version, settings, tasks, threads and last log lines."""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import platform
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator

from sidestep import __version__
from sidestep.protocol.limits import escape
from sidestep.telemetry.logs import recent

PATH = "/-/debug"
"""Its path. The guard admits only clients with a login, and those on this machine."""
PACKAGES = ("aiohttp", "msgspec", "prometheus_client", "pyzmq")


def debug_page(settings: Iterable[str]) -> str:
    """Return the page; ``settings`` are lines on settings that do not have their default, without secrets.

    Call it in the event loop: the first thread is the one that renders the page.
    """
    packages = (f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    parts = {
        f"sidestep {__version__}": (
            f"Python {platform.python_version()}, {platform.platform()}",
            ", ".join(packages),
        ),
        "settings": settings,
        "tasks": _tasks(),
        "threads": _threads(),
        "log": tuple(recent.lines),
    }
    return "\n".join(f"== {title}\n{_indented(lines)}" for title, lines in parts.items())


def _tasks() -> Iterator[str]:
    for task in sorted(asyncio.all_tasks(), key=lambda task: task.get_name()):
        text = io.StringIO()
        task.print_stack(file=text)
        yield text.getvalue()


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"


def _indented(lines: Iterable[str]) -> str:
    # A setting can have bytes that are no UTF-8.
    return "".join(f"  {escape(line)}\n" for text in lines for line in text.splitlines())
