"""Another exporter's page, from poll to poll: its series, their values, and what was left out.

A line whose series was on the page before is known by its beginning; one that has not changed at
all costs next to nothing.
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
"""Known lines that are read between two turns of the loop."""
_NEW_LINE_COST = 10
"""What one that is not known costs, in known ones; and one more for each so many bytes."""
_BYTES_PER_COST = 16
_EXPORTED_PREFIX = "exported_"


@dataclasses.dataclass(eq=False, slots=True)
class Series:
    """One of a page.

    Attributes:
        raw: How its line begins on the page, up to the value.
        labels: Those that are shown, values with their escapes.
        text: The same as it is shown, without the blank before the value.
        key: Equal where Prometheus takes two series for one.
    """

    raw: bytes
    name: str
    labels: Labels
    text: bytes
    key: bytes


Values = tuple[bytes, ...]


class Part:
    """Samples of one family, and their text, kept until one of them changes.

    Args:
        places: Their lines in the plan.
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
        """By series: value and timestamp as the page has them."""
        values = page_values[self.parsed]
        if values is not self._from:
            self._from = values
            found = self._pick(values)
            if found != self._values:
                self._values = found
                self._texts.clear()
        return self._values

    def text(self, page_values: PageValues, *, openmetrics: bool) -> bytes:
        """The lines."""
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
    """What is on a page. Of a later page with the same series only lines and values are new.

    Attributes:
        page: Whose it is, or was.
        order: By line: its series; None where it has none.
        values: By line: value and timestamp. Another object when one of them has changed.
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
        """How many are in ``families``."""
        return sum(len(family.found.line_numbers) for family in self.families)


PageValues = Mapping[ParsedPage, list[bytes]]
"""The values of each page at one time."""


class Page:
    """One target's.

    Args:
        labels: Of every sample. One that the page has under such a name is called
            ``exported_NAME``.
        excluded: Families that are left out.
        merge: Puts what is on all pages together where that is another, a slice at each step.
        forget: Lets go of what a page had.

    Attributes:
        plan: What it has; None where nothing of it is to be shown.
        changes: Grows with every value that is another, and when nothing is shown any more.
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
        """By ``raw`` without its last blank."""
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        """Labels of the page that is read: many series have one, and it is kept once."""

    def hide(self) -> None:
        """Show nothing, and keep nothing."""
        self._known = {}
        if self.parsed is not None:
            self._replace(None)
            self._forget(self)
            self.changes += 1

    def update(self, chunks: Iterable[bytes]) -> Iterator[None]:
        """Read a page, a slice at each step; after the last one it is what is shown.

        Raises:
            PollError: It is no page of metrics; what was shown before stays.
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
            # Its parts refer to it: without them it goes as soon as nobody shows it any more, and
            # does not wait for the garbage collector, which holds the loop for ten times as long.
            self.parsed.families = []
        self.parsed = parsed

    def _read(self, lines: list[bytes], *, is_whole: bool) -> Generator[None, None, ParsedPage]:
        """A plan of ``lines``, of which some may be known."""
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
        """What is on a line that is not known; a comment or a mistake is for ``sorting``."""
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
        kept = self._pairs.setdefault
        labels = tuple([kept(pair, pair) for pair in add_labels(labels, self.labels)])
        text = parser.series_text(name, labels)
        pairs = tuple(sorted(labels))
        if not all(dict(pairs).values()):
            # To Prometheus an empty label is none.
            pairs = tuple(pair for pair in pairs if pair[1])
        key = text if pairs == labels else parser.series_text(name, pairs)
        return Series(raw, name, labels, text, key)


def make_parts(
    parsed: ParsedPage, line_numbers: Sequence[int]
) -> Generator[None, None, list[Part]]:
    """The samples of a family on these lines."""
    parts: list[Part] = []
    for start in range(0, len(line_numbers), PART):
        parts.append(Part(parsed, line_numbers[start : start + PART]))
        yield
    return parts


def add_labels(labels: Labels, added: Labels) -> Labels:
    """``labels`` and ``added``; one of the former that has a name of the latter gets another."""
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
    """The lines of a page, and whether the last one has its end.

    Of one that is too long no more is kept than tells that it is.
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
    """The values in ``lines``; None where not all are of the same series as in ``plan``.

    Where none has changed they are the same object.
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
    """The value in ``line``, if it is one of ``series``."""
    if series is None or not line.startswith(series.raw):
        return None
    text = line[len(series.raw) :]
    if parser.is_plain_value(text):
        return text
    try:
        return parser.parse_value(text)
    except WireError:
        return None
