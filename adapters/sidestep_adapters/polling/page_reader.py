"""Reader of an engine's own metrics page: the counters and gauges of a dialect's rows, with their totals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from sidestep.catalog.row import Row, Sampled
from sidestep.errors import PollError, WireError
from sidestep.exposition.passthrough import parser
from sidestep.protocol.limits import VALUE_LIMIT, printable
from sidestep.protocol.self_described import Family, Sample

SLICE_LINES = 50
"""Lines read in one turn of the event loop, in 1 ms or so."""
MAX_LINES = 8192
MAX_BYTES = 1 << 20

Key = tuple[str, ...]
"""Values of a row's own labels."""
Page = dict[str, dict[Key, float]]
"""Numbers by family and own labels."""


class PageReader:
    """Reads the pages of one server, whose dialect has ``rows``."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = {row.name: row for row in rows if isinstance(row.source, Sampled)}

    async def read(self, body: bytes) -> list[Family]:
        """Return the families of a page."""
        lines = body.split(b"\n")
        if len(lines) > MAX_LINES or len(body) > MAX_BYTES:
            raise PollError("bad_answer", f"more than {MAX_LINES} lines, or {MAX_BYTES >> 20} MiB")
        if lines.pop().strip():
            raise PollError("truncated", "the last line has no end")
        page: Page = {}
        samples = 0
        for number, line in enumerate(lines):
            if number % SLICE_LINES == SLICE_LINES - 1:
                await asyncio.sleep(0)
            samples += self._read_line(line, page)
        if not samples:
            raise PollError("bad_answer", f"none of its {len(lines)} lines is a sample")
        return [
            Family(
                name,
                self._rows[name].kind,
                list(self._rows[name].own_labels),
                [Sample(list(own), value) for own, value in numbers.items()],
            )
            for name, numbers in page.items()
        ]

    def _read_line(self, line: bytes, page: Page) -> bool:
        """Add the sample of ``line`` to ``page``, if a row has it; return whether it has one."""
        if not line or line.startswith(b"#"):
            return False
        try:
            head = parser.parse_head(line)
            # A timestamp behind the value is no number: llama-server writes none.
            value = float(line[head.end :])
        except (WireError, ValueError):
            return False
        row = self._rows.get(head.name)
        if row is None:
            return True
        unescaped = parser.unescape_labels(head.labels)
        labels = {name: printable(text) for name, text in unescaped.items()}
        own = tuple(labels.pop(name, "") for name in row.own_labels)
        # A gauge that is summed over engines is an amount; a negative one, such as -1, means none.
        is_amount = row.kind != "gauge" or row.combine == "sum"
        # If the row lacks a label, which another release added, the meaning is not known.
        if labels or not abs(value) <= VALUE_LIMIT or (is_amount and value < 0):
            return True
        numbers = page.setdefault(row.name, {})
        if row.kind == "counter":
            # A snapshot with a larger total could not be restored.
            numbers[own] = min(numbers.get(own, 0.0) + value, VALUE_LIMIT)
        else:
            numbers[own] = max(numbers.get(own, value), value)
        return True
