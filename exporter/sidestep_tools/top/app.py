"""The terminal view of ``sidestep top``; the only part of sidestep that needs textual."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

from rich.cells import cell_len
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.events import Resize
from textual.widgets import Input, OptionList, Static

from sidestep.errors import SidestepError
from sidestep.protocol.limits import escape
from sidestep.tracking.health.states import Level
from sidestep_tools.formatting import age, count, duration, rate, share
from sidestep_tools.top.columns import Entry, Order, entries, matches, ordered
from sidestep_tools.top.history import EngineSample, History, sparkline
from sidestep_tools.top.report import Report
from sidestep_tools.top.screens import COLOURS, DetailsScreen, HelpScreen, Part, labelled
from sidestep_tools.top.table import EngineTable

INTERVALS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds between polls that keys choose from."""
SIGNS: dict[Level | None, str] = {"critical": "■", "warning": "▲", "ok": "●", None: "-"}
SLOW = 2.0
"""Seconds without an answer after which the title says so."""
LOW, HIGH = 16, 30
"""Lines of the screen below which it has no sparklines, and from which on they have two lines."""
KEYS = (
    "q quit", "? help", "Enter details", "/ filter", "s sort", "p pause", "+ - interval",
    "S reverse", "r ask now",
)  # fmt: skip
"""Keys in the last line, the most important first."""


class Source(Protocol):
    """Source of reports."""

    async def poll(self) -> Report:
        """Ask all targets once."""


