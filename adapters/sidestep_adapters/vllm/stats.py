"""Translation of vLLM's stats objects; needs no vLLM itself.

``plugin`` wraps this in the class that vLLM loads; replayed recordings use the same code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import msgspec

from sidestep.engines.vllm.wire import (
    CacheStats,
    FrontEndLatencies,
    SchedulerStats,
    VllmRejection,
    VllmSleep,
    VllmStep,
    run_of,
)
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.limits import MAX_OBSERVATIONS, MAX_STRUCTS, printable
from sidestep.protocol.self_described import Samples
from sidestep_adapters.publisher.field_check import FieldCheck, Fields
from sidestep_adapters.publisher.translate import item_parts, to_wire
from sidestep_adapters.vllm.connectors import families
from sidestep_adapters.vllm.ownership import (
    Role,
    front_end_latencies,
    front_end_part,
    has_front_end_part,
    is_owned,
)

_LOOKED_UP = "requests", "queries", "hits"

FIELDS = Fields(
    parts={"scheduler": SchedulerStats, "iteration": IterationStats, "mm_cache": CacheStats},
    since={
        "scheduler.kv_cache_eviction_events": "0.12",
        "scheduler.cudagraph_stats": "0.13",
        "iteration.finished_requests.num_cached_tokens": "0.13",
        "scheduler.perf_stats": "0.14",
        "iteration.prompt_token_stats": "0.16",
        "scheduler.num_skipped_waiting_reqs": "0.20",
        "scheduler.spec_decoding_stats.num_draft_tokens_per_pos": "0.25",
        "scheduler.iteration_details": "0.26",
        "iteration.finished_requests.num_preemptions": "0.31",
        "scheduler.num_kv_fetch_reqs_by_stage": "0.32",
        "scheduler.connector_prefix_cache_stats.hits_by_source": "0.32",
        "iteration.num_watermarked_reqs": "0.32",
        "iteration.num_watermark_skipped_reqs": "0.32",
        "iteration.num_not_watermarked_reqs": "0.32",
    },
    # The total of prompt tokens is in the stats by source as well.
    substitutes={"iteration.num_prompt_tokens": "prompt_token_stats"},
    unread={
        # Made here.
        "scheduler.diffusion_stats",
        "iteration.inter_token_latencies_iter_runs",
        # Of other caches than the external one.
        "scheduler.prefix_cache_stats.hits_by_source",
        "mm_cache.hits_by_source",
        *(f"mm_cache.preempted_{name}" for name in _LOOKED_UP),
    },
    # In earlier releases the other waiting requests include these.
    implied={"scheduler.num_skipped_waiting_reqs"},
)
"""If a field appeared between two releases that were compared, the later one stands here."""

LISTS = {
    "iteration": {
        "inter_token_latencies_iter": MAX_OBSERVATIONS,
        "time_to_first_tokens_iter": MAX_OBSERVATIONS,
        "max_num_generation_tokens_iter": MAX_OBSERVATIONS,
        "n_params_iter": MAX_OBSERVATIONS,
        "finished_requests": MAX_STRUCTS,
    },
    "scheduler": {"kv_cache_eviction_events": MAX_STRUCTS},
    "front_end": {
        "time_to_first_tokens": MAX_OBSERVATIONS,
        "e2e_latencies": MAX_OBSERVATIONS,
        "queue_times": MAX_OBSERVATIONS,
    },
}
"""Lists of a step that may exceed an item's limits; ``split`` divides them among several items."""
GAUGES = (
    "num_running_reqs",
    "num_waiting_reqs",
    "num_skipped_waiting_reqs",
    "num_kv_fetch_reqs_by_stage",
    "kv_cache_usage",
    "waiting_lora_adapters",
    "running_lora_adapters",
)
_LIST_NAMES = frozenset(name for lists in LISTS.values() for name in lists)
CHECKED = 64
"""Of so many first records, and of every so many later, all fields are looked for."""
_monotonic = time.monotonic


