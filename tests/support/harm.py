"""Invariants of an intake that must hold whatever a peer sends.

An honest engine, all of whose counts are known, sends beside the hostile peers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as openmetrics_families,
)
from prometheus_client.parser import text_string_to_metric_families

from rendered import render
from sidestep.catalog.prices import Price, Prices
from sidestep.config.parsing import MAX_TENANTS
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep
from sidestep.exposition.own_families import own_values, write
from sidestep.ingest.health import MAX_ADVANCE
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import Engine
from sidestep.metrics.exposed_engines import MAX_ENGINES
from sidestep.metrics.histogram import Histogram
from sidestep.metrics.quotas import MAX_BYTES, MAX_OPEN_FAMILIES, MAX_SERIES
from sidestep.metrics.recent_steps import RecentSteps
from sidestep.metrics.registry import Accounting, Registry, Tracking
from sidestep.metrics.trackers import Trackers
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_OPEN_VALUES, VERSION
from sidestep.protocol.messages import Batch, EngineInfo, Hello, encode
from sidestep.protocol.progress import MAX_FRAMES
from sidestep.protocol.receiver import MAX_RETIRED, MAX_STREAMS, Receiver
from sidestep.requests.request_log import EngineRequests
from sidestep.requests.tenants import Tenants
from sidestep.snapshot.capture import Capture, restore
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry
from sidestep.tracking.kv_blocks.tracker import Sampling
from sidestep.tracking.requests.inflight import WAITS
from sidestep.tracking.requests.settings import RequestSettings

REASONS = frozenset({
    "bad_bounds", "bad_family", "bad_item", "bad_label", "bad_schema", "changed_dialect", "changed_family", "id_conflict",
    "multipart", "negative_counter", "not_printable", "over_limit", "owned_family", "throttled", "too_big",
    "unknown_dialect", "unknown_engine", "version",
})  # fmt: skip
HONEST = EngineInfo("honest", "vllm", {"engine": "honest", "model_name": "honest"})
INCARNATION = 1 << 40
LATENCIES = [0.01, 0.2]
TOKENS = 7
CAPACITY = 300
"""Limit on tracked requests, and on tracked blocks."""
RETURNING = ("sidestep_kv_", "sidestep_kv_cached_")
"""Prefixes of gauges that a snapshot does not restore: block tracking starts again."""

layouts = DIALECTS.layouts()
Numbers = dict[Any, float]


class World:
    """An intake with an honest engine beside any hostile peers.

    Attributes:
        slowest: CPU seconds of the slowest call.
    """

    def __init__(self, *, boot: int = 1, scale: bool = False) -> None:
        tenants = Tenants("cache-salt", MAX_TENANTS)
        registry = Registry(
            layouts,
            tracking=Tracking(
                RequestSettings(capacity=CAPACITY),
                Sampling(1.0, scale=scale, capacity=CAPACITY),
                request_sink=lambda engine: EngineRequests(None, tenants, engine),
            ),
            accounting=Accounting(tenants, Prices([Price("*", 1, 2, 3)])),
        )
        self.intake = Intake(
            Applier(registry), Receiver(boot), SelfMetrics(), clock=lambda: 0.0, wall=lambda: 1.0
        )
        self.own = own_registry(self.intake.metrics, ())
        self.now = 0.0
        self.slowest = 0.0
        self._steps = 0
        self._known: dict[int, tuple[Engine, Numbers]] = {}
        self._totals: Numbers = {}

    def take(self, peer: bytes, *frames: bytes) -> None:
        """Take a message in, and apply it."""
        self._timed(lambda: self.intake.accept(peer, frames, self.now))
        while self.intake.busy:
            self._timed(self.intake.work)

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass without messages, and run what is due by then."""
        until = self.now + seconds
        while self.now < until:
            # A longer step would be a pause of the exporter.
            self.now = min(self.now + MAX_ADVANCE, until)
            self._timed(lambda: self.intake.health.update(self.now))
        self._timed(lambda: self.intake.expire(self.now))
        self._timed(self.intake.applier.flush_block_lifetimes)

    def be_honest(self) -> None:
        """Send a step of the honest engine, and its hello where a sender would."""
        stream = self.intake.receiver.streams.get(HONEST.id)
        if stream is None or not stream.peer or stream.silent:
            hello = Hello(VERSION, HONEST.id, INCARNATION, 1, self._steps + 1, [HONEST])
            self.take(b"honest", encode(hello))
        self._steps += 1
        found = IterationStats(TOKENS, inter_token_latencies_iter=list(LATENCIES))
        item = encode_item(VllmStep(0, self.now + 1.0, 1.0, None, found))
        self.take(b"honest", encode(Batch(INCARNATION, self._steps, [msgspec.Raw(item)])))

    def check(self) -> None:
        """Assert all invariants."""
        self.check_refusals()
        self.check_bounds()
        self.check_counters()
        self.check_honest()
        self.check_health()
        self.check_pages()
        self.check_snapshot()

    def check_refusals(self) -> None:
        """Assert that every refusal has one of the known reasons."""
        found = self.intake.metrics.counters()
        reasons = {labels[0] for name, labels, _ in found if name == "sidestep_rejected_total"}

        assert reasons <= REASONS, reasons - REASONS

    def check_honest(self) -> None:
        """Assert that the honest engine's series are exact."""
        if not self._steps:
            return
        engine = self.intake.registry.engines[HONEST.id]
        tokens = engine.layout.find("vllm:generation_tokens_total").slots[0]
        latency = engine.histogram(engine.layout.find("vllm:inter_token_latency_seconds").slots[0])

        assert engine.values[tokens] == self._steps * TOKENS
        assert sum(latency.counts) == self._steps * len(LATENCIES)
        assert math.isclose(latency.sum, self._steps * sum(LATENCIES))

    def check_health(self) -> None:
        """Assert that all engines have a state, that what is logged is printable, and what is kept bounded."""
        registry, streams = self.intake.registry, self.intake.receiver.streams
        assert all(s.beat is None or not s.beat.progress for s in streams.values())
        for engine, health in self.intake.health:
            assert engine.id in registry.engines
            assert math.isfinite(health.age)
            assert health.age >= 0.0
            assert len(health.stack) <= MAX_FRAMES
            assert all(frame.isprintable() for frame in health.stack)
        known = {stream.id for stream in streams.values()}
        self.advance(1.0)
        for followed in self.intake.health._followed.values():
            assert followed.tracker._reports.keys() <= known

    def check_bounds(self) -> None:
        """Assert that state is within its limits, and that quotas agree with it."""
        registry, receiver = self.intake.registry, self.intake.receiver
        everyone = [*registry.engines.values(), *registry.retired.values()]
        assert len(registry.engines) <= MAX_ENGINES
        assert registry.engines.keys().isdisjoint(registry.retired)
        assert len(receiver.streams) <= MAX_STREAMS
        assert len(receiver._by_incarnation) <= (MAX_RETIRED + 1) * len(receiver.streams)
        assert len(self.intake.bindings.engines) <= len(receiver.streams)
        assert registry.quota.series == sum(used.series for used in registry.quota.usage.values())
        assert registry.quota.bytes == sum(used.bytes for used in registry.quota.usage.values())
        assert registry.quota.usage.keys() <= {*everyone}
        assert registry.quota.series <= MAX_SERIES
        assert registry.quota.bytes <= MAX_BYTES
        assert len(registry.quota.families) <= MAX_OPEN_FAMILIES
        held = {
            name for e in everyone for name in e.open_families if name not in e.layout.sampled_rows
        }
        assert held == registry.quota.families.keys()
        for engine in everyone:
            _check_engine(engine)
        found = [engine.part(Trackers).requests for engine in everyone]
        lives = [tracker for tracker in found if tracker is not None]
        places = registry.sample_groups.capacity
        assert places.engines == len(lives)
        assert places.used == sum(len(tracker.requests.live) for tracker in lives)
        waiting = sum(group.live for group in registry.sample_groups.groups.values())
        assert waiting <= places.used

    def check_counters(self) -> None:
        """Assert that no counter has decreased while its engine stayed the same."""
        known = self._known
        self._known = {}
        registry = self.intake.registry
        for engine in (*registry.engines.values(), *registry.retired.values()):
            now = dict(_counters(engine))
            _, before = known.get(id(engine), (engine, {}))
            _check_grown(before, now)
            # The reference keeps the id from being used again.
            self._known[id(engine)] = engine, now
        totals: Numbers = {(name, labels): n for name, labels, n in self.intake.metrics.counters()}
        totals |= {("limited", (limit,)): n for limit, n in registry.limited.items()}
        _check_grown(self._totals, totals)
        self._totals = totals

    def pages(self) -> tuple[str, str]:
        """Return the text and OpenMetrics pages, with the exporter's own families."""
        registry = self.intake.registry
        own = own_values(self.own)
        text = b"".join([render(registry), *write(own, "text")])
        openmetrics = b"".join([render(registry, openmetrics=True), *write(own, "openmetrics")])
        return text.decode(), openmetrics.decode()

    def check_pages(self) -> None:
        """Assert that Prometheus' parsers accept the pages and their values."""
        text, openmetrics = self.pages()
        check_page(text_string_to_metric_families(text))
        check_page(openmetrics_families(openmetrics))  # type: ignore[no-untyped-call]

    def check_snapshot(self) -> None:
        """Assert that a snapshot can be taken, and that restoring it gives the same page."""
        pieces = list(Capture(self.intake).pieces())
        other = World(boot=2)
        restore(other.intake, pieces, self.now)
        engines = self.intake.registry.engines
        assert list(other.intake.registry.engines) == list(engines)
        for name, engine in other.intake.registry.engines.items():
            engine.live = engines[name].live
        before, after = (_lines(render(world.intake.registry)) for world in (self, other))
        assert before == after, sorted(before ^ after)[:9]
        other._steps = self._steps
        other.check_bounds()
        other.check_honest()

    def _timed(self, call: Callable[[], object]) -> None:
        since = time.process_time()
        call()
        self.slowest = max(self.slowest, time.process_time() - since)


