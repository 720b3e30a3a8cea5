"""Self-metrics of the current engines and streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sidestep.ingest.health import HealthMonitor
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import KV_TRANSFER
from sidestep.protocol.receiver import Receiver
from sidestep.protocol.stream import Stream, StreamState
from sidestep.telemetry.rows import PER_ENGINE
from sidestep.telemetry.self_metrics import LabelledValue, Labels, Reading, SelfMetrics
from sidestep.tracking.health.states import EngineState, Health

STATES = tuple((state, (state.value,)) for state in EngineState)
OF_ENGINES: dict[str, Callable[[Engine], Iterable[LabelledValue]]] = {
    "sidestep_engine_up": lambda engine: [((), float(engine.is_up))],
    "sidestep_engine_restarts_total": lambda engine: [((), engine.restarts)],
    "sidestep_engine_last_seen_timestamp_seconds": lambda engine: (
        [((), engine.last_seen)] if engine.last_seen else []
    ),
    "sidestep_engine_missing_fields": lambda engine: [
        ((path,), 1) for path in engine.description.renamed_fields
    ],
    "sidestep_engine_info": lambda engine: [(_info(engine), 1)],
}
OF_STREAMS: dict[str, Callable[[Stream], float]] = {
    "sidestep_stream_ring_bytes": lambda stream: stream.beat.ring_bytes if stream.beat else 0,
    "sidestep_stream_lag_items": lambda stream: (
        max(stream.beat.head - stream.seq, 0) if stream.beat else 0
    ),
    "sidestep_stream_push_dropped_total": lambda stream: stream.dropped,
    "sidestep_stream_errors_total": lambda stream: stream.errors,
    "sidestep_folded_items_total": lambda stream: stream.folded,
}
"""Values of streams that other processes send, by family."""


def read_metrics(
    metrics: SelfMetrics, registry: Registry, receiver: Receiver, health: HealthMonitor
) -> None:
    """Register the self-metrics that are read from the arguments at each scrape."""
    read, engines = metrics.read, Engines(registry)
    for family, samples in OF_ENGINES.items():
        read(family, engines.samples(samples))
    _read_health(metrics, registry, health)
    read("sidestep_engines", lambda: [((), len(registry.engines))])
    read("sidestep_series", SeriesCount(registry).reading)
    read(
        "sidestep_series_limited_total",
        lambda: [((limit,), count) for limit, count in registry.limited.items()],
    )
    streams = receiver.streams

    def of_streams(value: Callable[[Stream], float]) -> Reading:
        return lambda: [
            ((s.id,), value(s)) for s in streams.values() if s.state is not StreamState.LOCAL
        ]

    read(
        "sidestep_streams",
        lambda: [
            ((), sum(s.state is not StreamState.CLOSED and not s.silent for s in streams.values()))
        ],
    )
    for name, value in OF_STREAMS.items():
        read(name, of_streams(value))
    read(
        "sidestep_stream_durable_lag_items",
        of_streams(lambda stream: stream.seq - stream.durable if receiver.durable else 0),
    )


def _info(engine: Engine) -> Labels:
    connectors = engine.info.get(KV_TRANSFER, {}).get("connectors", "")
    return engine.layout.dialect, engine.role, connectors


def _read_health(metrics: SelfMetrics, registry: Registry, health: HealthMonitor) -> None:
    # A version of a model has no other metrics here, but a state of its own.
    engines = Engines(registry, with_parts=True)

    def stalls(found: Health, _: Engine) -> list[LabelledValue]:
        if found.state is not EngineState.STALLED or found.reason is None:
            return []
        return [((found.reason.value,), found.age)]

    families: dict[str, Callable[[Health, Engine], list[LabelledValue]]] = {
        "sidestep_engine_state": lambda found, _: [
            (labels, float(found.state is state)) for state, labels in STATES
        ],
        "sidestep_engine_stalled_seconds": stalls,
        "sidestep_engine_step_age_seconds": lambda found, engine: (
            [((), found.step_age or 0.0)] if health.has_steps(engine) else []
        ),
        "sidestep_engine_unfinished_requests": lambda found, _: (
            [] if found.unfinished is None else [((), found.unfinished)]
        ),
    }
    for name, samples in families.items():

        def read(
            engine: Engine, samples: Callable[..., list[LabelledValue]] = samples
        ) -> list[LabelledValue]:
            found = health.of(engine)
            return [] if found is None else samples(found, engine)

        metrics.read(name, engines.samples(read))


class Engines:
    """Engines by the labels of self-metrics, which are cached while no engine's labels change.

    Engines that are part of another engine are included only ``with_parts``.
    """

    def __init__(self, registry: Registry, *, with_parts: bool = False) -> None:
        self._registry = registry
        self._with_parts = with_parts
        self._cached_key: tuple[Sequence[int], Sequence[str]] | None = None
        self._found: Sequence[tuple[Labels, Engine]] = ()

    def samples(self, samples: Callable[[Engine], Iterable[LabelledValue]]) -> Reading:
        """Return a reading of any number of ``samples`` of each engine, with own labels."""
        return lambda: [
            ((*labels, *own), value)
            for labels, engine in self._engines()
            for own, value in samples(engine)
        ]

    def _engines(self) -> Sequence[tuple[Labels, Engine]]:
        current = list(self._registry.engines.values())
        # An engine's identity can change without a new label version.
        cache_key = [engine.label_version for engine in current], [engine.id for engine in current]
        if cache_key == self._cached_key:
            return self._found
        keys: list[tuple[Labels, Engine]] = []
        for engine in current:
            if self._with_parts or not engine.layout.tables.is_part(engine.labels):
                others = (engine.labels.get(name, "") for name in PER_ENGINE[1:])
                keys.append(((engine.name, *others), engine))
        counts = Counter(key for key, _ in keys)
        # A stream about an engine that also pushes does not change that engine's labels.
        own_counts = Counter(
            key for key, engine in keys if not engine.layout.tables.has_own_namespace
        )
        # Engines that differ only in other labels are distinguished by their identities.
        self._found = [
            (
                (*key[:-1], engine.id)
                if (counts if engine.layout.tables.has_own_namespace else own_counts)[key] > 1
                else key,
                engine,
            )
            for key, engine in keys
        ]
        self._cached_key = cache_key
        return self._found


class SeriesCount:
    """Number of series; only engines that have changed are counted again."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: dict[int, tuple[int, int]] = {}
        """By label version: the version of an engine, and its number of series then."""

    def reading(self) -> Iterable[LabelledValue]:
        """Read the number of series for ``SelfMetrics.read``."""
        before, self._known = self._known, {}
        known = self._known
        for engine in self._registry.engines.values():
            found = before.get(engine.label_version)
            if found is None or found[0] != engine.version:
                found = engine.version, series_of(engine)
            known[engine.label_version] = found
        return [((), sum(count for _, count in known.values()))]


def series_of(engine: Engine) -> int:
    """Return the number of exposed children of all families; a histogram counts as one."""
    values, histograms = engine.values, engine.histograms
    return (
        len(values)
        - values.count(None)
        + len(histograms)
        - histograms.count(None)
        + sum(map(len, engine.keyed))
        + sum(len(family.children) for family in engine.open_families.values())
    )
