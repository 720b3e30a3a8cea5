"""Requests of OTLP: encoded messages of a signal, below the resource and the scope that they share.

The messages of all signals have the same field numbers down to here: those of ExportMetricsServiceRequest,
ResourceMetrics and ScopeMetrics are those of traces and logs, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from sidestep import __version__
from sidestep.exposition.proto_format import sized, varint
from sidestep.otlp.blocks import attributes
from sidestep.otlp.messages import InstrumentationScope, Resource

MAX_BODY_BYTES = 4 << 20
"""Bytes of a request before compression; receivers accept 4 MB at least, and 20 MB or more by default."""


class Piece(NamedTuple):
    """An encoded message, and the number of its points, spans or log records."""

    points: int
    data: bytes


class Request(NamedTuple):
    """The body of a request, in parts, and the number of its points, spans or log records."""

    points: int
    parts: list[bytes]


class Envelope:
    """The resource and the scope of all requests.

    Args:
        resource: Resource attributes.
    """

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._resource = sized(
            b"\x0a", Resource(attributes=attributes(resource)).SerializeToString()
        )
        scope = InstrumentationScope(name="sidestep", version=__version__)
        self._scope = sized(b"\x0a", scope.SerializeToString())

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
        scope = b"\x12" + varint(len(self._scope) + size) + self._scope
        resource = self._resource + scope
        head = b"\x0a" + varint(len(resource) + size) + resource
        return Request(sum(one.points for one in pieces), [head, *(one.data for one in pieces)])
