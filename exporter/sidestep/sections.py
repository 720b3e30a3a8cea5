"""Plain fields of an item into series: a section of the plan, ready to run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from sidestep.plan import Layout, Placed, Section, reader
from sidestep.registry import Engine, Registry


class Reads:
    """A section, ready to run: attributes are read several at a time."""

    def __init__(self, section: Section, layout: Layout, registry: Registry) -> None:
        self.registry = registry
        self.refused = layout.hooks["refused_observations"].slots[0]
        self.gauges = _pairs(section.gauges)
        self.counters = _pairs(section.counters)
        self.single = _pairs(section.single)
        self.lists = _pairs(section.lists)
        self.columns = section.columns
        self.codes = section.codes
        self.tallies = section.tallies
        self.section = section
        self.shown = section.shown
        self.parts = [
            (name.removesuffix("[]"), name.endswith("[]"), Reads(part, layout, registry))
            for name, part in section.parts.items()
        ]

    def run(self, engine: Engine, source: Any, *, fresh: bool) -> None:  # noqa: C901, PLR0912 - one pass, the hot path
        """Add what ``source`` holds; its gauges only where they are ``fresh``."""
        values = engine.values
        self.show(engine)
        if fresh and self.gauges:
            read, slots = self.gauges
            for slot, value in zip(slots, read(source), strict=True):
                values[slot] = value
        if self.counters:
            read, slots = self.counters
            for slot, value in zip(slots, read(source), strict=True):
                if value:
                    values[slot] = (values[slot] or 0) + value
        if self.lists:
            read, slots = self.lists
            for slot, observed in zip(slots, read(source), strict=True):
                if observed:
                    self.refuse(engine, engine.histogram(slot).observe_many(observed))
        if self.single:
            read, slots = self.single
            for slot, value in zip(slots, read(source), strict=True):
                self.refuse(engine, engine.histogram(slot).observe(value))
        for name, placed in self.tallies:
            self.tally(engine, placed, getattr(source, name), fresh=fresh)
        for name, many, part in self.parts:
            below = getattr(source, name)
            if many and below:
                part.run_column(engine, below)
            elif below is not None and not many:
                part.run(engine, below, fresh=fresh)

    def run_column(self, engine: Engine, sources: list[Any]) -> None:
        """Add a list of structs, field by field."""
        self.show(engine)
        for name, nested, slot in self.columns:
            found = [getattr(source, name) for source in sources]
            column = list(chain.from_iterable(found)) if nested else found
            known = [value for value in column if value is not None]
            if known:
                self.refuse(engine, engine.histogram(slot).observe_many(known))
        for name, placed in self.codes:
            last = len(placed.slots) - 1
            for source in sources:
                slot = placed.slots[min(getattr(source, name), last)]
                engine.values[slot] = (engine.values[slot] or 0) + 1

    def show(self, engine: Engine) -> None:
        """An option's families appear together, with the first struct that only it sends."""
        if self.shown and self.section not in engine.seen:
            engine.seen.add(self.section)
            for placed in self.shown:
                engine.show(placed)

    def refuse(self, engine: Engine, count: int) -> None:
        """Count observations that were left out."""
        if count:
            engine.values[self.refused] = (engine.values[self.refused] or 0) + count

    def tally(
        self, engine: Engine, placed: Placed, found: dict[str, int] | list[int], *, fresh: bool
    ) -> None:
        """Add a dict by label value, or a list by position."""
        if isinstance(found, list):
            found = {str(position): count for position, count in enumerate(found)}
        row = placed.row
        if row.closed:
            if fresh:
                for slot, value in zip(placed.slots, row.closed, strict=False):
                    engine.values[slot] = found.get(value, 0)
            return
        children = engine.keyed[placed.slots[0]]
        for value, count in found.items():
            key = self.registry.capped(children, (value,))
            children[key] = children.get(key, 0) + count


def _pairs(
    fields: list[tuple[str, int]],
) -> tuple[Callable[[Any], tuple[Any, ...]], tuple[int, ...]] | None:
    if not fields:
        return None
    return reader([name for name, _ in fields]), tuple(slot for _, slot in fields)
