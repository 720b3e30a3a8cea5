"""vLLM's scheduler with a tap: ``--scheduler-cls sidestep_adapters.vllm.scheduler.SidestepScheduler``.

It runs inside the engine core, with any front end, and schedules exactly as the scheduler it
derives from. Without ``SIDESTEP_ENDPOINT`` it is that scheduler.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest

from sidestep.protocol.messages import CORE_INFO
from sidestep.protocol.self_described import Samples
from sidestep_adapters.publisher.cache_lookups import LookupEvents
from sidestep_adapters.publisher.drop_watch import DropWatch
from sidestep_adapters.publisher.environment import endpoint, set_up_log, usable_endpoint
from sidestep_adapters.publisher.process_metrics import ProcessTap, WorkerTaps
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.request_identity import identity_maker
from sidestep_adapters.vllm.description import describe, is_supported, with_cache, with_missing
from sidestep_adapters.vllm.kv_cache import BlockTap, lookup_events
from sidestep_adapters.vllm.limits import NONE, PAUSED, LimitReader
from sidestep_adapters.vllm.ownership import is_tapped
from sidestep_adapters.vllm.scheduler_events import SchedulerEvents
from sidestep_adapters.vllm.scheduler_tap import (
    HeldKv,
    SchedulerProgress,
    SchedulerTap,
    is_paused,
)
from sidestep_adapters.vllm.startup import core_startup
from sidestep_adapters.vllm.stats import VllmTap

log = logging.getLogger(__name__)

Base: Any = object


def _has_suffix() -> bool:
    """Return whether this release adds a random suffix to its clients' request ids."""
    is_new = "external_req_id" in getattr(EngineCoreRequest, "__struct_fields__", ())
    return is_new and os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") in ("", "0")


