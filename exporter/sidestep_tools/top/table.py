"""The widget that shows the engines: it draws only the lines on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from sidestep.protocol.limits import escape
from sidestep.tracking.health.states import Level
from sidestep_tools.top.columns import Column, Entry, Order, fit, level
from sidestep_tools.top.formatting import age

MARKS: dict[Level | None, str] = {"critical": "✗", "warning": "!", "ok": " ", None: " "}
MARGIN = 2
"""Cells of the cursor and the mark at the left."""
LEAST_ADDRESS = 16
"""Fewest cells of an address beside a long reason."""
TALL = 12
"""Fewest lines of a table whose headings have two lines."""


def shorten(text: str, width: int) -> str:
    """Return the text in exactly ``width`` cells, without its middle if it is longer.

    The end of a name tells replicas apart, and the beginning what they are.
    """
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    end = (width - 1) // 2
    tail = text[len(text) - end :] if end else ""
    while cell_len(tail) > end:
        tail = tail[1:]
    return set_cell_size(text, width - 1 - cell_len(tail)) + "…" + tail


class EngineTable(ScrollView, can_focus=True):
    """A line for each engine and for each target that failed, under fixed headings."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "table--head", "table--cursor", "table--dim", "table--ok", "table--warning",
        "table--critical",
    }  # fmt: skip
    DEFAULT_CSS = """
    EngineTable {
        height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 1; scrollbar-gutter: stable;
        .table--head { color: $text-muted; text-style: bold; }
        .table--cursor { background: $primary-muted; text-style: bold; }
        .table--dim { text-style: dim; }
        .table--ok { color: $text-success; }
        .table--warning { color: $text-warning; text-style: bold; }
        .table--critical { color: $text-error; text-style: bold; }
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "cursor(1)", show=False),
        Binding("up,k", "cursor(-1)", show=False),
        Binding("pagedown,ctrl+f", "page(1)", show=False),
        Binding("pageup,ctrl+b", "page(-1)", show=False),
        Binding("home,g", "edge(0)", show=False),
        Binding("end,G", "edge(-1)", show=False),
        Binding("enter", "open", show=False),
    ]

    class Opened(Message):
        """The user wants the details of an entry."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    class HeadClicked(Message):
        """The user clicked on the heading of a column."""

        def __init__(self, column: str) -> None:
            super().__init__()
            self.column = column

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.order = Order()
        self.cursor: str | None = None
        self._columns: list[tuple[Column, int]] = []
        self._head: list[Strip] = []
        self._arranged: Size | None = None
        self._drawn: dict[int, Strip] = {}
        self._styles: dict[tuple[bool, str], Style] = {}

    @property
    def columns(self) -> list[str]:
        """Keys of the columns on the screen."""
        return [column.key for column, _ in self._columns]

    def show(self, entries: Sequence[Entry], order: Order) -> None:
        """Show these entries in their order.

        The cursor stays on its entry, and follows it if it was on the screen; the scroll position
        stays. If its entry is gone, the cursor goes to the one that took its place.
        """
        position, followed = self.position, self._cursor_is_visible()
        self.entries, self.order = list(entries), order
        keys = [entry.key for entry in self.entries]
        if self.cursor not in keys:
            self.cursor = keys[min(position, len(keys) - 1)] if keys else None
        self._arrange()
        if followed:
            self._reveal()

    @property
    def position(self) -> int:
        """Index of the entry under the cursor; 0 without one."""
        keys = (index for index, entry in enumerate(self.entries) if entry.key == self.cursor)
        return next(keys, 0)

    @property
    def _width(self) -> int:
        """Cells beside the scroll bar."""
        return self.scrollable_content_region.width

    def on_resize(self, _: Resize) -> None:
        """Choose columns for the new width."""
        self._arrange()
        self._reveal()

    def _arrange(self) -> None:
        """Choose the columns for the present size and entries, and draw what is on the screen."""
        size = Size(self._width, len(self._titles()) + len(self.entries))
        if self.virtual_size != size:
            self.virtual_size = size
        self._choose_columns()
        self._redraw()

    def _choose_columns(self) -> None:
        self._arranged = self.scrollable_content_region.size
        self._columns = fit(self._width - MARGIN, self.entries) if self._width else []
        self._head = self._draw_head()
        self._styles = self._load_styles()

    def _redraw(self) -> None:
        """Refresh the lines that differ from what is on the screen."""
        before, self._drawn = self._drawn, {}
        for y in range(self.size.height):
            if self._line(y) != before.get(y):
                self.refresh_line(y + self.scroll_offset.y)

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Forget the lines drawn for another scroll position."""
        super().watch_scroll_y(old_value, new_value)
        self._drawn = {}

    def notify_style_update(self) -> None:
        """Draw everything again after a change of colours."""
        super().notify_style_update()
        if self._columns:
            self._head, self._drawn = self._draw_head(), {}
            self._styles = self._load_styles()

    def render_line(self, y: int) -> Strip:
        """Return the line ``y`` of the screen; the headings do not scroll."""
        if self._arranged != self.scrollable_content_region.size:
            # A screen that is below another one is drawn before it gets the event of its new size.
            self._choose_columns()
            self._drawn = {}
        return self._line(y)

    def _line(self, y: int) -> Strip:
        if y not in self._drawn:
            head = self._head
            index = y - len(head) + self.scroll_offset.y
            if y < len(head):
                strip = head[y]
            elif index < len(self.entries):
                strip = self._draw(self.entries[index])
            else:
                strip = Strip.blank(self._width, self._styles[False, ""])
            self._drawn[y] = strip
        return self._drawn[y]

    def _titles(self) -> list[str]:
        return ["group", "title"] if self.size.height >= TALL else ["title"]

    def _draw_head(self) -> list[Strip]:
        style = self.get_component_rich_style("table--head")
        lines = {"title": self._title_line(), "group": self._group_line()}
        return [
            Strip([Segment(set_cell_size(lines[name], self._width), style)])
            for name in self._titles()
        ]

    def _title_line(self) -> str:
        parts = []
        for column, width in self._columns:
            arrow = ""
            if column.key == self.order.key:
                arrow = "▼" if self.order.descending else "▲"
            title = f"{column.title}{arrow}" if column.named else f"{arrow}{column.title}"
            parts.append(title.ljust(width) if column.named else title.rjust(width))
        return " " * MARGIN + " ".join(parts)

    def _group_line(self) -> str:
        parts = []
        for group, columns in groupby(self._columns, key=lambda each: each[0].group):
            width = sum(width + 1 for _, width in columns) - 1
            if not group or len(group) > width:
                parts.append(" " * width)
            elif len(group) + 2 > width:
                parts.append(group.rjust(width))
            else:
                parts.append(f" {group} ".center(width, "─"))
        return " " * MARGIN + " ".join(parts)

    def _load_styles(self) -> dict[tuple[bool, str], Style]:
        """Return the styles of cells, by whether the cursor is on them, and by name."""
        base = self.rich_style
        cursor = base + self.get_component_rich_style("table--cursor", partial=True)
        styles = {(False, ""): base, (True, ""): cursor}
        for name in ("dim", "ok", "warning", "critical"):
            style = self.get_component_rich_style(f"table--{name}", partial=True)
            styles |= {(False, name): base + style, (True, name): cursor + style}
        return styles

    def _draw(self, entry: Entry) -> Strip:
        chosen = entry.key == self.cursor
        row, alarm = entry.row, self._alarm(entry)
        width = self._width - MARGIN
        parts: list[tuple[str, str]] = [(">" if chosen else " ", ""), (MARKS[alarm], alarm or "")]
        if row is None:
            parts.append((failure(entry, width), "critical"))
        else:
            old = "dim" if entry.error is not None else None
            for column, cells in self._columns:
                text = column.text(row, cells)
                text = shorten(text, cells) if column.named else text.rjust(cells)
                parts.append((f"{text} ", old or level(column, row) or ""))
        segments = [
            Segment("".join(text for text, _ in run), self._styles[chosen, name])
            for name, run in groupby(parts, key=itemgetter(1))
        ]
        return Strip(segments).adjust_cell_length(self._width, self._styles[chosen, ""])

    def _alarm(self, entry: Entry) -> Level | None:
        """Return the level that the mark beside an entry shows."""
        if entry.row is None:
            return "critical"
        return entry.row.level if entry.error is None else "warning"

    def action_cursor(self, step: int) -> None:
        """Move the cursor by so many entries."""
        self._move(self.position + step)

    def action_page(self, step: int) -> None:
        """Move the cursor by a screen."""
        self._move(self.position + step * max(1, self._visible_entries() - 1))

    def action_edge(self, index: int) -> None:
        """Move the cursor to the first or the last entry."""
        self._move(index % max(1, len(self.entries)))

    def action_open(self) -> None:
        """Ask for the details of the entry under the cursor."""
        if self.cursor is not None:
            self.post_message(self.Opened(self.cursor))

    def on_click(self, event: Click) -> None:
        """Move the cursor to an entry, open the one that it is on, or sort by a heading."""
        if event.y < len(self._head):
            left = MARGIN
            for column, width in self._columns:
                if left <= event.x <= left + width:
                    self.post_message(self.HeadClicked(column.key))
                    break
                left += width + 1
            return
        index = event.y - len(self._head) + self.scroll_offset.y
        if index >= len(self.entries):
            return
        if self.entries[index].key == self.cursor:
            self.action_open()
        else:
            self._move(index)

    def _move(self, index: int) -> None:
        if self.entries:
            self.cursor = self.entries[min(max(index, 0), len(self.entries) - 1)].key
            self._redraw()
            self._reveal()

    def _visible_entries(self) -> int:
        return max(1, self.size.height - len(self._head))

    def _cursor_is_visible(self) -> bool:
        return 0 <= self.position - self.scroll_offset.y < self._visible_entries()

    def _reveal(self) -> None:
        """Scroll as little as needed to show the cursor."""
        position, top = self.position, self.scroll_offset.y
        lowest = position - self._visible_entries() + 1
        if not lowest <= top <= position:
            self.scroll_to(y=position if top > position else lowest, animate=False, immediate=True)


def failure(entry: Entry, width: int) -> str:
    """Return the line of a target that failed; the reason matters more than the address."""
    since = "" if entry.age is None else f" (last answer {age(entry.age)} ago)"
    reason = escape(f"{entry.error}{since}")
    room = max(width - cell_len(reason) - len(": "), LEAST_ADDRESS)
    address = shorten(escape(entry.url), min(room, cell_len(escape(entry.url))))
    return set_cell_size(f"{address}: {reason}", width)
