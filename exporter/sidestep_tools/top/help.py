"""The help: the meaning of keys, columns and signs."""

from __future__ import annotations

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Static

from sidestep_tools.top.columns import COLUMNS
from sidestep_tools.top.palette import NAME, Part

KEYS = (
    ("↑ ↓ j k", "move; PageUp PageDown, Home End, g G"),
    ("Enter", "details of the engine; Escape leaves them"),
    ("s", "sort by the next column; ← → likewise; a click on a heading"),
    ("S", "reverse the order"),
    ("/", "filter by engine, model, state or target, or attention; Escape removes it"),
    ("p", "pause; nothing is asked while paused"),
    ("+ -", "ask more often, less often"),
    ("r Space", "ask now, also while paused"),
    ("?", "this help"),
    ("q Ctrl+C", "quit"),
)
"""Keys and what they do."""
SIGNS = (
    ("--", "not known; 0 is a measured zero"),
    ("✗", "critical: stalled, unreachable, or a target that failed"),
    ("!", "slow, full, saturated, an outlier, or numbers that are old as the target failed"),
)
NOTE = """
Rates, percentiles and counts are of the last 60 s.
KV cache: yellow from 65 %, red from 85 %.
"""
SCROLLING = {"up", "down", "pageup", "pagedown", "home", "end"}
STEPS = {"j": 1, "k": -1}


def help_text() -> list[Part]:
    """Return the meaning of keys, columns and signs."""
    columns = [(column.title, column.meaning) for column in COLUMNS]
    parts: list[Part] = []
    for title, lines in (("Keys", KEYS), ("Columns", columns), ("Signs", SIGNS)):
        parts.append((f"{title}\n", "bold"))
        for name, meaning in lines:
            parts += [(f"  {name}{' ' * (11 - cell_len(name))}", NAME), f"{meaning}\n"]
    return [*parts, NOTE]


class HelpScreen(ModalScreen[None]):
    """The meaning of keys, columns and signs; any key that does not scroll closes the screen."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen VerticalScroll {
        width: 84; max-width: 100%; height: auto; max-height: 100%; border: round $primary;
        padding: 0 1; background: $surface; scrollbar-size-vertical: 1;
    }
    HelpScreen Static { height: auto; }
    """

    def compose(self) -> ComposeResult:
        """Lay out the text."""
        with VerticalScroll() as area:
            area.border_title = "sidestep top"
            area.border_subtitle = "any key closes"
            yield Static(Content.assemble(*help_text()))

    def on_mount(self) -> None:
        """Take the keys that scroll."""
        self.query_one(VerticalScroll).focus()

    def on_key(self, event: Key) -> None:
        """Close, unless the key scrolls."""
        if event.key in STEPS:
            self.query_one(VerticalScroll).scroll_relative(y=STEPS[event.key], animate=False)
        elif event.key not in SCROLLING:
            event.stop()
            event.prevent_default()
            self.dismiss()
