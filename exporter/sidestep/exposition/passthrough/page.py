"""One target's page: its families, and the samples left out.

The series of a line is recognised from the page before, so that only its value is parsed again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence

from sidestep.errors import PollError, WireError
from sidestep.exposition.passthrough import parser
from sidestep.exposition.passthrough.common_pages import NAMES, CommonCopies
from sidestep.exposition.passthrough.families import FamilySorter, PageFamily, Sample, Series
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


class Part:
    """Samples of one family of ``page``, and their text."""

    def __init__(self, page: Page, samples: Sequence[Sample]) -> None:
        self.page = page
        self.samples = samples
        self._texts: dict[bool, bytes] = {}

    def text(self, *, openmetrics: bool) -> bytes:
        """Return the lines."""
        found = self._texts.get(openmetrics)
        if found is None:
            samples = [(series.text, value) for series, value in self.samples]
            if openmetrics:
                samples = [(text, parser.timestamp_in_seconds(value)) for text, value in samples]
            found = self._texts[openmetrics] = b"".join([b"%b %b\n" % one for one in samples])
        return found


@dataclasses.dataclass(eq=False, slots=True)
class ParsedPage:
    """Content of a page.

    Attributes:
        families: Families, and their samples in parts.
        left_out: Lines and samples that are not in ``families``, by reason.
    """

    lines: list[bytes]
    families: list[tuple[PageFamily, list[Part]]]
    left_out: Counter[str]

    @property
    def exposed(self) -> int:
        """Return the number of samples in ``families``."""
        return sum(len(family.samples) for family, _ in self.families)


class Page:
    """Page of one target.

    Args:
        name: Name of the target whose engines have statistics lines; empty: they have none.
        labels: Labels to add to every sample. A label of the page with such a name becomes
            ``exported_NAME``.
        excluded: Families to leave out.
        merge: Merges all pages after their series have changed, one slice per step.
        forget: Drops what a page had.
        common: Whether families have copies under common names.

    Attributes:
        parsed: The content; None if the page exposes nothing.
    """

    def __init__(
        self,
        name: str,
        labels: Labels,
        excluded: Collection[str],
        merge: Callable[[], Iterator[None]],
        forget: Callable[[Page], None],
        *,
        common: bool = False,
    ) -> None:
        self.parsed: ParsedPage | None = None
        self.name = name
        self.labels = tuple((name, parser.escape(text)) for name, text in labels)
        self._merge = merge
        self._forget = forget
        # A page cannot have a family of these names itself.
        self._excluded = frozenset(excluded) | (NAMES if common else frozenset())
        self._copies = CommonCopies() if common else None
        self._known: dict[bytes, Series] = {}
        """Series by ``raw`` without its last blank."""
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        """Labels of the page being read: many series share one, so it is stored once."""

    def hide(self) -> None:
        """Expose nothing, and drop the content."""
        self._known = {}
        if self.parsed is not None:
            self.parsed = None
            self._forget(self)

    def update(self, chunks: Iterable[bytes]) -> Iterator[None]:
        """Read a page, one slice per step; the last step exposes it.

        Raises:
            PollError: This is no metrics page; the page before stays exposed.
        """
        lines, is_whole = yield from _lines(chunks)
        if self.parsed is None or lines != self.parsed.lines:
            self.parsed = yield from self._read(lines, is_whole=is_whole)
        yield from self._merge()

    def _read(self, lines: list[bytes], *, is_whole: bool) -> Generator[None, None, ParsedPage]:
        """Parse ``lines``, some of which may be known."""
        parsed = ParsedPage(lines, [], Counter())
        sorter = FamilySorter(parsed.left_out, self._excluded)
        is_openmetrics = lines[-1:] == [b"# EOF"]
        samples: list[Sample] = []
        known: dict[bytes, Series] = {}
        self._pairs = {}
        left = SLICE
        for line in lines:
            start, _, value = line.rpartition(b" ")
            series = self._known.get(start)
            left -= 1
            if series is not None and parser.is_plain_value(value):
                sample: Sample | None = (series, value)
            else:
                sample = self._parse_line(line, sorter, openmetrics=is_openmetrics)
                left -= _NEW_LINE_COST + len(line) // _BYTES_PER_COST
            if sample is not None:
                samples.append(sample)
                known[sample[0].raw[:-1]] = sample[0]
            if left <= 0:
                left = SLICE
                yield
        if not samples:
            raise PollError("bad_answer", f"none of its {len(lines)} lines is a sample")
        if not is_whole:
            raise PollError("truncated", "its last line has no end")
        if is_openmetrics:
            sorter.name_counters_as_samples()
        families = yield from sorter.sorted(samples)
        if self._copies is not None:
            families += self._copies.of(families)
            yield
        for family in families:
            parts = yield from make_parts(self, family.samples)
            parsed.families.append((family, parts))
        self._known = known
        return parsed

    def _parse_line(self, line: bytes, sorter: FamilySorter, *, openmetrics: bool) -> Sample | None:
        """Return the sample of a new line, if it has one; comments and errors go to ``sorter``."""
        if not line.strip():
            return None
        try:
            if line.lstrip().startswith(b"#"):
                sorter.comment(parser.parse_comment(line))
                return None
            head = parser.parse_head(line)
            parse = parser.parse_openmetrics_value if openmetrics else parser.parse_value
            value = parse(line[head.end :])
        except WireError as error:
            sorter.left_out[error.reason] += 1
            return None
        raw = line[: head.end]
        series = self._known.get(raw[:-1]) or self._series(raw, head.name, head.labels)
        return series, value

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


def make_parts(page: Page, samples: Sequence[Sample]) -> Generator[None, None, list[Part]]:
    """Return the samples of a family in parts."""
    parts: list[Part] = []
    for start in range(0, len(samples), PART):
        parts.append(Part(page, samples[start : start + PART]))
        yield
    return parts


def add_labels(labels: Labels, added: Labels) -> Labels:
    """Return ``labels`` and ``added``; a label with the name of an added one becomes ``exported_``NAME."""
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
