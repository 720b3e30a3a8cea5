"""Recording of the stats that SGLang's scheduler reports; needs no SGLang itself."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from sidestep.engines.items import Item
from sidestep.engines.sglang.rows import QUEUES
from sidestep.engines.sglang.wire import SglangSchedulerStats, SglangStats
from sidestep_adapters.publisher.field_check import FieldCheck, Fields
from sidestep_adapters.publisher.translate import to_wire
from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics, MetricSource

RENAMED_FIELDS = {"num_prefill_prealloc_queue_reqs": "num_prefill_bootstrap_queue_reqs"}
"""Fields of the stats that have other names in older releases."""
_TOKENS = "available", "evictable", "used"
_SINCE = {
    "0.5.12": [
        *(f"{pool}_{kind}_tokens" for pool in ("kv", "swa", "mamba") for kind in _TOKENS),
        "fwd_occupancy",
        "num_streaming_sessions",
        "streaming_session_held_tokens",
    ],
    "0.5.15": ["spec_num_steps", "spec_num_draft_tokens"],
    "0.5.18": ["spec_cap_length", "spec_block_accept_length"],
    "0.5.23": [
        "num_decode_host_receive_queue_reqs",
        "num_decode_deferred_kv_release_reqs",
        "prealloc_full_token_usage",
        "prealloc_swa_token_usage",
        "hicache_host_mamba_used_states",
        "hicache_host_mamba_total_states",
    ],
}
FIELDS = Fields(
    parts={"stats": SglangSchedulerStats},
    since={f"stats.{name}": release for release, names in _SINCE.items() for name in names},
    unread={"stats.max_running_requests"},
)
"""The fields of a report since 0.5.11; where one came between two compared releases, the later counts."""
IDLE_VALUES = {
    "decode_sum_seq_lens": 0,
    "gen_throughput": 0.0,
    "num_retracted_reqs": 0,
    "num_paused_reqs": 0,
}
"""Values while no request runs or waits; SGLang keeps exposing those of its last report."""


class StatsRecorder(MetricSource):
    """Recorder of the scheduler's stats, one object that SGLang changes and passes repeatedly.

    A recorded value is a dictionary of fields, or the numbers of running and waiting requests after
    an iteration without a report. ``missing`` is called as that of ``VllmTap``.
    """

    def __init__(
        self,
        deferred: DeferredMetrics,
        engine: int,
        missing: Callable[[Mapping[str, dict[str, str]]], None] = lambda _: None,
    ) -> None:
        super().__init__(deferred, engine)
        self._fields: dict[str, Any] = {}
        self._lengths: tuple[int, int] | None = None
        """The numbers of requests that were recorded after the last report."""
        self._check = FieldCheck("sglang", FIELDS, missing)

    def record_report(self, stats: Any) -> None:
        """Record a report's current fields, on the scheduler's loop.

        Lists and queue counts are referenced: SGLang makes new ones for each report.
        """
        self._lengths = None
        known = getattr(stats, "__dict__", None)
        if known is None:
            names = SglangSchedulerStats.__struct_fields__
            known = {name: getattr(stats, name) for name in names if hasattr(stats, name)}
            if not known:
                raise TypeError(type(stats).__name__)
        self.record((), known.copy(), 1)

    def record_lengths(self, running: int, waiting: int) -> None:
        """Record the numbers of requests after an iteration if they differ, on the scheduler's loop."""
        lengths = running, waiting
        if lengths != self._lengths:
            self._lengths = lengths
            self.record((), lengths, 1)

    def add(self, key: Any, value: Any, weight: int) -> None:  # noqa: ARG002 - there is one child
        """Add a recorded report; the newest value of each field counts."""
        if isinstance(value, dict):
            for former, current in RENAMED_FIELDS.items():
                if former in value and current not in value:
                    value[current] = value.pop(former)
            self._fields.update(value)
            for name in QUEUES:
                # Older releases have the total only, as a number.
                if isinstance(self._fields.get(name), int):
                    self._fields[name] = _queue_count(self._fields[name])
            if len(value) > 1:
                # Not only the limit, which is known before the first report.
                self._check.check(stats=SimpleNamespace(**self._fields))
            return
        if not self._fields:
            # The other fields are unknown before the first report.
            return
        running, waiting = value
        self._fields["num_running_reqs"] = _queue_count(running)
        self._fields["num_queue_reqs"] = _queue_count(waiting)

    def items(self, now: float) -> list[Item]:
        """Return the stats as one item."""
        if not self._fields:
            return []
        fields = {name: _without_nan(value) for name, value in self._fields.items()}
        if not (_total(fields, "num_running_reqs") or _total(fields, "num_queue_reqs")):
            fields.update((name, zero) for name, zero in IDLE_VALUES.items() if name in fields)
        if not fields.get("hicache_host_mamba_total_states"):
            fields["hicache_host_mamba_total_states"] = None
            fields["hicache_host_mamba_used_states"] = None
        stats, dropped = to_wire(SimpleNamespace(**fields), SglangSchedulerStats)
        for _ in range(dropped):
            self._deferred.fail("a value of the scheduler's stats was left out")
        return [SglangStats(self._engine, now, time.time(), stats)]

    current_state = items
    """Each item has the last value of all gauges."""


class QueueLengths:
    """Reader of how many requests a scheduler runs and has waiting, from its own lists.

    SGLang's reports of both lag behind: by 40 iterations while decoding, by up to 30 seconds
    while idle, without limit while other ranks have work. The limit of running requests is
    recorded once.
    """

    def __init__(self, reporter: Any, stats: StatsRecorder) -> None:
        # In older releases the scheduler reports itself.
        own = getattr(reporter, "scheduler", reporter)
        self._scheduler = weakref.ref(own)
        self._record = stats.record_lengths
        # Counts by priority would need a walk through the lists, and a prefill node's
        # running batch is never filled: there only the reports are used.
        mode = getattr(own, "disaggregation_mode", None)
        prefill = str(getattr(mode, "value", mode)).lower() == "prefill"
        by_priority = bool(getattr(own, "enable_priority_scheduling", False))
        self._enabled = not (prefill or by_priority)
        slots = getattr(own, "max_running_requests", None)
        if slots is not None:
            stats.record((), {"max_running_requests": slots}, 1)

    def __call__(self) -> None:
        """Record both lengths; runs on the scheduler's loop, too."""
        scheduler = self._scheduler()
        if self._enabled and scheduler is not None:
            self._record(len(scheduler.running_batch.reqs), len(scheduler.waiting_queue))


def _queue_count(total: int) -> Any:
    return SimpleNamespace(total=total, by_priority=None)


def _without_nan(value: Any) -> Any:
    """Return None for NaN, which SGLang uses for values that were never measured."""
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124 - NaN


def _total(fields: Mapping[str, Any], name: str) -> int:
    return int(getattr(fields.get(name), "total", 0) or 0)
