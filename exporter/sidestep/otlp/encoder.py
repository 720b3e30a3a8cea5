"""Encoder of the page's families as OTLP requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sidestep import __version__
from sidestep.exposition.proto_format import sized, varint
from sidestep.otlp.blocks import POINTS, Block, attributes, form_of
from sidestep.otlp.messages import InstrumentationScope, Resource
from sidestep.otlp.page_families import Series, SeriesFamily

MAX_BODY_BYTES = 4 << 20
"""Bytes of a request before compression; receivers accept 4 MB at least, and 20 MB or more by default."""


class Piece(NamedTuple):
    """An encoded message of metrics, and the number of its points."""

    points: int
    data: bytes


class Request(NamedTuple):
    """The body of a request, in parts, and the number of its points."""

    points: int
    parts: list[bytes]


class Encoder:
    """Encodes families, and keeps their messages for the next push.

    Args:
        resource: Resource attributes.
    """

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._resource = sized(
            b"\x0a", Resource(attributes=attributes(resource)).SerializeToString()
        )
        scope = InstrumentationScope(name="sidestep", version=__version__)
        self._scope = sized(b"\x0a", scope.SerializeToString())
        self._kept: dict[str, list[Block]] = {}

    def pieces(self, families: Iterable[SeriesFamily | None], stamp: int) -> Iterator[Piece | None]:
        """Encode ``families`` with points of the time ``stamp``, in nanoseconds since 1970.

        Yields:
            A piece, or None to yield to the event loop.
        """
        kept, self._kept = self._kept, {}
        for family in families:
            if family is None:
                yield None
                continue
            # Copying the state of a thousand engines takes most of a slice.
            yield None
            blocks = self._kept.setdefault(family.name, kept.pop(family.name, []))
            number = 0
            for some in _chunks(family):
                if some is None:
                    yield None
                    continue
                form, series = some
                block = blocks[number] if number < len(blocks) else None
                if block is None or block.form != form or block.keys != [one.key for one in series]:
                    block = Block(family, form, series, stamp)
                    blocks[number : number + 1] = [block]
                data = block.encode(series, stamp)
                yield Piece(len(series), sized(b"\x12", data))
                number += 1
            del blocks[number:]

    def requests(self, pieces: Iterable[Piece]) -> Iterator[Request]:
        """Put ``pieces`` into requests of at most ``MAX_BODY_BYTES``, but at least one piece."""
        some: list[Piece] = []
        size = 0
        for piece in pieces:
            if some and size + len(piece.data) > MAX_BODY_BYTES:
                yield self._request(some, size)
                some, size = [], 0
            some.append(piece)
            size += len(piece.data)
        if some:
            yield self._request(some, size)

    def _request(self, pieces: list[Piece], size: int) -> Request:
        # Of ExportMetricsServiceRequest, ResourceMetrics and ScopeMetrics.
        scope = b"\x12" + varint(len(self._scope) + size) + self._scope
        resource = self._resource + scope
        head = b"\x0a" + varint(len(resource) + size) + resource
        return Request(sum(one.points for one in pieces), [head, *(one.data for one in pieces)])


def _chunks(family: SeriesFamily) -> Iterator[tuple[str, list[Series]] | None]:
    """Yield the form and the series of one block at a time; None: yield to the event loop."""
    form = ""
    series: list[Series] = []
    for one in family.series:
        if one is None:
            yield None
            continue
        own = form_of(family.kind, one.value)
        if series and (own != form or len(series) == POINTS):
            yield form, series
            series = []
        form = own
        series.append(one)
    if series:
        yield form, series
