"""The catalogue tables of one engine's dialect: its rows, and the structs whose fields feed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from sidestep.catalog.row import Row, check

AvailabilityCounts = tuple[int | float, int | float]
"""Requests that were served, and requests that were not."""


class Polled(msgspec.Struct):
    """Statistics that a server is polled for."""

    @property
    def absent(self) -> bool:
        """True if the server no longer has the engine that they describe."""
        raise NotImplementedError


ALL_VALUES = "*"


class Series(NamedTuple):
    """A series of each engine: its family, and the value of the family's own label if it has one.

    With ``ALL_VALUES`` it is the sum over all values of the family's labels.
    """

    family: str
    value: str = ""


class Quotient(NamedTuple):
    """A number of the live page that only one kind of engine has: what a counter has counted.

    Attributes:
        by: Counter by whose increase it is divided; None: by time, so that it is a rate.
        unit: Factor to seconds, of a counter in another unit.
    """

    counter: Series
    by: Series | None = None
    unit: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySeries:
    """Series of an engine's statistics log line, of the live page and of its saturation.

    Several counters of one number are added up. ``DialectTables.latencies`` has the latencies.

    Attributes:
        running: Gauge of the requests in the batch.
        waiting: Gauge of the requests that wait, for whatever reason.
        load_running: The same gauge for engines that do not have ``running``.
        load_waiting: The same gauge for engines that do not have ``waiting``.
        prompt: Counter of computed prompt tokens.
        generation: Counter of generated tokens.
        kv_cache_usage: Gauge of the share of the KV cache in use.
        kv_tokens: Gauge of the tokens in the KV cache, for engines without a gauge of its usage.
        kv_capacity: Gauge of the tokens that fit into the KV cache.
        preemptions: Counter of preempted requests.
        deferred: Gauge of those waiting requests that do not wait for capacity.
        drafted: Counter of draft tokens.
        accepted: Counter of accepted draft tokens.
        blocked: Gauge of those waiting requests that wait for capacity; by default ``waiting``.
        begun: Histogram that observes each request once it is in the batch. Without it, the
            exporter computes no saturation.
        slots: Gauge of the most requests that fit into the batch.
        steps: Counter of steps, or histogram that observes each step.
        finished: Counters of the requests that ended for any reason.
        aborted: Counters of the requests that were aborted.
        looked_up: Counters of the tokens looked up in the prefix cache.
        found: Counters of the tokens found in the prefix cache.
        kv_blocks: Histograms of the times of KV blocks, by ``kv_lifetime`` (from a block's
            allocation to its eviction), ``kv_idle`` (from its last use to its eviction) and
            ``kv_reuse_gap`` (between two uses).
        own: Numbers that only this kind of engine has, by name.
    """

    running: Series | None = None
    waiting: Series | None = None
    load_running: Series | None = None
    load_waiting: Series | None = None
    prompt: Series | None = None
    generation: Series | None = None
    kv_cache_usage: Series | None = None
    kv_tokens: Series | None = None
    kv_capacity: Series | None = None
    preemptions: Series | None = None
    deferred: Series | None = None
    drafted: Series | None = None
    accepted: Series | None = None
    blocked: Series | None = None
    begun: Series | None = None
    slots: Series | None = None
    steps: Series | None = None
    finished: tuple[Series, ...] = ()
    aborted: tuple[Series, ...] = ()
    looked_up: tuple[Series, ...] = ()
    found: tuple[Series, ...] = ()
    kv_blocks: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own: Mapping[str, Quotient] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DialectTables:
    """The tables of one dialect.

    Attributes:
        name: The dialect's name in an engine's Hello.
        title: The name of the engine in texts that users read.
        rows: The dialect's families, in the order of the page.
        common_rows: Families whose names are the same for all engines.
        structs: Wire structs whose fields the rows' paths name.
        has_own_namespace: Whether no other dialect has families of these names. Then an engine may have
            the same labels as another dialect's engine.
        bare_counters: Prefix of counters whose names do not end in ``_total``.
        part_labels: Labels of engines that are part of another engine, such as a server's models.
        polled: Struct of polled statistics of a server that counts by itself.
        parallel_samples: Histograms of parallel samples (their number, and the tokens of the longest)
            where engines may send raw request events.
        key_series: Series of the statistics log line, of the live page and of the saturation.
        recorded: Counters of the requests that end with a record.
        feature_options: Options that expose the families of a feature, by feature, for doctor's texts.
        needed_by: Properties computed from a field, as paths, and handlers that read it, by the field's
            path.
        latencies: Histograms that predefined objectives count, by ``slo.LATENCIES``; the live page
            shows percentiles of ``ttft``, ``inter_token`` and ``e2e``.
        computed: Functions of an engine that compute gauges, by the name in ``row.Computed``,
            besides those of ``metrics/computed_gauges.py``.
        availability_counts: Reads how an engine's requests ended; it returns ``None`` where the
            engine does not report that.
        update_service: Computes an engine's ``sidestep_service_*`` from its other counters.
        kv_capacity: Reads the tokens that fit into the KV cache, for engines without a series for it; it
            returns ``None`` where the engine does not report that.
    """

    name: str
    title: str
    rows: tuple[Row, ...]
    common_rows: tuple[Row, ...] = ()
    structs: tuple[type[msgspec.Struct], ...] = ()
    has_own_namespace: bool = False
    bare_counters: str = ""
    part_labels: frozenset[str] = frozenset()
    polled: type[Polled] | None = None
    parallel_samples: tuple[str, ...] = ()
    key_series: KeySeries = KeySeries()
    recorded: tuple[Series, ...] = ()
    feature_options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needed_by: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    latencies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The arguments are engines, which belong to a package above this one.
    computed: Mapping[str, Callable[[Any], float | None]] = dataclasses.field(default_factory=dict)
    availability_counts: Callable[[Any], AvailabilityCounts | None] | None = None
    update_service: Callable[[Any], None] | None = None
    kv_capacity: Callable[[Any], float | None] | None = None

    @property
    def has_requests(self) -> bool:
        """True if engines of the dialect may send raw request events."""
        return bool(self.parallel_samples)

    def is_part(self, labels: Collection[str]) -> bool:
        """Return whether an engine with these labels is part of another engine."""
        return bool(self.part_labels) and self.part_labels <= set(labels)

    def rows_for(self, *, legacy: bool = False, common: bool = False) -> tuple[Row, ...]:
        """Return the rows; hidden ones only with ``legacy``, common names only with ``common``.

        Raises:
            CatalogueError: A row contradicts itself or another row.
        """
        rows = self.rows + (self.common_rows if common else ())
        shown = tuple(row for row in rows if legacy or row.status != "hidden")
        return check(shown, self.bare_counters)