def _check_engine(engine: Engine) -> None:
    for children, row in zip(engine.keyed, engine.layout.keyed, strict=True):
        assert len(children) <= (4 if row.kind == "gauge" else 1) * (MAX_OPEN_VALUES + 1)
    for family in engine.open_families.values():
        assert len(family.children) <= MAX_OPEN_VALUES + 1
    assert engine.exposed_paths <= engine.layout.optional_paths
    steps, trackers = engine.part(RecentSteps), engine.part(Trackers)
    for window in steps.hit_windows:
        assert len(window.entries) <= 1001
        assert window.requests >= 0
    assert steps.held_tokens >= 0
    if trackers.blocks is not None:
        assert trackers.blocks.tracked <= CAPACITY
    if trackers.requests is not None:
        requests = trackers.requests.requests
        assert max(len(requests.live), len(requests.given_up)) <= CAPACITY
        assert requests.prefilling <= requests.live.keys()
        assert requests.preempted.keys() <= requests.live.keys()
        assert requests.waiting_tokens == sum(r.waits for r in requests.live.values())
        assert requests.prefill_tokens == sum(r.unfilled for r in requests.live.values())
        waiting = [r.prompt_tokens for r in requests.live.values() if r.state in WAITS]
        assert requests.waiting_prompt_tokens == sum(waiting)
        assert sum(requests.adapters.values()) <= len(requests.live)


