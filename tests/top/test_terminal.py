"""The terminal view in a real terminal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporters import until
from terminals import TMUX, Terminal, terminal

pytestmark = pytest.mark.skipif(
    TMUX is None and "CI" not in os.environ, reason="tmux is not installed (make tools)"
)
VIEW = "python -m top_reports"
MODES = ("alternate_on", "cursor_flag", "mouse_any_flag", "keypad_flag")
RESTORED = ["0", "1", "0", "0"]
"""No alternate screen, a cursor, no reports of the mouse."""


@pytest.fixture
def shell() -> Iterator[Terminal]:
    """Run a shell in a terminal."""
    with terminal() as made:
        yield made


async def modes(shell: Terminal) -> str:
    """Return the settings of the terminal, as ``stty`` prints them."""
    await shell.run("stty -a; echo settings end")
    await shell.shows("\nsettings end")
    return shell.screen


async def test_keys(shell: Terminal) -> None:
    """The table is there at once, keys change it, and quitting restores the terminal."""
    before = await modes(shell)
    await shell.run(f"{VIEW}; echo exit code $?")
    await shell.shows("STATE▲")
    await shell.shows("sidestep top · 2 engines")
    assert shell.state("alternate_on") == ["1"]
    shell.press("S")
    await shell.shows("STATE▼")
    shell.press("?")
    await shell.shows("sort by the next column")
    shell.press("Escape")
    await shell.shows("STATE▼")
    shell.press("Enter")
    await shell.shows("p50      p95      p99")
    shell.resize(40, 20)
    shell.press("Escape")
    await shell.shows("WAIT")
    assert "TTFT" not in shell.screen
    shell.press("p")
    await shell.shows("PAUSED")
    shell.resize(100, 30)
    shell.press("q")
    await shell.shows("exit code 0")
    assert "ENGINE" not in shell.screen
    assert shell.state(*MODES) == RESTORED
    assert await modes(shell) == before


@pytest.mark.parametrize("how", ["C-c", signal.SIGTERM])
async def test_ends(shell: Terminal, how: str | signal.Signals) -> None:
    """Ctrl-C and signals end it in order."""
    await shell.run(f"{VIEW}; echo exit code $?")
    await shell.shows("STATE▲")
    if isinstance(how, signal.Signals):
        os.kill(await child(shell), how)
    else:
        shell.press(how)
    await shell.shows("exit code 0")
    assert shell.state(*MODES) == RESTORED


async def test_closed_terminal(shell: Terminal) -> None:
    """A terminal that is closed ends it."""
    await shell.run(VIEW)
    await shell.shows("STATE▲")
    process = await child(shell)
    shell.tmux("kill-server")
    await until(lambda: not runs(process), 20)


async def child(shell: Terminal) -> int:
    """Return the process that the shell runs."""
    (parent,) = shell.state("pane_pid")
    children = Path(f"/proc/{parent}/task/{parent}/children")
    (found,) = (await asyncio.to_thread(children.read_text)).split()
    return int(found)


def runs(process: int) -> bool:
    """Return whether a process is there."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
