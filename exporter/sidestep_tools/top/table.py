"""The widget that shows the engines: headings, and a line for each engine and each failed target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Click, Resize
from textual.message import Message
from textual.strip import Strip
from textual.widgets import OptionList, Static

from sidestep.protocol.limits import escape
from sidestep_tools.formatting import age
from sidestep_tools.top.columns import Column, Entry, Order, fit, level, sign
from sidestep_tools.top.screens import COLOURS, MUTED, Part

FAILED, OLD = "✗ ", "! "
"""Marks of a target that failed, and of its engines, whose numbers are old."""
CURSOR, MARK = 1, 2
"""Cells of the cursor, and of the mark with a blank, at the left."""
LEAST_ADDRESS = 16
"""Cells that an address keeps beside a long reason."""
TALL = 12
"""Lines from which on the columns have headings of two lines."""


def shorten(text: str, width: int) -> str:
    """Return the text in exactly ``width`` cells, without its middle if it is longer.

    The end of a name distinguishes replicas, and its beginning says what they are.
    """
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    end = (width - 1) // 2
    tail = text[len(text) - end :] if end else ""
    while cell_len(tail) > end:
        tail = tail[1:]
    return set_cell_size(text, width - 1 - cell_len(tail)) + "…" + tail


class EngineList(OptionList):
    """Lines with a cursor, which a sign marks, since the terminal may have no colours."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("ctrl+f", "page_down", show=False),
        Binding("ctrl+b", "page_up", show=False),
        Binding("g", "first", show=False),
        Binding("G", "last", show=False),
    ]

    def render_line(self, y: int) -> Strip:
        """Return a line of the screen, with the sign of the cursor before it."""
        strip = super().render_line(y)
        sign = ">" if self.scroll_offset.y + y == self.highlighted else " "
        style = next(iter(strip)).style if strip.cell_length else None
        return Strip.join([Strip([Segment(sign, style)]), strip])

    def is_cursor_visible(self) -> bool:
        """Return whether the line under the cursor is on the screen."""
        return 0 <= (self.highlighted or 0) - self.scroll_offset.y < self.size.height


class EngineTable(Vertical):
    """The headings, and below them the lines."""

    DEFAULT_CSS = """
    EngineTable { height: 1fr; }
    EngineTable #head { height: auto; color: $text-muted; text-style: bold; text-wrap: nowrap; }
    EngineTable OptionList {
        height: 1fr; background: $background; text-wrap: nowrap;
        scrollbar-size-vertical: 1; scrollbar-gutter: stable;
    }
    EngineTable OptionList:focus { background-tint: $background 0%; }
    """

    class HeadClicked(Message):
        """The user clicked on the heading of a column."""

        def __init__(self, column: str) -> None:
            super().__init__()
            self.column = column

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.order = Order()
        self.lines = EngineList(compact=True, markup=False)
        self._head = Static(id="head", markup=False)
        self._columns: list[tuple[Column, int]] = []

    def compose(self) -> ComposeResult:
        """Lay out the headings and the lines."""
        yield self._head
        yield self.lines

    @property
    def columns(self) -> list[str]:
        """Keys of the columns on the screen."""
        return [column.key for column, _ in self._columns]

    def show(self, entries: Sequence[Entry], order: Order) -> None:
        """Show these entries in their order.

        The cursor stays on its entry, or at its position if the entry is gone. The scroll position stays,
        unless the cursor would leave the screen.
        """
        lines, before = self.lines, self.entries
        position, top = lines.highlighted or 0, lines.scroll_offset.y
        chosen = before[position].key if before else None
        was_visible = lines.is_cursor_visible()
        self.entries, self.order = list(entries), order
        self._fit()
        width = self._width - MARK
        lines.set_options([self._line(entry, width) for entry in self.entries])
        if not self.entries:
            return
        keys = [entry.key for entry in self.entries]
        position = keys.index(chosen) if chosen in keys else min(position, len(keys) - 1)
        # Without its watcher, which would scroll to the cursor.
        lines.set_reactive(OptionList.highlighted, position)
        lines.scroll_to(y=top, animate=False, force=True, immediate=True)
        if was_visible:
            lines.scroll_to_highlight()

    def on_resize(self, _: Resize) -> None:
        """Choose columns for the new size."""
        self.show(self.entries, self.order)

    def on_click(self, event: Click) -> None:
        """Ask for another order after a click on a heading."""
        place, left = event.get_content_offset(self._head), CURSOR + MARK
        if place is None:
            return
        for column, width in self._columns:
            if left <= place.x <= left + width:
                self.post_message(self.HeadClicked(column.key))
                break
            left += width + 1

    @property
    def _width(self) -> int:
        """Cells of a line beside the cursor and the scroll bar."""
        return self.lines.scrollable_content_region.width - CURSOR

    def _fit(self) -> None:
        """Choose columns for the present size and entries, and show their headings."""
        self._columns = fit(self._width - MARK, self.entries) if self._width > MARK else []
        lines = [self._groups()] if self.size.height >= TALL else []
        margin = " " * (CURSOR + MARK)
        self._head.update("\n".join(margin + " ".join(parts) for parts in (*lines, self._titles())))

    def _titles(self) -> Iterator[str]:
        for column, width in self._columns:
            arrow = ""
            if column.key == self.order.key:
                arrow = "▼" if self.order.descending else "▲"
            title = f"{column.title}{arrow}" if column.named else f"{arrow}{column.title}"
            yield title.ljust(width) if column.named else title.rjust(width)

    def _groups(self) -> Iterator[str]:
        for group, columns in groupby(self._columns, key=lambda each: each[0].group):
            width = sum(width + 1 for _, width in columns) - 1
            if not group or len(group) > width:
                yield " " * width
            elif len(group) + 2 > width:
                yield group.rjust(width)
            else:
                yield f" {group} ".center(width, "─")

    def _line(self, entry: Entry, width: int) -> Content:
        row = entry.row
        if row is None:
            critical = COLOURS["critical"]
            return Content.assemble((FAILED, critical), (failure(entry, width), critical))
        parts: list[Part] = []
        for column, cells in self._columns:
            text = column.text(row, cells)
            text = shorten(text, cells) if column.named else text.rjust(cells)
            style = COLOURS[level(column, row)] if entry.error is None else MUTED
            parts.append((f"{text} ", style))
        mark = (
            (f"{sign(row)} ", COLOURS[row.level])
            if entry.error is None
            else (OLD, COLOURS["warning"])
        )
        return Content.assemble(mark, *parts)


def failure(entry: Entry, width: int) -> str:
    """Return the line of a failed target; the reason matters more than the address."""
    since = "" if entry.age is None else f" (last answer {age(entry.age)} ago)"
    reason = escape(f"{entry.error}{since}")
    room = max(width - cell_len(reason) - len(": "), LEAST_ADDRESS)
    address = shorten(escape(entry.url), min(room, cell_len(escape(entry.url))))
    return set_cell_size(f"{address}: {reason}", width)