class _Core:
    """The taps and the publisher of one engine core."""

    def __init__(self, scheduler: Any, *, log_stats: bool) -> None:
        config = scheduler.vllm_config
        description = describe(config, [_rank(config)], core=True, log_stats=log_stats)
        # Some cache fields differ in the front end, whose values the engine's page shows.
        description = with_cache(description, config, CORE_INFO)
        self._description = description
        self._process = ProcessTap("core")
        self._workers = WorkerTaps("VllmWorker-")
        self._startup = core_startup(config)
        self._rank = description.engines[0]
        self._held_stats: list[Any] = []
        events = SchedulerEvents(
            self._fail,
            nan_check="nan_check" in description.features,
            identities=identity_maker(),
            has_suffix=_has_suffix(),
            lookups=self._lookups(scheduler),
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
        pool: Any = getattr(scheduler.kv_cache_manager, "block_pool", None)
        if getattr(pool, "metrics_collector", pool) is None:
            # With --kv-cache-metrics the engine samples blocks itself, at its own rate.
            self._blocks = BlockTap(self._push)
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
        if self._blocks is not None:
            pool.metrics_collector = self._blocks

    def update_finished(self, batch: Any, outputs: Any) -> None:
        """Record the step of ``batch``, whose output the scheduler has processed, and push it."""
        self.requests.update_finished(batch, outputs)
        held, self._held_stats = self._held_stats, []
        for stats in held:
            self.record(stats)
        self.flush_blocks()

    def flush_blocks(self) -> None:
        """Push block events, and sample at the exporter's current rate from now on."""
        if self._blocks is None:
            return
        try:
            self._blocks.flush(self.publisher.kv_sample_rate or 0.0)
        except Exception:  # noqa: BLE001 - an exception here kills the engine
            self._fail("block events could not be pushed")

    def is_paused(self, scheduler: Any) -> bool:
        """Return whether the scheduler is paused and has nothing left to finish."""
        try:
            return is_paused(scheduler)
        except Exception:  # noqa: BLE001 - an exception here kills the engine
            self._fail("the scheduler's pause could not be read")
            return False

    def record(self, stats: Any) -> None:
        """Push scheduler stats; stats made during a step follow the events of that step."""
        if self.requests.is_updating:
            self._held_stats.append(stats)
        else:
            self.stats.record(stats, None, None, self._rank)

    def close(self, *, wait: bool = True) -> None:
        """Send what is left and close the stream; without ``wait`` in the publisher thread."""
        self.requests.close()
        self.flush_blocks()
        self.publisher.close(wait=wait)

    def close_with(self, manager: Any) -> None:
        """Start closing when vLLM clears its manager of structured output.

        An engine that ends does this first, and shuts its scheduler down last. In between it waits for
        its workers, as long as its front end waits before it kills this process.
        """
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

    def _lookups(self, scheduler: Any) -> LookupEvents | None:
        try:
            return lookup_events(scheduler, self._lookup_sampling)
        except AttributeError:
            log.debug("this release's prefix cache cannot be read", exc_info=True)
            return None

    def _lookup_sampling(self) -> tuple[bytes, float]:
        return self.publisher.lookup_key, self.publisher.kv_sample_rate or 0.0

    def _push(self, item: Any) -> None:
        self.publisher.push(item)

    def _fail(self, problem: str) -> None:
        self.publisher.fail(problem)


class _Tapped(Base):  # type: ignore[misc]
    """Overrides of the methods that a scheduler's events pass through; each calls the original."""

    _core: _Core | None = None
    _log_to_front_end = True

    def __init__(self, *args: Any, log_stats: bool = False, **kwargs: Any) -> None:
        set_up_log("vllm")
        has_tap = usable_endpoint() and is_supported()
        # The core always records stats; front ends get them only if they asked for them.
        super().__init__(*args, log_stats=log_stats or has_tap, **kwargs)
        self._log_to_front_end = log_stats
        if not has_tap:
            return
        if log_stats and not is_tapped(self.vllm_config):
            log.error(
                "sidestep: the scheduler's tap is off: front ends cannot see it in --scheduler-cls and"
                " would count the same; name a class that derives from SidestepScheduler there"
            )
            return
        try:
            self._core = _Core(self, log_stats=log_stats)
            self._core.close_with(self.structured_output_manager)
        except Exception:
            log.exception(
                "sidestep: the scheduler tap could not start; the scheduler runs without it"
            )

    def add_request(self, request: Any) -> None:
        """Add a request, or more input to a known one."""
        known = request.request_id in self.requests
        if self._core is not None and known and not getattr(request, "resumable", True):
            self._core.requests.session_closed(request.request_id)
        super().add_request(request)
        if self._core is not None and known:
            # A session that still answers its last input ends later, for a reason of its own.
            self._core.requests.session_closed("")
        if self._core is not None and not known:
            self._core.requests.queued(request)
            if self._core.is_paused(self):
                # No step follows that would say so.
                self._core.requests.limited(PAUSED)

    def set_pause_state(self, *args: Any, **kwargs: Any) -> None:
        """Pause or resume; a paused scheduler is not called, so that no step has its limit."""
        if self._core is None:
            super().set_pause_state(*args, **kwargs)
            return
        before = self._core.is_paused(self)
        super().set_pause_state(*args, **kwargs)
        if self._core.is_paused(self) != before:
            self._core.requests.limited(NONE if before else PAUSED)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule the next batch."""
        core = self._core
        if core is None:
            return super().schedule(*args, **kwargs)
        core.flush_blocks()
        core.limits.started()
        started = core.requests.scheduling_since = time.monotonic()
        output = super().schedule(*args, **kwargs)
        # Its only argument, in newer releases, asks to leave prefills to a later step.
        is_throttled = any(args) or any(kwargs.values())
        limit = core.limits.read(self, output, is_throttled=is_throttled)
        core.requests.scheduled(output, self.requests, started, limit)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Process the output of a batch."""
        core = self._core
        if core is None:
            return super().update_from_output(scheduler_output, *args, **kwargs)
        core.requests.update_started()
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)
        core.update_finished(scheduler_output, outputs)
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Empty the cache and flush block events; an idle engine has no step that would flush them."""
        result = super().reset_prefix_cache(*args, **kwargs)
        if self._core is not None:
            if result is not False:
                self._core.requests.cache_cleared()
                self._core.requests.flush()
            self._core.flush_blocks()
        return result

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Return the scheduler's stats, and record them."""
        stats = super().make_stats(*args, **kwargs)
        if self._core is not None and stats is not None:
            self._core.record(stats)
        return stats if self._log_to_front_end else None

    def _preempt_request(self, request: Any, timestamp: float, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, timestamp, *args, **kwargs)
        if self._core is not None:
            self._core.limits.preempted(request)
            self._core.requests.preempted(request.request_id, timestamp)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = super()._free_request(request, *args, **kwargs)
        if self._core is not None:
            self._core.limits.left(request)
            self._core.requests.freed(request)
        return result

    def _set_kv_fetch_stage(self, request: Any, stage: Any, *args: Any, **kwargs: Any) -> None:
        super()._set_kv_fetch_stage(request, stage, *args, **kwargs)
        if self._core is not None:
            self._core.requests.fetching(request.request_id, stage)

    def _update_request_as_session(self, session: Any, *args: Any, **kwargs: Any) -> None:
        super()._update_request_as_session(session, *args, **kwargs)
        if self._core is not None:
            self._core.requests.queued(session)

    def shutdown(self) -> None:
        """Shut down, send what is left and close the stream."""
        super().shutdown()
        if self._core is not None:
            self._core.close()


class SidestepScheduler:
    """The tapped form of the scheduler class that vLLM would select."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of a class that derives from vLLM's own."""
        return tapped(_chosen(vllm_config))(vllm_config, *args, **kwargs)


@functools.cache
def tapped(scheduler: type[Scheduler]) -> Any:
    """Return a subclass of ``scheduler`` with a tap."""
    return type(f"Sidestep{scheduler.__name__}", (_Tapped, scheduler), {"__module__": __name__})


def _chosen(config: Any) -> Any:
    """Return the class that ``get_scheduler_cls`` would select without ``--scheduler-cls``."""
    asynchronous = bool(getattr(config.scheduler_config, "async_scheduling", False))
    if getattr(config, "diffusion_config", None) is not None:
        from vllm.v1.core.sched import diffusion_scheduler  # noqa: PLC0415 - only some releases

        name = "DiffusionAsyncScheduler" if asynchronous else "DiffusionScheduler"
        return getattr(diffusion_scheduler, name)
    if asynchronous:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: PLC0415 - as above

        return AsyncScheduler
    return Scheduler


def _rank(config: Any) -> int:
    """Return the engine's number among all of the deployment; a label of its series."""
    parallel = config.parallel_config
    index = getattr(parallel, "data_parallel_index", None)
    return int(parallel.data_parallel_rank if index is None else index)
