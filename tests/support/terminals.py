"""A real terminal: tmux, whose screen a test reads and whose keys it presses."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from exporters import until

TMUX = shutil.which("tmux")
PROMPT = "ready>"
ENVIRON = {key: os.environ[key] for key in os.environ if key not in {"COLUMNS", "LINES", "TMUX"}}
"""Without the size of another terminal, which programs would take for their own."""


class Terminal:
    """A terminal that runs a shell.

    Args:
        name: Of tmux' server, which the terminal has for itself.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def tmux(self, *arguments: str) -> str:
        """Run a command of tmux and return its output."""
        done = subprocess.run(
            [TMUX or "tmux", "-u", "-L", self.name, "-f", "/dev/null", *arguments],
            capture_output=True, text=True, timeout=30, check=True, env=ENVIRON,
        )  # fmt: skip
        return done.stdout

    @property
    def screen(self) -> str:
        """The text on the screen."""
        return self.tmux("capture-pane", "-p")

    def state(self, *names: str) -> list[str]:
        """Return variables of tmux about the terminal, such as ``cursor_flag``."""
        return self.tmux(
            "display-message", "-p", " ".join(f"#{{{name}}}" for name in names)
        ).split()

    def press(self, *keys: str) -> None:
        """Press keys, by tmux' names."""
        self.tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        """Change the size of the terminal."""
        self.tmux("resize-window", "-x", str(width), "-y", str(height))

    async def run(self, command: str) -> None:
        """Type a command and Enter, on a cleared screen."""
        self.tmux("send-keys", "-l", f"clear; {command}")
        self.press("Enter")

    async def shows(self, text: str, timeout: float = 10.0) -> None:
        """Wait until the text is on the screen."""

        async def there() -> bool:
            return text in self.screen

        try:
            await until(there, timeout)
        except AssertionError:
            raise AssertionError(f"{text!r} is not in\n{self.screen}") from None


@contextlib.contextmanager
def terminal(width: int = 100, height: int = 30) -> Iterator[Terminal]:
    """Run a shell in a terminal of that size; ``python`` is this one, and imports what tests do."""
    made = Terminal(f"sidestep-{uuid.uuid4().hex[:12]}")
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environ = {
        "PYTHONPATH": path,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "LC_ALL": "C.UTF-8",
        "PS1": f"{PROMPT} ",
    }
    assignments = [part for key, value in environ.items() for part in ("-e", f"{key}={value}")]
    made.tmux(
        "new-session", "-d", "-x", str(width), "-y", str(height), *assignments, "/bin/sh"
    )  # fmt: skip
    try:
        yield made
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # a test may have ended it
            made.tmux("kill-server")
