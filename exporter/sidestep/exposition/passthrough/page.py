"""One target's page: its series and values from poll to poll, and the samples left out.

A line is recognised by its series from the page before; an unchanged line costs next to nothing.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from sidestep.errors import PollError, WireError
from sidestep.exposition.passthrough import parser
from sidestep.exposition.passthrough.families import FamilyLines, FamilySorter
from sidestep.exposition.passthrough.parser import MAX_LINE_BYTES, Labels

MAX_LINES = 50_000
MAX_PAGE_BYTES = 8 << 20
PART = 1000
"""Samples whose text is made at once."""
SLICE = 200
"""Known lines to read before yielding to the event loop."""
_NEW_LINE_COST = 10
"""Cost of a new line in known lines; each ``_BYTES_PER_COST`` bytes cost one more."""
_BYTES_PER_COST = 16
_EXPORTED_PREFIX = "exported_"


@dataclasses.dataclass(eq=False, slots=True)
class Series:
    """One series of a page.

    Attributes:
        raw: The line on the page, up to the value.
        labels: Exposed labels; values are escaped.
        text: The exposed series, without the blank before the value.
        key: Equal for series that are equal to Prometheus.
    """

    raw: bytes
    name: str
    labels: Labels
    text: bytes
    key: bytes


Values = tuple[bytes, ...]


class Part:
    """Samples of one family, and their text, cached until one of them changes.

    Args:
        line_numbers: Their lines on the page.
    """

    def __init__(self, parsed: ParsedPage, line_numbers: Sequence[int]) -> None:
        self.parsed = parsed
        self.series = [
            series for place in line_numbers if (series := parsed.order[place]) is not None
        ]
        self._pick = _picker(line_numbers)
        lines = [one.text.replace(b"%", b"%%") + b" %b\n" for one in self.series]
        self._frame = b"".join(lines)
        self._from: list[bytes] = []
        self._values: Values = ()
        self._texts: dict[bool, bytes] = {}

    def values(self, page_values: PageValues) -> Values:
        """Return value and timestamp of each series, as the page has them."""
        values = page_values[self.parsed]
        if values is not self._from:
            self._from = values
            found = self._pick(values)
            if found != self._values:
                self._values = found
                self._texts.clear()
        return self._values

    def text(self, page_values: PageValues, *, openmetrics: bool) -> bytes:
        """Return the lines."""
        values = self.values(page_values)
        found = self._texts.get(openmetrics)
        if found is None:
            if openmetrics and any(b" " in value for value in values):
                values = tuple(map(parser.timestamp_in_seconds, values))
            found = self._texts[openmetrics] = self._frame % values
        return found


def _picker(line_numbers: Sequence[int]) -> Callable[[Sequence[bytes]], Values]:
    if len(line_numbers) == 1:
        (place,) = line_numbers
        return lambda values: (values[place],)
    return itemgetter(*line_numbers)


@dataclasses.dataclass(eq=False, slots=True)
class Family:
    """One family of a page."""

    found: FamilyLines
    parts: list[Part]


@dataclasses.dataclass(eq=False, slots=True)
class ParsedPage:
    """Content of a page; a later page with the same series replaces only lines and values.

    Attributes:
        page: The target's page.
        order: Series by line; None for a line without one.
        values: Value and timestamp by line; another object once one of them has changed.
        left_out: Lines and samples that are not in ``families``, by reason.
    """

    page: Page
    lines: list[bytes]
    order: list[Series | None]
    values: list[bytes]
    families: list[Family]
    left_out: Counter[str]

    @property
    def samples(self) -> int:
        """Return the number of samples in ``families``."""
        return sum(len(family.found.line_numbers) for family in self.families)


PageValues = Mapping[ParsedPage, list[bytes]]
"""Values of each page at one moment."""


class Page:
    """Page of one target.

    Args:
        labels: Labels to add to every sample. A label of the page with such a name becomes
            ``exported_NAME``.
        excluded: Families to leave out.
        merge: Merges all pages after their series have changed, one slice per step.
        forget: Drops what a page had.

    Attributes:
        parsed: The content; None if the page exposes nothing.
        changes: Increases when values change and when the page is hidden.
    """

    def __init__(
        self,
        labels: Labels,
        excluded: Collection[str],
        merge: Callable[[], Iterator[None]],
        forget: Callable[[Page], None],
    ) -> None:
        self.parsed: ParsedPage | None = None
        self.changes = 0
        self.labels = tuple((name, parser.escape(text)) for name, text in labels)
        self._merge = merge
        self._forget = forget
        self._excluded = frozenset(excluded)
        self._known: dict[bytes, Series] = {}
        """Series by ``raw`` without its last blank."""
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        """Labels of the page being read: many series share one, so it is stored once."""

    def hide(self) -> None:
        """Expose nothing, and drop the content."""
        self._known = {}
        if self.parsed is not None:
            self._replace(None)
            self._forget(self)
            self.changes += 1

    def update(self, chunks: Iterable[bytes]) -> Iterator[None]:
        """Read a page, one slice per step; the last step exposes it.

        Raises:
            PollError: This is no metrics page; the page before stays exposed.
        """
        lines, is_whole = yield from _lines(chunks)
        parsed = self.parsed
        if parsed is not None and len(lines) == len(parsed.lines) and is_whole:
            values = yield from _values(parsed, lines)
            # Unless it was hidden meanwhile.
            if values is not None and self.parsed is parsed:
                self.changes += values is not parsed.values
                parsed.lines, parsed.values = lines, values
                yield from self._merge()
                return
        self._replace((yield from self._read(lines, is_whole=is_whole)))
        yield from self._merge()

    def _replace(self, parsed: ParsedPage | None) -> None:
        if self.parsed is not None:
            # Its parts refer to it: without the cycle it is freed with its last reader, instead of
            # by the garbage collector, which would block the loop for ten times as long.
            self.parsed.families = []
        self.parsed = parsed

    def _read(self, lines: list[bytes], *, is_whole: bool) -> Generator[None, None, ParsedPage]:
        """Parse ``lines``, some of which may be known."""
        parsed = ParsedPage(self, lines, [], [], [], Counter())
        sorter = FamilySorter(parsed.left_out, self._excluded)
        known: dict[bytes, Series] = {}
        self._pairs = {}
        left = SLICE
        for line in lines:
            start, _, value = line.rpartition(b" ")
            series = self._known.get(start)
            left -= 1
            if series is None or not parser.is_plain_value(value):
                series, value = self._parse_line(line, sorter)
                left -= _NEW_LINE_COST + len(line) // _BYTES_PER_COST
            parsed.order.append(series)
            parsed.values.append(value)
            if series is not None:
                known[series.raw[:-1]] = series
            if left <= 0:
                left = SLICE
                yield
        if not known:
            raise PollError("bad_answer", f"none of its {len(lines)} lines is a sample")
        if not is_whole:
            raise PollError("truncated", "its last line has no end")
        for found in (yield from sorter.sorted(parsed.order)):
            parts = yield from make_parts(parsed, found.line_numbers)
            parsed.families.append(Family(found, parts))
        self._known = known
        return parsed

    def _parse_line(self, line: bytes, sorter: FamilySorter) -> tuple[Series | None, bytes]:
        """Parse a new line; comments and errors go to ``sorter``."""
        if not line.strip():
            return None, b""
        try:
            if line.lstrip().startswith(b"#"):
                sorter.comment(parser.parse_comment(line))
                return None, b""
            head = parser.parse_head(line)
            value = parser.parse_value(line[head.end :])
        except WireError as error:
            sorter.left_out[error.reason] += 1
            return None, b""
        raw = line[: head.end]
        return self._known.get(raw[:-1]) or self._series(raw, head.name, head.labels), value

    def _series(self, raw: bytes, name: str, labels: Labels) -> Series:
        intern_pair = self._pairs.setdefault
        labels = tuple([intern_pair(pair, pair) for pair in add_labels(labels, self.labels)])
        text = parser.series_text(name, labels)
        pairs = tuple(sorted(labels))
        if not all(dict(pairs).values()):
            # To Prometheus an empty label is absent.
            pairs = tuple(pair for pair in pairs if pair[1])
        key = text if pairs == labels else parser.series_text(name, pairs)
        return Series(raw, name, labels, text, key)


def make_parts(
    parsed: ParsedPage, line_numbers: Sequence[int]
) -> Generator[None, None, list[Part]]:
    """Return the samples of a family on these lines, in parts."""
    parts: list[Part] = []
    for start in range(0, len(line_numbers), PART):
        parts.append(Part(parsed, line_numbers[start : start + PART]))
        yield
    return parts


def add_labels(labels: Labels, added: Labels) -> Labels:
    """Return ``labels`` and ``added``; a label with the name of an added one is renamed."""
    if not added:
        return labels
    names = {name for name, _ in (*labels, *added)}
    own_names = {name for name, _ in added}
    found = []
    for own, text in labels:
        name = own
        if own in own_names:
            if not text:
                continue
            while name in names:
                name = _EXPORTED_PREFIX + name
            names.add(name)
        found.append((name, text))
    return (*found, *added)


def _lines(chunks: Iterable[bytes]) -> Generator[None, None, tuple[list[bytes], bool]]:
    """Return the lines of a page, and whether the last one is complete.

    A line that is too long is cut right above the limit.
    """
    lines: list[bytes] = []
    rest = b""
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > MAX_PAGE_BYTES or len(lines) + chunk.count(b"\n") > MAX_LINES:
            raise PollError(
                "bad_answer", f"more than {MAX_LINES} lines, or {MAX_PAGE_BYTES >> 20} MiB"
            )
        found = chunk.split(b"\n")
        found[0] = rest + found[0]
        rest = found.pop()[: MAX_LINE_BYTES + 1]
        lines += found
        yield
    if not size:
        raise PollError("bad_answer", "it is empty")
    if rest:
        lines.append(rest)
    return lines, not rest


def _values(parsed: ParsedPage, lines: list[bytes]) -> Generator[None, None, list[bytes] | None]:
    """Return the values in ``lines``; None if their series differ from those of ``parsed``.

    Without changes, the result is the object ``parsed.values``.
    """
    values = parsed.values
    for start in range(0, len(lines), SLICE):
        batch = lines[start : start + SLICE]
        if batch != parsed.lines[start : start + SLICE]:
            for at, line in enumerate(batch, start):
                if line != parsed.lines[at]:
                    text = _updated_value(parsed.order[at], line)
                    if text is None:
                        return None
                    if values is parsed.values:
                        values = values.copy()
                    values[at] = text
        yield
    return values


def _updated_value(series: Series | None, line: bytes) -> bytes | None:
    """Return the value in ``line`` if it belongs to ``series``."""
    if series is None or not line.startswith(series.raw):
        return None
    text = line[len(series.raw) :]
    if parser.is_plain_value(text):
        return text
    try:
        return parser.parse_value(text)
    except WireError:
        return None
