"""Checks of an exporter by itself: its self-metrics, its engines' health and its state directory."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from urllib.parse import quote

from sidestep.config.scrape_targets import without_secrets
from sidestep.config.settings import Config
from sidestep.diagnosis import own_codes as codes
from sidestep.diagnosis.finding import Code, Finding
from sidestep.exposition.live.answers import Attention
from sidestep.exposition.live.verdict import Evaluation
from sidestep.ingest.connection_log import REMEDIES
from sidestep.metrics.engine import ORIGIN, Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import BOTH, DECODE, ENGINE_CORE, VERSIONS
from sidestep.telemetry.self_metrics import Labels, SelfMetrics
from sidestep.transport.process import resident
from sidestep.transport.upkeep import MIB

MINUTE = 60.0
WINDOW_MINUTES = 60
"""An increase of a counter within so many minutes is a finding."""
CONNECT_SECONDS = 15.0
"""Seconds after the start within which an engine or a source should have connected."""
SCRAPE_SECONDS = 300.0
"""Seconds without a scrape by Prometheus that make a finding."""
LATE_SECONDS = 1.0
NEAR = 0.9
"""Share of a limit from which on usage is near it."""
SNAPSHOTS_OF_ROOM = 3
PUSHES = 3
"""Pushes that a receiver fails to accept in a row before they are a finding."""
PUSH_SECONDS = 10.0
"""Seconds that a push may take."""

EXPORTER = "exporter"
COUNTERS: Mapping[str, Code] = {
    "sidestep_rejected_total": codes.REJECTED,
    "sidestep_auth_denied_total": codes.DENIED,
    "sidestep_http_refused_total": codes.HTTP_REFUSED,
    "sidestep_lost_items_total": codes.LOST,
    "sidestep_stream_push_dropped_total": codes.DROPPED,
    "sidestep_folded_items_total": codes.FOLDED,
    "sidestep_stream_errors_total": codes.UNTRANSLATED,
    "sidestep_series_limited_total": codes.SERIES_LIMIT,
    "sidestep_rebinds_total": codes.REBOUND,
    "sidestep_subscription_lost_messages_total": codes.STREAM_LOST,
    "sidestep_collector_errors_total": codes.COLLECTOR,
    "sidestep_otlp_rejected_points_total": codes.OTLP_REJECTED,
    "sidestep_otlp_rejected_spans_total": codes.OTLP_REJECTED,
    "sidestep_otlp_rejected_log_records_total": codes.OTLP_REJECTED,
    "sidestep_request_records_lost_total": codes.RECORDS_LOST,
}
"""Counters whose increase is a finding."""
EXPECTED: Mapping[str, Code] = {
    "sidestep_snapshot_healthy": codes.NOT_SAVED,
    "sidestep_web_config_current": codes.WEB_CONFIG,
    "sidestep_zap_up": codes.ZAP_DOWN,
    "sidestep_subscription_connected": codes.SUBSCRIPTION,
}
"""Gauges that are 1 while all is well."""
TARGET_STATES: Mapping[str, tuple[str, ...]] = {
    "sidestep_scrape_state": ("stale", "down"),
    # A server that has not answered for 300 s, or never, has no engine that could be unreachable.
    "sidestep_engine_poll_state": ("down",),
}
"""States of polled servers that are a finding."""
GAUGES = (
    "sidestep_recovered_total",
    "sidestep_snapshot_bytes",
    "sidestep_scrape_left_out_samples",
    "sidestep_loop_lag_seconds",
    "sidestep_otlp_last_success_timestamp_seconds",
)
PROBLEMS: Mapping[Attention, Code] = {
    "unreachable": codes.UNREACHABLE,
    "stalled": codes.STALLED,
    "slow": codes.SLOW,
    "full": codes.OVERLOADED,
    "saturated": codes.OVERLOADED,
    "outlier": codes.OUTLIER,
    "contested": codes.CONTESTED,
}
BUILDS_STATISTICS = "sidestep_engine_process_builds_statistics"
Counts = dict[tuple[str, Labels], float]


class OwnChecks:
    """Checks of an exporter by itself.

    Args:
        engines: Returns the engines and the verdict on them, as the live page shows them.
        scraped_at: Returns the monotonic time of the last scrape by Prometheus; None: never.
    """

    def __init__(
        self,
        registry: Registry,
        engines: Callable[[], Awaitable[Evaluation]],
        metrics: SelfMetrics,
        config: Callable[[], Config],
        endpoints: Callable[[], list[str]],
        *,
        scraped_at: Callable[[], float | None] = lambda: None,
        refusals: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._evaluation = engines
        self._metrics = metrics
        self._config = config
        self._endpoints = endpoints
        self._scraped_at = scraped_at
        self._refusals = refusals
        self._clock = clock
        self._started = clock()
        self._minutes: deque[Counts] = deque([self._counts()], WINDOW_MINUTES)

    async def run(self) -> None:
        """Note the counters every minute until cancelled; findings compare them with an hour ago."""
        while True:
            await asyncio.sleep(MINUTE)
            self.note()

    def note(self) -> None:
        """Note the counters of this minute."""
        self._minutes.append(self._counts())

    async def findings(self) -> list[Finding]:
        """Return what is wrong now, or has been within the last hour."""
        return [
            *self._engines(await self._evaluation()),
            *self._cores(),
            *self._roles(),
            *self._increases(),
            *self._gauges(),
            *self._state_directory(),
            *self._limits(),
        ]

    def _counts(self) -> Counts:
        return {
            (name, labels): value
            for name, samples in self._values(COUNTERS).items()
            for labels, value in samples.items()
        }

    def _values(
        self, names: Mapping[str, Code] | tuple[str, ...]
    ) -> dict[str, dict[Labels, float]]:
        found = filter(None, self._metrics.samples(frozenset(names)))
        return {row.name: dict(filter(None, samples)) for row, samples in found}

    def _engines(self, found: Evaluation) -> Iterator[Finding]:
        age, has_sources = self._clock() - self._started, self._config().has_sources
        if not self._registry.engines and age >= CONNECT_SECONDS and not has_sources:
            listed = ", ".join(self._endpoints())
            yield codes.NO_ENGINE.on(
                EXPORTER, f"no engine within {age:.0f} s at {listed or 'none'}"
            )
        if not found.serves:
            yield codes.NOT_SERVING.on(EXPORTER, found.verdict.text)
        for row in found.rows:
            if row.attention is not None:
                code = PROBLEMS[row.attention]
                remedy = code.remedy.replace("/ID/", f"/{quote(row.id)}/")
                yield code.on(f"engine {row.id}", row.problem or row.attention, remedy)
        for engine in self._registry.engines.values():
            if engine.description.renamed_fields:
                yield codes.MISSING_FIELDS.on(
                    f"engine {engine.id}",
                    f"{_release(engine)} has no {', '.join(engine.description.renamed_fields)}",
                )
            statistics = engine.open_families.get(BUILDS_STATISTICS)
            for key, value in statistics.children.items() if statistics is not None else ():
                if value:
                    yield codes.BUILDS_STATISTICS.on(f"engine {engine.id}", ": ".join(key))
            if engine.labels.get(ORIGIN):
                yield codes.SAME_LABELS.on(
                    f"engine {engine.id}", f"another engine has its labels {_named(engine.labels)}"
                )

    def _cores(self) -> Iterator[Finding]:
        """Yield findings on engines whose front ends leave most metrics to a core that is not here."""
        for engine in self._registry.engines.values():
            is_tapped = ENGINE_CORE in engine.description.features and engine.feeds.front_ends
            # A core describes its cache as soon as it connects.
            if engine.is_up and is_tapped and not engine.description.core_info:
                yield codes.NO_CORE.on(f"engine {engine.id}", "only its front end has connected")

    def _roles(self) -> Iterator[Finding]:
        """Yield findings on models whose engines' roles do not match."""
        roles: defaultdict[str, set[str]] = defaultdict(set)
        for engine in self._registry.engines.values():
            if engine.is_up and (model := engine.labels.get("model_name", "")):
                roles[model].add(engine.role)
        for model, found in roles.items():
            if len(found) == 1 and BOTH not in found:
                yield codes.NO_PEER.on(
                    f"model {model}", f"all of its engines are for {found.pop()}"
                )
            elif {DECODE, BOTH} <= found:
                yield codes.MIXED_ROLES.on(f"model {model}", f"roles: {', '.join(sorted(found))}")

    def _increases(self) -> Iterator[Finding]:
        before = self._minutes[0]
        for (name, labels), value in self._counts().items():
            added = value - before.get((name, labels), 0.0)
            if added <= 0:
                continue
            code, text = COUNTERS[name], ", ".join(filter(None, labels))
            if name == "sidestep_auth_denied_total" and labels == ("curve",):
                code = codes.WRONG_KEY
            if name == "sidestep_rejected_total" and labels == ("id_conflict",):
                code = codes.COUNTED_TWICE
            within = (
                "since the start" if len(self._minutes) < WINDOW_MINUTES else "in the last hour"
            )
            count, remedy = f"{added:.0f} {within} ({name})", ""
            if code is codes.REJECTED:
                remedy = REMEDIES.get(labels[0], "")
                last = self._refusals.get(labels[0])
                count += f"; the last: {last}" if last else ""
            yield code.on(text or EXPORTER, count, remedy[:1].upper() + remedy[1:])

    def _gauges(self) -> Iterator[Finding]:
        values = self._values((*EXPECTED, *GAUGES))
        for name, code in EXPECTED.items():
            for labels, value in values.get(name, {}).items():
                if value == 0:
                    yield code.on(", ".join(labels) or EXPORTER, f"{name} is 0")
        for target, state in self._failing_targets():
            yield codes.TARGET_DOWN.on(target, f"its state is {state}")
        for (target, why), value in values.get("sidestep_scrape_left_out_samples", {}).items():
            if value:
                yield codes.TARGET_LINES.on(target, f"{value:.0f} samples or lines: {why}")
        if values.get("sidestep_recovered_total", {}).get(("damaged",)):
            yield codes.STATE_DAMAGED.on(
                EXPORTER, "sidestep_recovered_total{from=damaged} is above 0"
            )
        pushed_at = values.get("sidestep_otlp_last_success_timestamp_seconds", {}).get((), 0.0)
        yield from self._receiver(pushed_at)
        lag = values.get("sidestep_loop_lag_seconds", {}).get((), 0.0)
        if lag >= LATE_SECONDS:
            yield codes.LOOP_LAG.on(EXPORTER, f"the event loop was {lag:.1f} s late")

    def _failing_targets(self) -> Iterator[tuple[str, str]]:
        for name, samples in self._values((*TARGET_STATES,)).items():
            for (target, state), value in samples.items():
                if value and state in TARGET_STATES[name]:
                    yield target, state

    def _receiver(self, pushed_at: float) -> Iterator[Finding]:
        """Yield a finding if the OTLP receiver has accepted nothing since ``pushed_at``."""
        receiver, interval = self._config().otlp_endpoint, self._config().otlp_interval
        silence = min(time.time() - pushed_at, self._clock() - self._started)
        if receiver and silence >= PUSHES * interval + PUSH_SECONDS:
            text = f"no push was accepted for {silence:.0f} s"
            yield codes.OTLP_DOWN.on(without_secrets(receiver), text)

    def _state_directory(self) -> Iterator[Finding]:
        directory = self._config().state_dir
        if not directory:
            yield codes.NOT_DURABLE.on(EXPORTER, "--state.dir is not set")
            return
        size = self._metrics.value("sidestep_snapshot_bytes")
        try:
            free = shutil.disk_usage(directory).free
        except OSError as error:
            yield codes.NOT_SAVED.on(directory, error.strerror or str(error))
            return
        if free < SNAPSHOTS_OF_ROOM * max(size, MIB):
            yield codes.STATE_FULL.on(directory, f"{free // MIB} MiB are free")

    def _limits(self) -> Iterator[Finding]:
        soft, used = self._config().limits_memory_soft, resident() // MIB
        if soft and used >= NEAR * soft:
            yield codes.MEMORY.on(
                EXPORTER, f"{used} MiB are in use, --limits.memory-soft is {soft}"
            )
        now, scraped_at = self._clock(), self._scraped_at()
        idle = now - (self._started if scraped_at is None else scraped_at)
        is_pushed = bool(self._config().otlp_endpoint)
        if self._registry.engines and not is_pushed and idle >= SCRAPE_SECONDS:
            yield codes.NOT_SCRAPED.on(EXPORTER, f"no scrape for {idle:.0f} s")


def _release(engine: Engine) -> str:
    """Return the engine's package and its release, such as ``vllm 0.33.0``."""
    versions = engine.info.get(VERSIONS, {})
    return next((f"{n} {v}" for n, v in versions.items() if n != "sidestep"), "its release")


def _named(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in labels.items() if name != ORIGIN)
