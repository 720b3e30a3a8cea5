"""Real runs recorded through the tap, compared with the engines' own pages."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from exporters import Start, page_of_engine, recorded_run
from pages import Family, differences, get, parse
from rendered import copied, render
from replays import replay
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item
from sidestep.exposition.families import families
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.request_events import Iteration, Preempted, RequestEvents
from sidestep_adapters.recording.format import Items, StreamStart, read
from sidestep_adapters.recording.replay import Progress, Replay

TOLERANCE = 1e-9
"""Relative, of sums."""
ARRIVAL = {"vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"}
"""In the engine they end in the front end, after a hop."""
OWN_SAMPLING = {
    "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
}
"""The runs were without --kv-cache-metrics; the tap followed every block."""
STEPS = "vllm:iteration_tokens_total"


async def replayed(start: Start, run: str) -> dict[str, Family]:
    """Return the exporter's page after the recording of ``run``."""
    async with start() as exporter:
        await replay(exporter, run, "golden")
        return parse(await get(exporter.url))


def total(page: dict[str, Family], family: str, sample: str = "", **labels: str) -> float:
    """Return the sum of a family's samples that have ``labels``."""
    found = page[family].samples.items()
    name = sample or family
    return sum(v for (n, own), v in found if n == name and labels.items() <= dict(own).items())


def counts(page: dict[str, Family], family: str) -> float:
    """Return the number of a histogram's observations."""
    return total(page, family, f"{family}_count")


class Played:
    """A recording whose items are applied one by one to a registry."""

    def __init__(self, run: str) -> None:
        layouts = DIALECTS.layouts()
        self.registry = Registry(layouts)
        self.run = run

    def applied(self) -> Iterator[tuple[Engine, Item]]:
        """Apply each item and yield it."""
        applier = Applier(self.registry)
        streams: dict[str, list[Engine]] = {}
        for record in read(recorded_run(self.run)):
            if isinstance(record, StreamStart):
                streams[record.stream] = [self.registry.register(e) for e in record.engines]
            elif isinstance(record, Items):
                for raw in record.items:
                    item = DIALECTS.decode(raw)
                    engine = streams[record.stream][item.engine]
                    applier.apply(engine, item)
                    yield engine, item

    def values(self, engine: Engine, name: str) -> dict[tuple[str, ...], float]:
        """Return samples of ``engine`` in a family, by their own label values."""
        values = copied(self.registry)
        (family,) = families(values, {name})
        return {
            key: value
            for shown in family.engines(values)
            for key, value in family.children(shown)[1]
            if shown.id == engine.id and isinstance(value, int | float)
        }


async def test_every_family_of_the_engine_comes_from_raw_events(start: Start) -> None:
    """Queue, prefill, decode, inference and inter-token times agree in every bucket."""
    ours, engines = await replayed(start, "core"), parse(page_of_engine("page_core"))

    found = [
        (name, what)
        for name, what in differences(engines, ours, tolerance=TOLERANCE)
        if name not in ARRIVAL and (what, name) not in {("extra", own) for own in OWN_SAMPLING}
    ]

    assert [] == found
    assert total(engines, "vllm:num_preemptions", "vllm:num_preemptions_total") > 0
    for name in ARRIVAL:
        assert counts(engines, name) == counts(ours, name)
        hop = total(engines, name, f"{name}_sum") - total(ours, name, f"{name}_sum")
        assert 0 < hop / counts(ours, name) < 0.1


