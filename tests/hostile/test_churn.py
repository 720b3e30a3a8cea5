"""Engines that come and go, each under a name of its own: memory is level once the most engines are retired."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from exporters import until
from intakes import Fed
from sidestep.engines.items import Item, encode_item
from sidestep.engines.vllm.wire import SchedulerStats, VllmStep
from sidestep.exposition import own_families
from sidestep.exposition.pages import PageCopier, Pages
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.metrics import exposed_engines
from sidestep.metrics.exposed_engines import ENGINE_EXPIRES_SECONDS
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import Bye, EngineInfo
from sidestep.protocol.request_events import Queued, RequestEvents
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.snapshot.capture import Capture
from sidestep.telemetry.self_metrics import own_registry

ENGINES = 64
"""Engines that come and go in a round."""
MAX_ENGINES = 4 * ENGINES
"""Engines that may be retired, instead of as many as an exporter holds."""
FILL = MAX_ENGINES // ENGINES + 1
"""Rounds after which the most engines are retired."""
MORE = 2
MAX_GROWTH_BYTES = 1024 * ENGINES
"""From one round to the next."""


def serve(fed: Fed, number: int, engine: int) -> None:
    """Let one engine connect, send items of every kind and say goodbye."""
    name = f"pod-{number}-{engine}"
    incarnation = fed.processes[name] = 1 + number * ENGINES + engine
    labels = {"engine": name, "model_name": f"model-{number}"}
    fed.send_hello(name, [EngineInfo(name, "vllm", labels, features=["engine_core"])])
    family = Family("my_seconds", "histogram", ["kind"], help="Mine.", bounds=[0.5, 1.0])
    family.samples.append(Sample([f"kind-{number}"], observations=[0.1, 0.7]))
    iteration = IterationStats(5, inter_token_latencies_iter=[0.01, 0.02])
    items: list[Item] = [
        VllmStep(0, 1.0, 1.0, SchedulerStats(num_running_reqs=3), iteration),
        RequestEvents(0, 1.0, incarnation, [Queued(1, 1.0, 1.0, 7, f"adapter-{number}")]),
        Samples(0, 1.0, [family]),
    ]
    fed.items(name, [encode_item(item) for item in items])
    fed.send(name, Bye(incarnation, len(items), "closed"))
    # A test's own memory must not grow with the number of engines.
    for known in (fed.processes, fed.seqs, fed.engines):
        known.clear()


class Exporter:
    """An exporter without sockets: its pages, snapshots and timers are real."""

    def __init__(self) -> None:
        self.fed = Fed()
        intake = self.fed.intake
        self.capture = Capture(intake)
        own = own_registry(intake.metrics, ())
        passthrough = PassthroughRegistry(intake.registry.names)
        self.pages = Pages(PageCopier(intake.registry, passthrough, own))

    async def finish_round(self) -> None:
        """Render a page, take a snapshot, and let the engines of this round expire."""
        body = await self.pages.page("engine", "text")
        assert b"vllm:generation_tokens_total" in b"".join(body.parts)
        self.save()
        self.fed.now += ENGINE_EXPIRES_SECONDS
        self.fed.intake.expire(self.fed.now)
        self.save()
        # Concurrent scrapes share a page for a moment, and texts of labels are cached up to a number.
        await until(lambda: not self.pages._renders)
        own_families._label_text.cache_clear()

    def save(self) -> None:
        """Take a snapshot."""
        self.capture.pieces()
        self.capture.mark_saved()


async def test_memory_is_level_while_engines_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many are retired as may be; each engine more replaces one, in the registry, in caches and in snapshots."""
    monkeypatch.setattr(exposed_engines, "MAX_ENGINES", MAX_ENGINES)
    exporter = Exporter()
    registry = exporter.fed.intake.registry
    held = []
    tracemalloc.start()
    try:
        for number in range(FILL + MORE):
            for engine in range(ENGINES):
                serve(exporter.fed, number, engine)
            await exporter.finish_round()
            if number >= FILL - 1:
                assert len(registry.retired) == MAX_ENGINES
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()

    assert not registry.engines
    assert exporter.fed.rejected == {}
    # Free lists fill in the first of these rounds.
    assert held[-1] - held[-2] < MAX_GROWTH_BYTES