class TopApp(App[None]):
    """The terminal view: a table of engines that follows the polls of a source."""

    TITLE = "sidestep top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", show=False),
        Binding("question_mark,h,f1", "help", show=False),
        Binding("s,right", "sort(1)", show=False),
        Binding("left", "sort(-1)", show=False),
        Binding("S", "reverse", show=False),
        Binding("slash", "filter", show=False),
        Binding("escape", "clear_filter", show=False),
        Binding("p", "pause", show=False),
        Binding("plus,equals_sign", "interval(-1)", show=False),
        Binding("minus", "interval(1)", show=False),
        Binding("r,space,f5", "poll", show=False),
    ]
    CSS = """
    Screen { layout: vertical; }
    #title, #totals, #keys { height: 1; }
    #title { text-style: bold; background: $panel; }
    #verdict { height: auto; max-height: 3; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #keys { color: $text-muted; }
    """

    def __init__(self, source: Source, interval: float = 1.0) -> None:
        super().__init__()
        self.source = source
        self.interval = interval
        self.order = Order()
        self.sought = ""
        self.paused = False
        self.report: Report | None = None
        self.history = History()
        self._entries: list[Entry] = []
        self._asked = False
        self._changed = asyncio.Event()
        self._poll_began: float | None = None
        self._texts: dict[str, tuple[Part, ...]] = {}

    def compose(self) -> ComposeResult:
        """Lay out the screen."""
        yield Static(id="title", markup=False)
        yield Static("  waiting for the first answer", id="verdict", markup=False)
        yield Static(id="totals", markup=False)
        yield Static(id="charts", markup=False)
        yield EngineTable()
        yield Input(placeholder="engine, model, state or target", id="filter", compact=True)
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        """Begin to poll, and restore the terminal when a signal ends the process.

        SIGHUP keeps its default, since textual can wait forever to restore a terminal that is gone.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError, RuntimeError):  # outside the main thread
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self.query_one(EngineTable).lines.focus()
        self.run_worker(self._poll(), name="poll")
        self.set_interval(1.0, self._show_title)

    def on_resize(self, event: Resize) -> None:
        """Choose what fits the new size."""
        charts = self.query_one("#charts", Static)
        charts.display = event.size.height >= LOW
        charts.styles.height = 4 if event.size.height >= HIGH else 2
        self._update("#keys", _joined(KEYS, "  ", event.size.width))
        self._show_all()

    async def _poll(self) -> None:
        """Ask the source again and again; keys are handled meanwhile."""
        while True:
            wanted, self._asked = self._asked, False
            self._poll_began = began = time.monotonic()
            report = await self.source.poll()
            self._poll_began = None
            if wanted or not self.paused:
                self._add(report)
            while not self._asked:
                left = None if self.paused else began + self.interval - time.monotonic()
                if left is not None and left <= 0:
                    break
                await self._wait(left)

    async def _wait(self, seconds: float | None) -> None:
        """Wait for some seconds, or until a key changes the time of the next poll."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):  # not yet the builtin in 3.10
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _add(self, report: Report) -> None:
        self.report = report
        self._entries = entries(report)
        self.history.add(self._entries)
        self._show_all()

    def _show_all(self) -> None:
        self._show_title()
        # When the user quits, the widgets are gone before the poll ends.
        if self.report is None or not self.query("#charts"):
            return
        verdict = self.report.verdict
        line = f"{SIGNS[verdict.level]} {escape(verdict.text)}"
        self._update("#verdict", (line, COLOURS[verdict.level]), layout=True)
        self._update("#totals", _totals_line(self.history.fleet[-1], self.size.width))
        self._show_charts()
        self._show_table()
        if isinstance(self.screen, DetailsScreen):
            self._show_details(self.screen)

    def _update(self, selector: str, *parts: Part, layout: bool = False) -> None:
        """Change a text if it differs from the one on the screen."""
        if self._texts.get(selector) != parts:
            self._texts[selector] = parts
            self.query_one(selector, Static).update(Content.assemble(*parts), layout=layout)

    def _show_title(self) -> None:
        if not self.is_running:
            return
        parts = ["sidestep top"]
        if self.paused:
            parts.append("PAUSED")
        slow = self._poll_began and time.monotonic() - self._poll_began
        if slow and slow > max(SLOW, self.interval):
            parts.append(f"no answer for {age(slow)}")
        if self.sought:
            shown = len(self.query_one(EngineTable).entries)
            parts.append(f"filter {self.sought!r}: {shown} of {len(self._entries)}")
        if self.report is not None:
            targets = self.report.targets
            if failed := sum(target.error is not None for target in targets):
                parts.append(f"{failed} of {_number(len(targets), 'target')} failed")
            parts.append(_number(sum(len(target.engines) for target in targets), "engine"))
        parts.append(f"every {self.interval:g} s")
        if self.report is not None:
            parts.append(time.strftime("%H:%M:%S", time.localtime(self.report.time)))
        self._update("#title", _joined(parts, " · ", self.size.width))

    def _show_charts(self) -> None:
        charts = self.query_one("#charts", Static)
        if not charts.display:
            return
        height = 2 if self.size.height >= HIGH else 1
        newest = self.history.fleet[-1]
        parts: list[Part] = []
        for title, name, value in (
            ("tokens/s out", "generation", rate(newest.generation)),
            ("waiting", "waiting", count(newest.waiting)),
        ):
            values = [getattr(sample, name) for sample in self.history.fleet]
            label = f"{title:<13}{value:>6} "
            parts += labelled(label, sparkline(values, self.size.width - len(label), height))
        self._update("#charts", *parts)

    def _show_table(self) -> None:
        shown = [entry for entry in self._entries if matches(entry, self.sought)]
        self.query_one(EngineTable).show(ordered(shown, self.order), self.order)

    def _show_details(self, screen: DetailsScreen) -> None:
        entry = next((each for each in self._entries if each.key == screen.key), None)
        screen.show(entry, self.history.engines.get(screen.key, ()))

    def action_help(self) -> None:
        """Explain keys, columns and signs."""
        self.push_screen(HelpScreen())

    def action_sort(self, step: int) -> None:
        """Sort by the next column on the screen, in the order that is usual for it."""
        keys = self.query_one(EngineTable).columns
        if not keys:
            return  # None fits.
        index = keys.index(self.order.key) + step if self.order.key in keys else 0
        self._sort(Order(keys[index % len(keys)]))

    def action_reverse(self) -> None:
        """Reverse the order."""
        self._sort(Order(self.order.key, not self.order.reverse))

    def _sort(self, order: Order) -> None:
        self.order = order
        self._show_table()

    def action_filter(self) -> None:
        """Ask for a text that entries have to contain."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_clear_filter(self) -> None:
        """Show all entries."""
        field = self.query_one("#filter", Input)
        field.value = ""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self.query_one(EngineTable).lines.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self.sought = event.value
        self._show_table()
        self._show_title()

    def on_input_submitted(self) -> None:
        """Keep the filter and return to the table."""
        self._close_filter()

    def action_pause(self) -> None:
        """Stop asking and keep what is on the screen, or go on."""
        self.paused = not self.paused
        self._changed.set()
        self._show_title()

    def action_interval(self, step: int) -> None:
        """Ask more often or less often."""
        if step < 0:
            faster = [each for each in INTERVALS if each < self.interval]
            self.interval = max(faster, default=self.interval)
        else:
            slower = [each for each in INTERVALS if each > self.interval]
            self.interval = min(slower, default=self.interval)
        self._changed.set()
        self._show_title()

    def action_poll(self) -> None:
        """Ask now."""
        self._asked = True
        self._changed.set()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Show the details of an entry."""
        screen = DetailsScreen(self.query_one(EngineTable).entries[event.option_index].key)
        self._show_details(screen)
        self.push_screen(screen)

    def on_engine_table_head_clicked(self, event: EngineTable.HeadClicked) -> None:
        """Sort by a column; a second click reverses."""
        same = event.column == self.order.key
        self._sort(Order(event.column, same and not self.order.reverse))


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _totals_line(total: EngineSample, width: int) -> str:
    parts = [
        f"running {count(total.running)}",
        f"waiting {count(total.waiting)}",
        f"tokens/s {rate(total.prompt)} in {rate(total.generation)} out",
        f"highest KV cache {share(total.kv_cache)}",
        f"highest TTFT p95 {duration(total.ttft)}",
    ]
    return _joined(parts, "  ", width)


def _joined(parts: Sequence[str], separator: str, width: int) -> str:
    """Return the parts, without those at the end that do not fit."""
    shown = list(parts)
    while len(shown) > 1 and cell_len(separator.join(shown)) > width:
        shown.pop()
    return separator.join(shown)


async def view(source: Source, interval: float = 1.0) -> None:
    """Run the terminal view until the user quits.

    Raises:
        SidestepError: Standard input, output or error is not a terminal; textual writes to the last.
    """
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise SidestepError("this is not a terminal; for scripts there are --once and --json")
    app = TopApp(source, interval)
    await app.run_async()
    if app.return_code:
        raise SystemExit(app.return_code)