async def test_aborts_are_counted_though_the_engine_does_not(start: Start) -> None:
    """They are in no request histogram; the core's aborts by stop strings are stops."""
    ours, engines = await replayed(start, "core_aborts"), parse(page_of_engine("page_core_aborts"))
    name = "vllm:request_success"

    def ended(page: dict[str, Family]) -> dict[str, float]:
        return {
            reason: total(page, name, f"{name}_total", finished_reason=reason)
            for reason in FINISH_REASONS
        }

    theirs = ended(engines)
    aborted = ended(ours).pop("abort")

    assert theirs["abort"] == 0
    assert aborted == 5
    assert {**theirs, "abort": aborted} == ended(ours)
    finished = sum(theirs.values())
    for histogram in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert finished == counts(ours, f"vllm:request_{histogram}_seconds")
        assert finished == counts(engines, f"vllm:request_{histogram}_seconds")
    for family in ("prompt_tokens", "generation_tokens", "duration_seconds"):
        assert aborted == counts(ours, f"sidestep_aborted_request_{family}")
    # The engine went on until its front end's word had arrived, which the front end ignored.
    tokens = "vllm:generation_tokens"
    more = total(ours, tokens, f"{tokens}_total") - total(engines, tokens, f"{tokens}_total")
    gaps = "vllm:inter_token_latency_seconds"
    assert 0 <= more == counts(ours, gaps) - counts(engines, gaps)


@pytest.mark.parametrize("run", ["core", "core_aborts"])
def test_a_preemption_counts_when_it_happens(run: str) -> None:
    """The engine counts it with the request's next output."""
    played = Played(run)
    happened: Counter[str] = Counter()
    early = 0
    waiting: set[int] = set()
    for engine, item in played.applied():
        if not isinstance(item, RequestEvents):
            continue
        for event in item.events:
            if isinstance(event, Preempted):
                happened[engine.id] += 1
                waiting.add(event.request)
            elif isinstance(event, Iteration):
                waiting.difference_update(n for o in event.outputs for n in o.requests)
        counted = played.values(engine, "vllm:num_preemptions_total")
        assert {(): happened[engine.id]} == counted
        early += len(waiting) > 0

    assert happened.total() > 10
    assert early > 0


def test_a_step_of_several_api_servers_is_counted_once() -> None:
    """A step counts as often as the core had output; the engine's page counts each API server's part.

    Items are applied in the recorded order: a replay would send each stream as fast as it can, and
    samples of a group on two engines would be further apart than in any real run.
    """
    engines = parse(page_of_engine("page_core_dp"))
    steps: Counter[str] = Counter()
    played = Played("core_dp")
    for engine, item in played.applied():
        if isinstance(item, RequestEvents):
            steps[engine.labels["engine"]] += sum(
                isinstance(event, Iteration) and bool(event.outputs) for event in item.events
            )
    ours = parse(render(played.registry).decode())

    found = [
        (name, what)
        for name, what in differences(engines, ours, tolerance=TOLERANCE)
        if name not in {*ARRIVAL, STEPS}
        and (what, name) not in {("extra", n) for n in OWN_SAMPLING}
    ]

    assert [] == found
    for label, count in steps.items():
        labels = {"engine": label}
        assert count == total(ours, STEPS, f"{STEPS}_count", **labels)
        assert count < total(engines, STEPS, f"{STEPS}_count", **labels)
        assert total(ours, STEPS, f"{STEPS}_sum", **labels) == total(
            engines, STEPS, f"{STEPS}_sum", **labels
        )
    assert set(steps) == {"0", "1"}


async def test_a_recording_can_be_replayed_repeatedly(start: Start) -> None:
    """Each round counts again, since its requests have the numbers of another process."""
    async with start() as exporter:
        for times in (1, 2):
            player = Replay(
                recorded_run("core_lora"), exporter.endpoints[0], realtime=False, namespace="again"
            )
            halted = threading.Event()
            rounds = _Counted(times, halted)
            player.progress = rounds
            await asyncio.to_thread(player.run, once=False, stop=halted)
        page = parse(await get(exporter.url))
    once = await replayed(start, "core_lora")

    for name in ("vllm:generation_tokens", "vllm:request_success"):
        assert 3 * total(once, name, f"{name}_total") == total(page, name, f"{name}_total")
    # Nobody is left over, and no step comes before the one before it.
    for name in ("sidestep_untracked_requests", "sidestep_refused_observations"):
        assert 0 == total(page, name, f"{name}_total")


class _Counted(Progress):
    """Progress that ends a replay after some rounds."""

    def __init__(self, times: int, halted: threading.Event) -> None:
        super().__init__()
        self._times, self._halted = times, halted

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "rounds" and value == getattr(self, "_times", None):
            self._halted.set()