class VllmTap:
    """Recorder of one process's stats objects. It pushes them and never raises.

    Args:
        push: ``Publisher.push``; takes an item that owns its values, or a function.
        fail: Called inside ``except`` with a description of the problem.
        engines: vLLM's engine indexes, in the order of the Hello.
        role: The process's role, which decides the fields that it sends.
        connector: Class name of the KV connector, or empty.
        diffusion: Whether the model is a diffusion model.
        missing: Called in the publisher thread, for each kind of object that lacks fields in this
            release of vLLM, with the engine's info that names all of them.
    """

    def __init__(
        self,
        push: Callable[[Any], None],
        fail: Callable[[str], None],
        engines: Sequence[int],
        *,
        role: Role = "alone",
        connector: str = "",
        diffusion: bool = False,
        missing: Callable[[Mapping[str, dict[str, str]]], None] | None = None,
    ) -> None:
        self._push = push
        self._fail = fail
        self._index = {engine: index for index, engine in enumerate(engines)}
        self._role = role
        self._connector = connector
        self._diffusion = diffusion
        self._sleep = 0, 0
        self._last_stats: dict[int, tuple[float, SchedulerStats]] = {}
        self._info_items: dict[tuple[int, str], Samples] = {}
        self._fields: FieldCheck | None = None
        self._records = 0
        if missing is not None:
            self._fields = FieldCheck("vllm", FIELDS, missing, partial(is_owned, role))

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Record one engine step, with the arguments of vLLM's stat loggers, on the serving event loop."""
        try:
            if self._role == "front_end":
                scheduler_stats = None
                if not has_front_end_part(iteration_stats):
                    iteration_stats = None
                if mm_cache_stats is None and iteration_stats is None:
                    return
            index = self._index[engine_idx]
            stamp = _monotonic()
            # Translating here would cost 8 us (hot) to 30 (after 5 ms of other work).
            self._push(
                partial(
                    self._items,
                    index,
                    stamp,
                    None if scheduler_stats is None else _capture(scheduler_stats),
                    None if iteration_stats is None else _capture(iteration_stats),
                    None if mm_cache_stats is None else _capture(mm_cache_stats),
                )
            )
            payload = getattr(scheduler_stats, "kv_connector_stats", None)
            if payload:
                # vLLM keeps extending these lists: this is the fastest copy there is
                # (0.2-4 us), and the publisher thread makes families of it (12-130 us).
                copy = msgspec.msgpack.encode(payload)
                self._push(partial(self._connector_items, index, stamp, copy))
        except Exception:  # noqa: BLE001 - an exception here stops the engine from serving
            self._fail("a record could not be translated")

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Record that all engines of this front end fall asleep or wake up."""
        try:
            # Anyone who may put the engines to sleep chooses the level: one without a name is 0.
            self._sleep = int(sleep), int(level) if level in (1, 2) else 0
            for index in self._index.values():
                self._push(VllmSleep(index, time.monotonic(), *self._sleep))
        except Exception:  # noqa: BLE001 - as above
            self._fail("a sleep state could not be translated")

    def record_admission_rejection(self, reason: str) -> None:
        """Record a rejected request; vLLM does not report for which engine."""
        try:
            self._push(VllmRejection(0, time.monotonic(), printable(reason)))
        except Exception:  # noqa: BLE001 - as above
            self._fail("a rejection could not be translated")

    def _items(
        self, engine: int, stamp: float, scheduler: Any, iteration: Any, mm_cache: Any
    ) -> list[VllmStep]:
        """Return the items of a record; runs in the publisher thread."""
        state, output, cache = _rebuild(scheduler), _rebuild(iteration), _rebuild(mm_cache)
        self._records += 1
        is_checked = self._records <= CHECKED or not self._records % CHECKED
        if is_checked and self._fields is not None:
            self._fields.check(scheduler=state, iteration=output, mm_cache=cache)
        latencies = None
        if self._role == "front_end":
            latencies = front_end_latencies(output)
            output = front_end_part(output)
        record = SimpleNamespace(
            engine=engine,
            stamp=stamp,
            wall=time.time(),
            scheduler=state,
            iteration=output,
            mm_cache=cache,
            front_end=latencies,
        )
        # Found first, so that nothing reads the hundreds of values one by one.
        run = run_of(getattr(output, "inter_token_latencies_iter", None))
        if run is not None and iteration is not None and output is not iteration[0]:
            output.inter_token_latencies_iter = ()
        else:
            run = None
        step, dropped = to_wire(record, VllmStep, untruncated=_LIST_NAMES)
        if dropped:
            self._fail(f"{dropped} values of a record were left out")
        stats = step.scheduler
        if self._role == "core" and stats is not None:
            # vLLM may attach them before or after the record arrives here.
            stats.iteration_details = None
        if self._diffusion and stats is not None:
            # vLLM keeps a diffusion model's numbers in its struct of speculative decoding.
            stats.diffusion_stats, stats.spec_decoding_stats = stats.spec_decoding_stats, None
        if run is not None and step.iteration is not None:
            step.iteration.inter_token_latencies_iter_runs = [run]
        if stats is not None:
            self._last_stats[engine] = (stamp, stats)
        return split(step)

    def _connector_items(self, engine: int, stamp: float, payload: bytes) -> list[Samples]:
        """Return the items of a KV connector, one per family, so that a rejected one affects no other."""
        items = [
            Samples(engine, stamp, [msgspec.structs.replace(family, samples=part)])
            for family in families(msgspec.msgpack.decode(payload), self._connector)
            for part in item_parts(family.samples)
        ]
        self._info_items.update(
            {(engine, i.families[0].name): i for i in items if i.families[0].name.endswith("_info")}
        )
        return items

    def current_state(self) -> list[VllmStep | VllmSleep | Samples]:
        """Return the last gauge values, for an exporter that did not receive them.

        Runs in the publisher thread. An idle engine sends nothing, and some values are sent once.
        """
        now = time.time()
        steps = [
            VllmStep(engine, stamp, now, gauges_of(stats))
            for engine, (stamp, stats) in list(self._last_stats.items())
        ]
        if self._role == "core":
            # The core is not notified of sleep states.
            return [*steps, *list(self._info_items.values())]
        sleep, level = self._sleep
        asleep = [VllmSleep(i, time.monotonic(), sleep, level) for i in self._index.values()]
        return [*steps, *asleep, *list(self._info_items.values())]


def gauges_of(stats: SchedulerStats) -> SchedulerStats:
    """Return the scheduler's state without the counts since the previous step."""
    return SchedulerStats(**{name: getattr(stats, name) for name in GAUGES})


