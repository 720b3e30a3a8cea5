"""SGLang's metric collectors with our ears: classes derived from its own.

What they are told is noted, and made items of in the publisher's thread. SGLang's processes
are sent such classes by name, and find them here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from sidestep_adapters.publisher.environment import endpoint, mode, namespace, usable_endpoint
from sidestep_adapters.sglang.collectors import Process, StatsSource, wrap
from sidestep_adapters.sglang.deferred_metrics import Notes
from sidestep_adapters.sglang.metric_stubs import Child, Meter
from sidestep_adapters.sglang.readers import OwnFamilies, Queues

log = logging.getLogger(__name__)

COLLECTORS = "sglang.srt.observability.metrics_collector"
CLASSES = {
    "scheduler": "SchedulerMetricsCollector",
    "tokenizer": "TokenizerMetricsCollector",
    "radix_cache": "RadixCacheMetricsCollector",
    "storage": "StorageMetricsCollector",
}
"""SGLang's collectors by the role under which it looks for others in their place. That of
expert dispatch is not among them: SGLang counts inside its metric, which is read instead."""
RANKS = ("dp_rank", "pp_rank", "tp_rank")

_process: Process | None = None
_classes: dict[tuple[str, type], type] = {}


def process() -> Process | None:
    """This process's, made when it is asked for first; None without an endpoint."""
    global _process  # noqa: PLW0603 - one a process
    if _process is None and usable_endpoint():
        beside = mode("SIDESTEP_SGLANG_MODE") == "beside"
        _process = Process(endpoint(), namespace(), beside=beside)
        _process.read(OwnFamilies(_process))
    return _process


def taps(collectors: ModuleType) -> dict[str, type]:
    """What to have in place of the classes of SGLang's module, as far as a release has them."""
    return {
        name: tapped(getattr(collectors, name), role)
        for role, name in CLASSES.items()
        if hasattr(collectors, name)
    }


def tapped(cls: type, role: str) -> type:
    """``cls`` with our ears; itself, where it has them."""
    if (role, cls) not in _classes:
        if hasattr(cls, "sidestep"):
            return cls
        make = {"scheduler": _scheduler, "tokenizer": _tokenizer}.get(role)
        made = _plain(cls, role) if make is None else make(cls)
        _classes[role, cls] = _classes[role, made] = _named(made, cls)
    return _classes[role, cls]


def _named(made: type, cls: type) -> type:
    """Found here by its name: SGLang sends classes of ``stat_loggers`` to its processes."""
    made.__module__, made.__qualname__ = __name__, f"Sidestep{cls.__name__}"
    made.__name__ = made.__qualname__
    return made


def __getattr__(name: str) -> Any:
    """A class of ``taps``, in a process that was sent it by name."""
    for original in CLASSES.values():
        if name == f"Sidestep{original}":
            return taps(importlib.import_module(COLLECTORS))[original]
    raise AttributeError(name)


class SchedulerTap:
    """What a scheduler's collector holds of ours."""

    def __init__(self, process: Process, collector: Any) -> None:
        made = wrap(process, collector, "scheduler")
        self._process = process
        self.stats: StatsSource = process.stats(collector, "scheduler")
        self._queues: Queues | None = None
        self._labels = collector.labels
        self._gauges = (
            {} if process.beside else {n: m for n, m in made.items() if m.kind == "gauge"}
        )
        ranks = ".".join(
            f"{name.removesuffix('_rank')}{collector.labels[name]}"
            for name in RANKS
            if name in collector.labels
        )
        process.start(f"sglang/scheduler/{ranks}")

    def reports(self, collector: Any) -> Callable[[Any], None]:
        """What is called with each report, on the scheduler's loop, in ``log_stats``' place."""
        note, failed, clock = self.stats.note, self._process.notes, time.perf_counter
        others: list[tuple[str, Child]] | None = None

        def log_stats(stats: Any) -> None:
            nonlocal others
            # Without it an idle scheduler reports on every turn of its loop.
            collector.last_log_time = clock()
            try:
                note(stats)
                if others is None:
                    others = self._unknown(stats)
                for name, child in others:
                    value = getattr(stats, name)
                    if value is not None:
                        child.set(getattr(value, "total", value))
            except Exception:  # noqa: BLE001 - nothing here may ever reach the engine
                failed.fail("a report could not be noted")

        return log_stats

    def _unknown(self, stats: Any) -> list[tuple[str, Child]]:
        """Fields that no catalogue knows, of other releases: each has a gauge of its name."""
        return [
            (name, meter.labels(**self._labels))
            for name, meter in self._gauges.items()
            if hasattr(stats, name)
        ]

    def iterated(self, reporter: Any) -> None:
        """On the scheduler's loop: the queues' lengths, two attributes and two lengths."""
        try:
            if self._queues is None:
                self._queues = Queues(reporter, self.stats)
                self._process.read(self._queues)
            self._queues()
        except Exception:  # noqa: BLE001 - SGLang does not catch what a hook raises
            self._process.notes.fail("the queues' lengths could not be read")


