"""The other screens of the terminal view: the details of an engine, and the help."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.events import Key, Resize
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from sidestep.exposition.live.answers import EngineRow
from sidestep.protocol.limits import escape
from sidestep.tracking.health.states import Level
from sidestep_tools.formatting import UNKNOWN, age, count, duration, rate, share
from sidestep_tools.top.columns import (
    ATTENTION_SIGN,
    BY_KEY,
    COLUMNS,
    Entry,
    bar,
    level,
    limit,
    state,
)
from sidestep_tools.top.columns import SIGNS as STATE_SIGNS
from sidestep_tools.top.history import TRENDS, EngineSample, sparkline

Part = str | tuple[str, str]
"""Text, or text and its style."""
COLOURS: dict[Level | None, str] = {
    "critical": "bold $text-error",
    "warning": "bold $text-warning",
    "ok": "$text-success",
    None: "",
}
MUTED = "dim"
CURVE = "$text-primary"
NAME = "$text-accent"


LABEL = 18
NUMBER = 9
BAR = 25
TALL = 34
"""Lines of the screen from which on its sparklines have two."""


def describe(
    entry: Entry, history: Sequence[EngineSample], width: int, height: int = 1
) -> list[Part]:
    """Return the details of an entry, with sparklines of ``height`` lines."""
    row = entry.row
    title = escape(entry.url if row is None else row.engine)
    parts: list[Part] = [(f"{title}\n", "bold")]
    if row is not None:
        parts.append(
            f"{escape(row.model) or 'no model'}, {escape(row.dialect)}, {escape(entry.url)}\n"
        )
    if entry.error is not None:
        since = "" if entry.age is None else f"; its last answer is {age(entry.age)} old"
        parts.append((f"✗ {escape(entry.error)}{since}\n", COLOURS["critical"]))
    if row is not None:
        why = f" ({escape(row.reason)})" if row.reason else ""
        parts += _field("state", f"{state(row, width)}{why}", row.level)
        parts += _stack(row)
        parts += ["\n", *_numbers(row), "\n", *_percentiles(row), "\n", *_time(row)]
        parts += _trends(history, width, height)
    return parts


def _field(name: str, value: str, alarm: Level | None = None) -> list[Part]:
    return [(f"{name:<{LABEL}}", MUTED), (f"{value}\n", COLOURS[alarm])]


def _numbers(row: EngineRow) -> list[Part]:
    tokens_in, tokens_out = row.prompt_tokens_per_second, row.generation_tokens_per_second
    ended = f"{count(row.finished)} ended, {count(row.aborted)} of them aborted"
    seen = UNKNOWN if row.last_seen is None else f"{age(row.last_seen)} ago"
    return [
        *_field("requests", f"{count(row.running)} running, {count(row.waiting)} waiting"),
        *_field("tokens/s", f"{rate(tokens_in)} in, {rate(tokens_out)} out"),
        *_field("KV cache", bar(row.kv_cache_usage, BAR), level(BY_KEY["kv"], row)),
        *_field("prefix cache", f"{share(row.prefix_hit_rate)} of the looked-up tokens"),
        *_field("last 60 s", f"{ended}; {count(row.preemptions)} preemptions"),
        *_field("load", f"{share(row.saturation)} of its capacity", level(BY_KEY["load"], row)),
        *_field("open step", f"{age(row.step_age)}; last message {seen}"),
    ]


def _percentiles(row: EngineRow) -> list[Part]:
    heads = "".join(f"{head:>{NUMBER}}" for head in ("p50", "p95", "p99", "count"))
    parts: list[Part] = [(f"{'last 60 s':<{LABEL}}{heads}\n", MUTED)]
    for name, found in (("TTFT", row.ttft), ("ITL", row.inter_token), ("e2e", row.e2e)):
        cells = [UNKNOWN] * 4
        if found is not None:
            cells = [*map(duration, (found.p50, found.p95, found.p99)), count(found.count)]
        parts += _field(name, "".join(f"{cell:>{NUMBER}}" for cell in cells))
    return parts


def _stack(row: EngineRow) -> list[Part]:
    """Return the stack of the thread that makes no progress, the innermost frame first."""
    frames = [escape(frame) for frame in reversed(row.stack or ())]
    return [
        (f"{'stack':<{LABEL}}" if not index else " " * LABEL) + f"{frame}\n"
        for index, frame in enumerate(frames)
    ]


def _time(row: EngineRow) -> list[Part]:
    """Return where the time of the requests went that ended in the last minute, and the limit."""
    if not row.parts and row.limit is None:
        return []
    parts = _field("limit", limit(row, BAR))
    total = sum((row.parts or {}).values())
    for name, seconds in sorted((row.parts or {}).items(), key=lambda each: -each[1]):
        parts += _field(name, bar(seconds / total, BAR))
    return [*parts, "\n"]


def _trends(history: Sequence[EngineSample], width: int, height: int) -> list[Part]:
    parts: list[Part] = []
    for index, trend in enumerate(TRENDS):
        values = [sample[index] for sample in history]
        newest = trend.text(values[-1] if values else None)
        label = f"{trend.title:<{LABEL}}{newest:>{NUMBER}} "
        parts += labelled(label, sparkline(values, width - len(label), height))
    return parts


def labelled(label: str, lines: Sequence[str]) -> list[Part]:
    """Return the lines of a sparkline, with a label before the last."""
    parts: list[Part] = []
    for number, line in enumerate(lines, 1):
        text = label if number == len(lines) else " " * len(label)
        parts += [(text, MUTED), (f"{line}\n", CURVE)]
    return parts


class DetailsScreen(Screen[None]):
    """Screen with the details of one entry, updated with each report."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,backspace", "app.pop_screen", show=False),
        Binding("j", "scroll(1)", show=False),
        Binding("k", "scroll(-1)", show=False),
    ]
    DEFAULT_CSS = """
    DetailsScreen VerticalScroll { scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    DetailsScreen #details { text-wrap: nowrap; text-overflow: ellipsis; }
    DetailsScreen #keys { dock: bottom; height: 1; color: $text-muted; }
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key
        self._shown: tuple[Entry | None, Sequence[EngineSample]] = (None, ())

    def compose(self) -> ComposeResult:
        """Lay out the text and the keys."""
        with VerticalScroll():
            yield Static(id="details", markup=False)
        yield Static(
            "Esc back  ↑↓ scroll  p pause  r ask now  ? help  q quit", id="keys", markup=False
        )

    def on_mount(self) -> None:
        """Take the keys that scroll."""
        self.query_one(VerticalScroll).focus()

    def on_resize(self, _: Resize) -> None:
        """Draw for the new width."""
        self._draw()

    def show(self, entry: Entry | None, history: Sequence[EngineSample]) -> None:
        """Show the entry of the latest report; None: the report does not have it any more."""
        self._shown = (entry, history)
        if self.is_mounted:
            self._draw()

    def action_scroll(self, lines: int) -> None:
        """Scroll by so many lines."""
        self.query_one(VerticalScroll).scroll_relative(y=lines, animate=False)

    def _draw(self) -> None:
        entry, history = self._shown
        body = self.query_one("#details", Static)
        if entry is None:
            body.update("The engine is not in the last answer; Escape leads back.")
        else:
            width = self.query_one(VerticalScroll).scrollable_content_region.width
            height = 2 if self.size.height >= TALL else 1
            body.update(Content.assemble(*describe(entry, history, width, height)))


KEYS = (
    ("↑ ↓ j k", "move; PageUp PageDown, Home End, g G"),
    ("Enter", "details of the engine, also by a click; Escape leaves them"),
    ("s", "sort by the next column; also ← →, or a click on a heading"),
    ("S", "reverse the order"),
    ("/", "filter by engine, model, state or target, or attention; Escape removes it"),
    ("p", "pause: targets are not asked, and the screen stays"),
    ("+ -", "ask more often, less often"),
    ("r Space", "ask now, also while paused"),
    ("?", "this help"),
    ("q Ctrl+C", "quit"),
)
"""Keys and what they do."""
SIGNS = (
    ("--", "not known; 0 is a measured zero"),
    ("✗ !", "a target that failed; its engines, whose numbers are old"),
    *((sign, state) for state, sign in STATE_SIGNS.items()),
    (ATTENTION_SIGN, "slow, full, saturated, an outlier, or contested"),
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
    """Screen with the help; any key that does not scroll closes it."""

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