_numbers: dict[type, tuple[tuple[str, ...], Callable[[Any], Any]]] = {}
"""By class of stats: the names of its numeric attributes, and a function that reads them."""


Captured = tuple[Any, tuple[str, ...], Any]


def _capture(source: Any) -> Captured:
    """Return ``source`` with a copy of its numbers, for the publisher thread.

    Lists and nested structs are referenced: vLLM makes them, and the object, for one step (the
    scheduler's are decoded from a message) and does not change them afterwards, as of 0.32.
    The caller copies what vLLM does change, a KV connector's payload.
    """
    try:
        names, read = _numbers[source.__class__]
        return source, names, read(source)
    except (KeyError, AttributeError):
        # The first object of its class, or one with other attributes than the first.
        names, read = _numbers[source.__class__] = _find_numbers(source)
        return source, names, read(source)


def _find_numbers(source: Any) -> tuple[tuple[str, ...], Callable[[Any], Any]]:
    found = getattr(source, "__dict__", {})
    names = tuple(n for n, v in found.items() if isinstance(v, int | float))
    # Two of them, so that the reader always makes a tuple.
    names = (*names, *names[:1]) if len(names) == 1 else names
    return names, attrgetter(*names) if names else lambda _: ()


def _rebuild(captured: Captured | None) -> Any:
    """Return a new object with the values that ``_capture`` copied."""
    if captured is None:
        return None
    source, names, numbers = captured
    if not hasattr(source, "__dict__"):
        return source
    kind = source.__class__
    made = kind.__new__(kind)
    attributes = made.__dict__
    attributes.update(source.__dict__)
    attributes.update(zip(names, numbers, strict=True))
    return made


def split(step: VllmStep) -> list[VllmStep]:
    """Return ``step`` as items within the wire's limits; all but the first have observations only."""
    steps = [step]
    for part, lists in LISTS.items():
        owner = getattr(step, part)
        if owner is None:
            continue
        for name, limit in lists.items():
            values = getattr(owner, name)
            for start in range(limit, len(values), limit):
                rest = VllmStep(step.engine, step.stamp, step.wall, more=True)
                rest.scheduler, rest.iteration = SchedulerStats(), IterationStats()
                if step.front_end is not None:
                    rest.front_end = FrontEndLatencies(step.front_end.iteration_timestamp)
                setattr(getattr(rest, part), name, values[start : start + limit])
                steps.append(rest)
            if len(values) > limit:
                setattr(owner, name, values[:limit])
    return steps