def _counters(engine: Engine) -> Iterator[tuple[object, float]]:  # noqa: C901 - one list of all
    layout = engine.layout
    for slot, value in enumerate(engine.values):
        if value is not None and slot not in layout.scalar_gauges:
            yield ("values", slot), value
    for children, row in zip(engine.keyed, layout.keyed, strict=True):
        if row.kind == "counter":
            yield from (((row.name, key), value) for key, value in children.items())
    histograms: list[Histogram | None] = list(engine.histograms)
    for family in engine.open_families.values():
        for key, child in family.children.items():
            if isinstance(child, Histogram):
                histograms.append(child)
            elif family.kind == "counter":
                yield (family.name, key), child
    for histogram in histograms:
        # A histogram whose bounds change is another object.
        if histogram is not None:
            yield (histogram, "sum"), histogram.sum
            yield from (((histogram, n), count) for n, count in enumerate(histogram.counts))


def _check_grown(before: Numbers, now: Numbers) -> None:
    fallen = {
        key: (then, now.get(key)) for key, then in before.items() if now.get(key, then) < then
    }
    assert not fallen, fallen
    assert all(math.isfinite(float(value)) and value >= 0 for value in now.values())


def check_page(families: Iterable[Metric]) -> None:
    """Assert that no family or series is there twice, and that histograms add up."""
    seen: Counter[object] = Counter()
    names: Counter[str] = Counter()
    for family in families:
        names[family.name] += 1
        buckets: dict[object, list[tuple[float, float]]] = {}
        counts: dict[object, float] = {}
        for sample in family.samples:
            # To Prometheus an empty label is no label.
            labels = {name: value for name, value in sample.labels.items() if value}
            key = frozenset(labels.items())
            seen[sample.name, key] += 1
            assert all(value.isprintable() for value in labels.values())
            assert not math.isnan(sample.value)
            if family.type in ("counter", "histogram"):
                assert sample.value >= 0
            if sample.name == f"{family.name}_bucket":
                le = float(labels.pop("le"))
                buckets.setdefault(frozenset(labels.items()), []).append((le, sample.value))
            elif sample.name == f"{family.name}_count":
                counts[key] = sample.value
        for group, found in buckets.items():
            assert found == sorted(found)
            assert [count for _, count in found] == sorted(count for _, count in found)
            assert found[-1] == (math.inf, counts[group])
        assert family.type != "histogram" or buckets.keys() == counts.keys()
    assert not {key: n for key, n in seen.items() if n > 1}
    assert not {name: n for name, n in names.items() if n > 1}


def _lines(page: bytes) -> set[str]:
    return {line for line in page.decode().split("\n") if not line.startswith(("#", *RETURNING))}
