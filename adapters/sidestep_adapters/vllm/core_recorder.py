"""The taps of one engine core and their publisher, called by the overrides in ``scheduler``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from sidestep.protocol.messages import CORE_INFO
from sidestep.protocol.self_described import Samples
from sidestep_adapters.publisher.drop_watch import DropWatch
from sidestep_adapters.publisher.environment import endpoint
from sidestep_adapters.publisher.process_metrics import ProcessTap, WorkerTaps
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.request_identity import identity_maker
from sidestep_adapters.vllm.description import describe, with_cache, with_missing
from sidestep_adapters.vllm.kv_cache import BlockTap, lookup_events, unused_collector
from sidestep_adapters.vllm.limits import NONE, PAUSED, LimitReader
from sidestep_adapters.vllm.scheduler_events import SchedulerEvents
from sidestep_adapters.vllm.scheduler_tap import HeldKv, SchedulerProgress, SchedulerTap, is_paused
from sidestep_adapters.vllm.startup import core_startup
from sidestep_adapters.vllm.stats import VllmTap


def _has_suffix() -> bool:
    """Return whether this release adds a random suffix to its clients' request ids."""
    is_new = "external_req_id" in getattr(EngineCoreRequest, "__struct_fields__", ())
    return is_new and os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") in ("", "0")


