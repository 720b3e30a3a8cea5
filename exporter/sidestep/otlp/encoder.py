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

    def pieces(self, families: Iterable[SeriesFamily], stamp: int) -> Iterator[Piece]:
        """Encode ``families`` with points of the time ``stamp``, in nanoseconds since 1970."""
        kept, self._kept = self._kept, {}
        for family in families:
            blocks = self._kept.setdefault(family.name, kept.pop(family.name, []))
            number = 0
            for form, series in _chunks(family):
                block = blocks[number] if number < len(blocks) else None
                if block is None or block.form != form or block.keys != [one.key for one in series]:
                    block = Block(family, form, series, stamp)
                    blocks[number : number + 1] = [block]
                data = block.encode(series, stamp)
                yield Piece(len(series), sized(b"\x12", data))
                number += 1
            del blocks[number:]


def _chunks(family: SeriesFamily) -> Iterator[tuple[str, list[Series]]]:
    """Yield the form and the series of one block at a time."""
    form = ""
    series: list[Series] = []
    for one in family.series:
        own = form_of(family.kind, one.value)
        if series and (own != form or len(series) == POINTS):
            yield form, series
            series = []
        form = own
        series.append(one)
    if series:
        yield form, series