def _scheduler(cls: type) -> type:
    class Scheduler(cls):  # type: ignore[misc]
        sidestep: SchedulerTap | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            tap = self.sidestep = _adopted(functools.partial(SchedulerTap, collector=self))
            if tap is None:
                return
            ours = tap.reports(self)
            self.log_stats = _both(ours, super().log_stats) if _is_beside() else ours

    return Scheduler


def _both(ours: Callable[..., None], theirs: Callable[..., None]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        ours(*args, **kwargs)
        theirs(*args, **kwargs)

    return call


class TokenizerTap:
    """What a tokenizer's collector holds of ours."""

    def __init__(self, process: Process, collector: Any, arguments: Any) -> None:
        native = vars(collector).get("histogram_inter_token_latency")
        made = wrap(process, collector, "tokenizer")
        self.observe = latencies(made["histogram_inter_token_latency"], process.notes)
        if process.beside:
            # It is told by one call below, and has a fast way of its own to count.
            collector.histogram_inter_token_latency = native
        process.start(stream_of("tokenizer", serving(arguments)[1]))


def latencies(meter: Meter, notes: Notes) -> Callable[[dict[str, Any], float, int], None]:
    """What takes each output of a request but its first: the hottest of all calls."""
    queue = notes.queue
    append = queue.append
    has_own = bool(meter.own)

    def observe(labels: dict[str, Any], internval: float, num_new_tokens: int) -> None:
        if num_new_tokens > 0:
            # As ``Notes.of`` does, without a call more.
            if len(queue) < notes.limit:
                key = labels if has_own else ()
                append((meter, key, internval / num_new_tokens, num_new_tokens))
            else:
                notes.lost += 1

    return observe


def _tokenizer(cls: type) -> type:
    class Tokenizer(cls):  # type: ignore[misc]
        sidestep: TokenizerTap | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            arguments = kwargs.get("server_args") or next(iter(args), None)
            tap = self.sidestep = _adopted(
                functools.partial(TokenizerTap, collector=self, arguments=arguments)
            )
            if tap is None:
                return
            native = super().observe_inter_token_latency
            self.observe_inter_token_latency = (
                _both(tap.observe, native) if _is_beside() else tap.observe
            )

    return Tokenizer


def _plain(cls: type, role: str) -> type:
    class Plain(cls):  # type: ignore[misc]
        sidestep: Any = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.sidestep = _adopted(functools.partial(wrap, collector=self, role=role))

    return Plain


def _adopted(make: functools.partial[Any]) -> Any:
    """What ``make`` makes for this process; None where it cannot, and SGLang counts alone."""
    attributes = vars(make.keywords["collector"])
    before = attributes.copy()
    try:
        own = process()
        return None if own is None else make(own)
    except Exception:
        # What was put in the place of its metrics so far counts nothing.
        attributes.clear()
        attributes.update(before)
        log.exception("sidestep: a collector could not be tapped; the engine goes on without it")
        return None


def _is_beside() -> bool:
    return _process is not None and _process.beside


def serving(arguments: Any = None) -> tuple[str, int]:
    """The served model and the number of tokenizers; ``arguments`` are an older release's."""
    try:
        from sglang.srt.runtime_context import get_serving  # noqa: PLC0415 - newer releases'

        known = get_serving()
        return str(known.served_model_name or ""), int(known.tokenizer_worker_num)
    except Exception:  # noqa: BLE001 - an older release, or one that is not ready
        return "", int(getattr(arguments, "tokenizer_worker_num", 1) or 1)


def stream_of(component: str, tokenizers: int) -> str:
    """The process's name; several tokenizers are told apart, though not over restarts."""
    several = component == "tokenizer" and tokenizers > 1
    return f"sglang/{component}/{os.getpid()}" if several else f"sglang/{component}"
