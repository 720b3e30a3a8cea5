"""The handlers of the toy engine's items."""

from __future__ import annotations

from tests.engines.toy_engine.wire import ToyStep

from sidestep.catalog.layout import Layout
from sidestep.engines.handlers import Handlers, is_fresh
from sidestep.metrics.engine import Engine
from sidestep.metrics.field_readers import compile_reader
from sidestep.metrics.registry import Registry


class ToyHandlers(Handlers):
    """Applies the toy engine's items to the engines of one registry."""

    HANDLED = ("steps",)

    def __init__(self, layout: Layout, registry: Registry) -> None:
        super().__init__(layout, registry)
        self._read = compile_reader(layout, registry, ToyStep)
        self._steps = layout.handled["steps"]
        self.appliers = {ToyStep: self._step}

    def _step(self, engine: Engine, item: ToyStep) -> None:
        self._read(engine, item, is_fresh(engine, item.stamp))
        self.registry.add(engine, self._steps, item.phase, 1)