class CoreRecorder:
    """The taps and the publisher of one engine core."""

    def __init__(self, scheduler: Any, *, log_stats: bool) -> None:
        config = scheduler.vllm_config
        description = describe(config, [_rank(config)], core=True, log_stats=log_stats)
        self._description = description
        self._process = ProcessTap("core")
        self._workers = WorkerTaps("VllmWorker-")
        self._startup = core_startup(config)
        self._rank = description.engines[0]
        self._held_stats: list[Any] = []
        events = SchedulerEvents(
            self._lose,
            nan_check="nan_check" in description.features,
            identities=identity_maker(),
            has_suffix=_has_suffix(),
        )
        self.requests = SchedulerTap(self._push, self._fail, events)
        self.limits = LimitReader(scheduler)
        self._held_kv = HeldKv(scheduler)
        self.stats = VllmTap(
            self._push,
            self._fail,
            description.engines,
            role=description.role,
            connector=description.connector,
            diffusion="diffusion" in description.features,
            missing=self._describe_missing,
        )
        self._blocks: BlockTap | None = None
        # Made last: its thread calls the taps.
        self.publisher = Publisher(
            endpoint(),
            description.core_stream,
            description.engine_infos,
            periodic_items=self._periodic_items,
            current_state=lambda: [
                *self.requests.events.current_state(),
                *self.stats.current_state(),
            ],
            progress=SchedulerProgress(scheduler, self.requests).measure,
        )
        self._drops = DropWatch(self.publisher)
        for step in (self._describe_cache, self._tap_blocks, self._tap_lookups, self._close_with):
            self.note(step, scheduler)

    def note(self, record: Callable[..., Any], *args: Any) -> Any:
        """Call a method; return what it returns, or False if it raises: that would kill the engine."""
        try:
            return record(*args)
        except Exception:  # noqa: BLE001 - as the docstring says
            self._fail(f"the scheduler's call could not be recorded: {record.__name__}")
            return False

    def _describe_cache(self, scheduler: Any) -> None:
        # Some cache fields differ in the front end, whose values the engine's page shows.
        self._description = with_cache(self._description, scheduler.vllm_config, CORE_INFO)
        self.publisher.describe(self._description.engine_infos)

    def _tap_blocks(self, scheduler: Any) -> None:
        pool: Any = getattr(scheduler.kv_cache_manager, "block_pool", None)
        # With --kv-cache-metrics the engine samples blocks itself, at its own rate.
        if getattr(pool, "metrics_collector", pool) is None:
            collector = unused_collector(sys.modules.get("vllm.v1.core.kv_cache_metrics"))
            blocks = BlockTap(self._push, collector)
            # Raises if blocks are not as known: later that would end the engine.
            blocks.on_block_accessed(pool.null_block)
            self._blocks = pool.metrics_collector = blocks

    def _tap_lookups(self, scheduler: Any) -> None:
        self.requests.events.lookups = lookup_events(scheduler, self._lookup_sampling)

    def adding(self, scheduler: Any, request: Any, *_: Any) -> bool:
        """Note that a request or more input of one is added; return whether the request is known."""
        known = request.request_id in scheduler.requests
        if known and not getattr(request, "resumable", True):
            self.requests.session_closed(request.request_id)
        return known

    def added(self, known: bool, _: Any, scheduler: Any, request: Any, *__: Any) -> None:
        """Record a request that was added."""
        if known:
            # A session that still answers its last input ends later, for a reason of its own.
            self.requests.session_closed("")
            return
        self.requests.queued(request)
        if self.is_paused(scheduler):
            # No step follows that would say so.
            self.requests.limited(PAUSED)

    def paused(self, before: bool, _: Any, scheduler: Any, *__: Any) -> None:
        """Record a pause or its end: a paused scheduler is not called, so that no step has its limit."""
        if self.is_paused(scheduler) != before:
            self.requests.limited(NONE if before else PAUSED)

    def updating(self, *_: Any) -> None:
        """Note that the output of a batch is being processed."""
        self.requests.update_started()

    def scheduling(self, *_: Any) -> float:
        """Note that a batch is being scheduled; return when that began."""
        self.flush_blocks()
        self.limits.started()
        started = self.requests.scheduling_since = time.monotonic()
        return started

    def scheduled(self, started: float, batch: Any, scheduler: Any, *arguments: Any) -> None:
        """Record a batch; the only argument, in newer releases, asks to leave prefills to a later step."""
        is_throttled = any(argument is True for argument in arguments)
        limit = self.limits.read(scheduler, batch, is_throttled=is_throttled)
        self.requests.scheduled(batch, scheduler.requests, started, limit)

    def updated(self, _: Any, outputs: Any, __: Any, batch: Any, *___: Any) -> None:
        """Record the step of ``batch``, whose output the scheduler has processed, and push it."""
        self.requests.update_finished(batch, outputs)
        held, self._held_stats = self._held_stats, []
        for stats in held:
            self.record(stats)
        self.flush_blocks()

    def preempted(self, *call: Any) -> None:
        """Record a preempted request."""
        request, stamp, *_ = *call[3:], None
        stamp = stamp if isinstance(stamp, float) else time.monotonic()
        self.requests.preempted(request.request_id, stamp)
        self.limits.preempted(request)

    def freed(self, *call: Any) -> None:
        """Record the end of a request."""
        self.requests.freed(call[3])
        self.limits.left(call[3])

    def fetching(self, *call: Any) -> None:
        """Record the stage of a request's KV from another engine."""
        self.requests.fetching(call[3].request_id, call[4])

    def continued(self, *call: Any) -> None:
        """Record a session that continues with its next input."""
        self.requests.queued(call[3])

    def cleared(self, _: Any, result: Any, *__: Any) -> None:
        """Record that the cache was emptied: an idle engine has no step that would flush the events."""
        if result is not False:
            self.requests.cache_cleared()
            self.requests.flush()
        self.flush_blocks()

    def flush_blocks(self) -> None:
        """Push block events, and sample at the exporter's current rate from now on."""
        if self._blocks is not None:
            self.note(BlockTap.flush, self._blocks, self.publisher.kv_sample_rate or 0.0)

    def is_paused(self, scheduler: Any, *_: Any) -> bool:
        """Return whether the scheduler is paused and has nothing left to finish."""
        return bool(self.note(is_paused, scheduler))

    def record(self, stats: Any) -> None:
        """Push scheduler stats; stats made during a step follow the events of that step."""
        if self.requests.is_updating:
            self._held_stats.append(stats)
        else:
            self.stats.record(stats, None, None, self._rank)

    def shut_down(self, *_: Any) -> None:
        """Close when the scheduler is shut down."""
        self.close()

    def close(self, *, wait: bool = True) -> None:
        """Send what is left and close the stream; without ``wait`` in the publisher thread."""
        self.requests.close()
        self.flush_blocks()
        self.publisher.close(wait=wait)

    def _close_with(self, scheduler: Any) -> None:
        """Start closing when vLLM clears its manager of structured output.

        An engine that ends does this first, and shuts its scheduler down last. In between it waits for
        its workers, as long as its front end waits before it kills this process.
        """
        manager = scheduler.structured_output_manager
        clear = getattr(manager, "clear_backend", None)
        if clear is None:
            return

        def clear_backend(*args: Any, **kwargs: Any) -> Any:
            self.close(wait=False)
            return clear(*args, **kwargs)

        manager.clear_backend = clear_backend

    def _periodic_items(self) -> list[Any]:
        """Return items about once a second, in the publisher thread."""
        more = [self.requests.tick(time.monotonic(), time.time())]
        if self._drops.have_ended():
            more = self.requests.events.resync()
            if self._blocks is not None:
                self._blocks.resample = True
        now = time.monotonic()
        usage = [self._process.families(), *self._workers.families(), self._startup]
        usage.append(self._held_families())
        return [*(Samples(0, now, families) for families in usage if families), *more]

    def _held_families(self) -> list[Any]:
        try:
            return self._held_kv.families()
        except Exception:  # noqa: BLE001 - the engine's thread may free blocks meanwhile
            self._fail("KV held for other engines could not be read")
            return []

    def _describe_missing(self, fields: Mapping[str, dict[str, str]]) -> None:
        self._description = with_missing(self._description, fields, CORE_INFO)
        self.publisher.describe(self._description.engine_infos)

    def _lookup_sampling(self) -> tuple[bytes, float]:
        return self.publisher.lookup_key, self.publisher.kv_sample_rate or 0.0

    def _push(self, item: Any) -> None:
        self.publisher.push(item)

    def _fail(self, problem: str) -> None:
        self.publisher.fail(problem)

    def _lose(self, problem: str) -> None:
        self.publisher.lose(problem)


def _rank(config: Any) -> int:
    """Return the engine's number among all of the deployment; a label of its series."""
    parallel = config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    return int(parallel.data_parallel_rank if index is None else index)
