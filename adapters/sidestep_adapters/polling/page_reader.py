"""Reader of an engine's own metrics page: the families of a dialect's rows, with their totals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sidestep.catalog.row import Row, Sampled
from sidestep.errors import PollError, WireError
from sidestep.exposition.passthrough import parser
from sidestep.protocol.limits import COUNT_LIMIT, MAX_BOUNDS, VALUE_LIMIT, printable
from sidestep.protocol.self_described import Family, Sample

SLICE_LINES = 50
"""Lines read in one turn of the event loop, in 1 ms or so where all are new."""
MAX_LINES = 8192
MAX_BYTES = 1 << 20
MAX_HEADS = 2 * MAX_LINES
"""Maximum series whose places are remembered from earlier pages."""

Key = tuple[str, ...]


class _Series(NamedTuple):
    """The row of a sample, and its place in the row.

    Attributes:
        row: Row of the family.
        own: Values of the row's own labels.
        part: End of the sample's name: ``bucket``, ``sum`` or empty.
        bound: Upper bound of a bucket.
    """

    row: Row
    own: Key
    part: str = ""
    bound: float = math.inf


class PageReader:
    """Reads the pages of one server.

    Args:
        rows: The dialect's rows.

    Attributes:
        unknown: Families of the last page that no row has.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[str, tuple[Row, str]] = {}
        for row in rows:
            if isinstance(row.source, Sampled):
                for part in ("bucket", "sum") if row.kind == "histogram" else ("",):
                    self._rows[f"{row.name}_{part}" if part else row.name] = row, part
        self._heads: dict[bytes, _Series | None] = {}
        self.unknown: set[str] = set()

    async def read(self, body: bytes) -> list[Family]:
        """Return the families of a page.

        Raises:
            PollError: This is no metrics page.
        """
        lines = body.split(b"\n")
        if len(lines) > MAX_LINES or len(body) > MAX_BYTES:
            raise PollError("bad_answer", f"more than {MAX_LINES} lines, or {MAX_BYTES >> 20} MiB")
        if lines.pop().strip():
            raise PollError("truncated", "the last line has no end")
        if len(self._heads) > MAX_HEADS:
            self._heads.clear()
        self.unknown.clear()
        page = _Page()
        samples = 0
        for number, line in enumerate(lines):
            if number % SLICE_LINES == SLICE_LINES - 1:
                await asyncio.sleep(0)
            samples += self._read_line(line, page)
        if not samples:
            raise PollError("bad_answer", f"none of its {len(lines)} lines is a sample")
        return page.families()

    def _read_line(self, line: bytes, page: _Page) -> bool:
        """Add the sample of ``line``; return whether it has one."""
        if not line or line.startswith(b"#"):
            return False
        head, _, text = line.rpartition(b" ")
        try:
            if head not in self._heads:
                self._heads[head] = self._series(line)
            value = float(text)
        except (WireError, ValueError):
            return False
        series = self._heads[head]
        if series is not None:
            page.add(series, value)
        return True

    def _series(self, line: bytes) -> _Series | None:
        """Return the place of a new line's sample; None if no row has it.

        Raises:
            WireError: The line is no sample.
        """
        head = parser.parse_head(line)
        found = self._rows.get(head.name)
        if found is None:
            if not head.name.endswith("_count"):
                self.unknown.add(head.name.removesuffix("_bucket"))
            return None
        row, part = found
        if b" " in line[head.end :].strip():
            raise WireError("bad_line", "a sample with a timestamp")
        unescaped = parser.unescape_labels(head.labels)
        labels = {name: printable(text) for name, text in unescaped.items()}
        bound = labels.pop("le", "")
        own = tuple(labels.pop(name, "") for name in row.own_labels)
        if labels or (part == "bucket" and not bound):
            # The row lacks a label, which another release added: its meaning is not known.
            self.unknown.add(head.name)
            return None
        return _Series(row, own, part, float(bound or "inf"))


class _Histogram(NamedTuple):
    """Cumulative counts by upper bound, and the sum in a list of one."""

    buckets: dict[float, float]
    total: list[float]


class _Page:
    """The samples of one page, by row and own labels."""

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[Row, dict[Key, float]]] = {}
        self._histograms: dict[str, tuple[Row, dict[Key, _Histogram]]] = {}

    def add(self, series: _Series, value: float) -> None:
        """Add a sample, unless its value is out of range."""
        row = series.row
        # A gauge that is summed over engines is an amount; a negative one, such as -1, means none.
        is_amount = row.kind != "gauge" or row.combine == "sum"
        if not abs(value) <= VALUE_LIMIT or (is_amount and value < 0):
            return
        if row.kind == "histogram":
            _, found = self._histograms.setdefault(row.name, (row, {}))
            histogram = found.setdefault(series.own, _Histogram({}, [0.0]))
            if series.part == "sum":
                histogram.total[0] += value
            else:
                buckets = histogram.buckets
                buckets[series.bound] = buckets.get(series.bound, 0.0) + value
            return
        _, numbers = self._numbers.setdefault(row.name, (row, {}))
        if row.kind == "counter":
            numbers[series.own] = numbers.get(series.own, 0.0) + value
        else:
            numbers[series.own] = max(numbers.get(series.own, -math.inf), value)

    def families(self) -> list[Family]:
        """Return the families, counters and gauges before histograms."""
        numbers = [
            Family(
                row.name,
                row.kind,
                list(row.own_labels),
                [Sample(list(own), value) for own, value in found.items()],
            )
            for row, found in self._numbers.values()
        ]
        made = (_histogram_family(row, children) for row, children in self._histograms.values())
        return numbers + [family for family in made if family is not None]


def _histogram_family(row: Row, children: Mapping[Key, _Histogram]) -> Family | None:
    """Return the family; None if its children differ in their bounds, or it exceeds a limit."""
    bounds = {tuple(sorted(child.buckets)) for child in children.values()}
    if len(bounds) != 1 or not (first := next(iter(bounds))) or not math.isinf(first[-1]):
        return None
    most = max(count for child in children.values() for count in child.buckets.values())
    if len(first) > MAX_BOUNDS + 1 or most > COUNT_LIMIT:
        return None
    samples: list[Sample] = []
    for own, child in children.items():
        before, counts = 0.0, []
        for bound in first:
            counts.append(max(int(child.buckets[bound] - before), 0))
            before = child.buckets[bound]
        samples.append(Sample(list(own), counts=counts, total=child.total[0]))
    return Family(row.name, row.kind, list(row.own_labels), samples, "", list(first[:-1]))
