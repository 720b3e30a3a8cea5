"""One target's page: its families, and the samples left out.

The series of a line is recognised from the page before, so that only its value is parsed again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from sidestep.catalog.engine_pages import COMMON_NAMES, CommonName
from sidestep.engines.common_names import FAMILIES, TOKEN_TYPE
from sidestep.errors import PollError, WireError
from sidestep.exposition.passthrough import parser
from sidestep.exposition.passthrough.families import (
    FamilySorter,
    PageFamily,
    PassthroughSample,
    PassthroughSeries,
)
from sidestep.exposition.passthrough.parser import MAX_LINE_BYTES, Labels

MAX_LINES = 50_000
MAX_PAGE_BYTES = 8 << 20
_EXPORTED_PREFIX = "exported_"


NAMES = frozenset(family.name for family in FAMILIES)
_KINDS = {family.name: family.kind for family in FAMILIES}
_HELPS = {family.name: family.help for family in FAMILIES}
MODEL, MODEL_NAME = "model", "model_name"
_BY_SOURCE = {row.source: row for row in COMMON_NAMES}


@dataclasses.dataclass(eq=False, slots=True)
class ParsedPage:
    """Content of a page.

    Attributes:
        left_out: Lines and samples that are not in ``families``, by reason.
        known: PassthroughSeries by ``raw`` without its last blank.
    """

    lines: list[bytes]
    families: list[PageFamily]
    left_out: Counter[str]
    known: dict[bytes, PassthroughSeries]

    @property
    def exposed(self) -> int:
        """Return the number of samples in ``families``."""
        return sum(len(family.samples) for family in self.families)


class Page:
    """Page of one target.

    Args:
        name: Name of the target whose engines have statistics lines; empty: they have none.
        labels: Labels to add to every sample. A label of the page with such a name becomes
            ``exported_NAME``.
        merge: Merges all pages after their series have changed.
        common: Whether families have copies under common names.

    Attributes:
        parsed: The content; None if the page exposes nothing.
    """

    def __init__(
        self,
        name: str,
        labels: Labels,
        excluded: Collection[str],
        merge: Callable[[], None],
        forget: Callable[[Page], None],
        *,
        common: bool = False,
    ) -> None:
        self.parsed: ParsedPage | None = None
        self.name = name
        self.labels = tuple((name, parser.escape(text)) for name, text in labels)
        self.merge = merge
        self._forget = forget
        # A page cannot have a family of these names itself.
        self._excluded = frozenset(excluded) | (NAMES if common else frozenset())
        self._has_copies = common
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        """Labels of the page being read: many series share one, so it is stored once."""

    def hide(self) -> None:
        """Expose nothing, and drop the content."""
        if self.parsed is not None:
            self.parsed = None
            self._forget(self)

    def update(self, chunks: Iterable[bytes]) -> None:
        """Read a page, and expose it.

        Raises:
            PollError: This is no metrics page; the page before stays exposed.
        """
        self.parsed = self.read(chunks)
        self.merge()

    def read(self, chunks: Iterable[bytes]) -> ParsedPage:
        """Return the content of a page; nothing is exposed, so that another thread can call this."""
        lines, is_whole = _lines(chunks)
        before = self.parsed
        if before is not None and lines == before.lines:
            return before
        known = {} if before is None else before.known
        parsed = ParsedPage(lines, [], Counter(), {})
        sorter = FamilySorter(parsed.left_out, self._excluded)
        is_openmetrics = lines[-1:] == [b"# EOF"]
        samples: list[PassthroughSample] = []
        self._pairs = {}
        for line in lines:
            start, _, value = line.rpartition(b" ")
            series = known.get(start)
            if series is not None and parser.is_plain_value(value):
                sample: PassthroughSample | None = (series, value)
            else:
                sample = self._parse_line(line, sorter, known, openmetrics=is_openmetrics)
            if sample is not None:
                samples.append(sample)
                parsed.known[sample[0].raw[:-1]] = sample[0]
        if not samples:
            raise PollError("bad_answer", f"none of its {len(lines)} lines is a sample")
        if not is_whole:
            raise PollError("truncated", "its last line has no end")
        if is_openmetrics:
            sorter.name_counters_as_samples()
        parsed.families = sorter.sorted(samples)
        if self._has_copies:
            parsed.families += _common_copies(parsed.families)
        return parsed

    def _parse_line(
        self,
        line: bytes,
        sorter: FamilySorter,
        known: Mapping[bytes, PassthroughSeries],
        *,
        openmetrics: bool,
    ) -> PassthroughSample | None:
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
        series = known.get(raw[:-1]) or self._series(raw, head.name, head.labels)
        return series, value

    def _series(self, raw: bytes, name: str, labels: Labels) -> PassthroughSeries:
        intern_pair = self._pairs.setdefault
        labels = tuple([intern_pair(pair, pair) for pair in add_labels(labels, self.labels)])
        text = parser.series_text(name, labels)
        pairs = tuple(sorted(labels))
        if not all(dict(pairs).values()):
            # To Prometheus an empty label is absent.
            pairs = tuple(pair for pair in pairs if pair[1])
        key = text if pairs == labels else parser.series_text(name, pairs)
        return PassthroughSeries(raw, name, labels, text, key)


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


def _lines(chunks: Iterable[bytes]) -> tuple[list[bytes], bool]:
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
    if not size:
        raise PollError("bad_answer", "it is empty")
    if rest:
        lines.append(rest)
    return lines, not rest


def _common_copies(families: Iterable[PageFamily]) -> list[PageFamily]:
    """Return copies under common names, one for each name; a family of another kind has none."""
    made: dict[str, PageFamily] = {}
    for family in families:
        row = _BY_SOURCE.get(family.name)
        if row is None or family.kind != _KINDS[row.name]:
            continue
        copy = made.setdefault(
            row.name, PageFamily(row.name, family.kind, _HELPS[row.name], [], is_common=True)
        )
        found = [(_copy(series, row), value) for series, value in family.samples]
        copy.samples += _highest(found) if row.process else found
    return list(made.values())


def _highest(samples: Iterable[PassthroughSample]) -> list[PassthroughSample]:
    """Return the highest sample of each series that several processes repeat."""
    highest: dict[bytes, PassthroughSample] = {}
    for sample in samples:
        known = highest.get(sample[0].key)
        if known is None or _number(sample) > _number(known):
            highest[sample[0].key] = sample
    return list(highest.values())


def _number(sample: PassthroughSample) -> float:
    return float(sample[1].split()[0])


def _copy(series: PassthroughSeries, row: CommonName) -> PassthroughSeries:
    """Return ``series`` under the common name, with the common labels."""
    name = row.name + series.name.removeprefix(row.source)
    labels = _labels(series.labels, row)
    text = parser.series_text(name, labels)
    return PassthroughSeries(
        series.raw, name, labels, text, parser.series_text(name, tuple(sorted(labels)))
    )


def _labels(labels: Labels, row: CommonName) -> Labels:
    names = {name for name, _ in labels}
    renamed = tuple(
        (MODEL_NAME if name == MODEL and MODEL_NAME not in names else name, text)
        for name, text in labels
        if text and name not in (TOKEN_TYPE, row.process)
    )
    return (*renamed, (TOKEN_TYPE, row.token_type)) if row.token_type else renamed
