"""Encoder of the page's families as OTLP messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sidestep.exposition.proto_format import sized
from sidestep.otlp.blocks import POINTS, Block, form_of
from sidestep.otlp.envelope import Piece
from sidestep.otlp.page_families import Series, SeriesFamily


class Encoder:
    """Encodes families, and keeps their messages for the next push."""

    def __init__(self) -> None:
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
