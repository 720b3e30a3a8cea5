"""The stat logger that vLLM loads through the entry-point group ``vllm.stat_logger_plugins``.

Without ``SIDESTEP_ENDPOINT`` it does nothing: no socket, no thread.
``SIDESTEP_VLLM_MODE`` is ``beside`` (vLLM's own metrics stay) or ``instead``
(vLLM keeps none: it takes any PrometheusStatLogger subclass as its replacement).
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.metrics import loggers

from sidestep.protocol.limits import printable
from sidestep.protocol.messages import REQUEST_EVENTS
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep_adapters.publisher.drop_watch import DropWatch
from sidestep_adapters.publisher.environment import (
    MODES,
    choice,
    endpoint,
    set_up_log,
    usable_endpoint,
)
from sidestep_adapters.publisher.process_metrics import ProcessTap
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.publisher.request_identity import identity_maker
from sidestep_adapters.vllm.description import (
    Description,
    describe,
    is_supported,
    with_cache,
    with_missing,
)
from sidestep_adapters.vllm.front_end_events import front_end_requests
from sidestep_adapters.vllm.front_end_progress import FrontEndProgress, calling_front_end
from sidestep_adapters.vllm.frontend import FrontendTap
from sidestep_adapters.vllm.hook_installation import UnusableError, install, pin_nan_check
from sidestep_adapters.vllm.output_hook import OutputHook
from sidestep_adapters.vllm.startup import front_end_startup
from sidestep_adapters.vllm.stats import VllmTap

log = logging.getLogger(__name__)

set_up_log("vllm")
STATISTICS = ("sidestep", "vllm")
"""Who makes the statistics of outputs in mode ``instead``: ``SIDESTEP_VLLM_STATISTICS``."""


def _base() -> Any:
    """Return the base class, which decides whether vLLM adds its own Prometheus logger."""
    if usable_endpoint() and choice("SIDESTEP_VLLM_MODE", MODES) == "instead":
        return loggers.PrometheusStatLogger
    return loggers.AggregateStatLoggerBase


class SidestepStatLogger(_base()):  # type: ignore[misc]
    """Stat logger that pushes the records of vLLM's front end to the exporter.

    Its methods accept arguments that only other releases pass.
    """

    def __init__(
        self, vllm_config: Any, engine_indexes: Sequence[int] = (0,), *_: Any, **__: Any
    ) -> None:
        # Without super().__init__(): PrometheusStatLogger's would register every metric.
        self.engine_indexes = list(engine_indexes)
        self._tap: VllmTap | None = None
        self._publisher: Publisher | None = None
        self._progress: FrontEndProgress | None = None
        self._startup: list[Family] = []
        self._config = vllm_config
        self._front_end: Callable[[], Any] = lambda: None
        self._hook: OutputHook | None = None
        self._statistics: list[Family] = []
        if not usable_endpoint() or not is_supported():
            return
        try:
            self._connect(describe(vllm_config, self.engine_indexes))
        except Exception:
            log.exception("sidestep: the plugin could not start; the engine runs without it")
            self._tap = None
            if self._publisher is not None:
                self._publisher.close(wait=False)
            if isinstance(self, loggers.PrometheusStatLogger):
                # vLLM makes no other one, which this was to replace.
                self.__class__ = loggers.PrometheusStatLogger
                self.__init__(vllm_config, self.engine_indexes)

    def _connect(self, description: Description) -> None:
        frontend = FrontendTap()
        process = ProcessTap(f"api{description.api_server}")
        front_end = calling_front_end()
        if front_end is not None:
            self._front_end = weakref.ref(front_end)
            self._progress = FrontEndProgress(front_end, description.engines)
        self._requests = front_end_requests(description, self._fail)
        record = getattr(loggers.StatLoggerBase, "record", self.record)
        passed = inspect.signature(record).parameters
        # Last of what may fail: a stream would tell the exporter of engines, and of their end.
        publisher = Publisher(
            endpoint(),
            description.stream,
            description.engine_infos,
            periodic_items=lambda: [
                *_samples([*frontend.families(), *process.families()]),
                *_samples(self._startup, range(len(self.engine_indexes))),
                *_samples(self._statistics),
                *self._periodic_events(),
            ],
            current_state=lambda: [
                *(self._tap.current_state() if self._tap is not None else ()),
                *self._requests.current_state(),
            ],
            deferred=self._requests,
            progress=None if self._progress is None else self._progress.measure,
        )
        self._description = description
        self._publisher = publisher
        self._drops = DropWatch(publisher)
        self._tap = VllmTap(
            publisher.push,
            publisher.fail,
            description.engines,
            role=description.role,
            connector=description.connector,
            diffusion="diffusion" in description.features,
            missing=self._describe_missing,
        )
        self._tap.record_sleep_state()
        if lacking := {"scheduler_stats", "iteration_stats", "engine_idx"}.difference(passed):
            self._fail(f"vLLM records without {', '.join(sorted(lacking))}")

    def _describe_missing(self, fields: Mapping[str, dict[str, str]]) -> None:
        self._description = with_missing(self._description, fields)
        if self._publisher is not None:
            self._publisher.describe(self._description.engine_infos)

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: Any = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Record one engine step; never blocks and never raises."""
        if self._tap is None or self._publisher is None:
            return
        if engine_idx is None and len(self.engine_indexes) == 1:
            engine_idx = self.engine_indexes[0]
        try:
            tokens = getattr(iteration_stats, "num_prompt_tokens", None)
            if self._hook is not None:
                tokens = self._hook.step_ended(engine_idx, is_slice=scheduler_stats is None)
            if self._progress is not None and tokens is not None:
                self._progress.answered(engine_idx, tokens)
        except Exception:  # noqa: BLE001 - an exception here ends serving
            self._publisher.fail("an answer could not be counted")
        self._tap.record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def log_engine_initialized(self, *_: Any, **__: Any) -> None:
        """Send the description again, with the cache size that is known now."""
        if self._publisher is None:
            return
        try:
            if not self._description.api_server:
                # All API servers update the same series.
                self._startup = front_end_startup()
            self._replace_statistics()
            if self._hook is None and (envs := sys.modules.get("vllm.envs")) is not None:
                pin_nan_check(envs)
            self._description = with_cache(self._description, self._config)
            self._publisher.describe(self._description.engine_infos)
        except Exception:  # noqa: BLE001 - the engine must start all the same
            self._publisher.fail("the cache configuration could not be read")

    def _replace_statistics(self) -> None:
        """Keep vLLM from building statistics, in mode ``instead``; say in the log which way runs."""
        description, found = self._description, self._front_end()
        if found is None or choice("SIDESTEP_VLLM_MODE", MODES) != "instead":
            return
        reason = "SIDESTEP_VLLM_STATISTICS=vllm"
        try:
            if choice("SIDESTEP_VLLM_STATISTICS", STATISTICS) == "sidestep":
                self._hook = install(
                    found,
                    self._config,
                    loggers.LoggingStatLogger,
                    self._make_hook,
                    inspect.currentframe(),
                )
                reason = ""
        except UnusableError as error:
            reason = str(error)
        except Exception as error:
            log.exception("sidestep: the hook of vLLM's outputs could not be installed")
            reason = f"the hook failed: {error}"
        if self._hook is None:
            log.warning("sidestep: vLLM builds its statistics on the event loop: %s", reason)
        else:
            log.info(
                "sidestep: vLLM builds no statistics; sidestep makes them of the engine's outputs in a"
                " thread, and the exporter writes the line of throughput"
            )
            if description.role == "alone":
                features = (*description.features, REQUEST_EVENTS)
                self._description = dataclasses.replace(description, features=features)
        process = f"api{description.api_server}"
        values = Sample([process, printable(reason)], float(self._hook is None))
        name, labels = "sidestep_engine_process_builds_statistics", ["process", "reason"]
        self._statistics = [Family(name, "gauge", labels, samples=[values])]

    def _make_hook(self) -> OutputHook:
        description = self._description
        return OutputHook(
            self._front_end(),
            description.engines,
            self._requests,
            self._fail,
            sends_identity=identity_maker().is_on,
            nan_check="nan_check" in description.features,
        )

    def _periodic_events(self) -> Iterable[Any]:
        """Return items of the requests about once a second; all of them after items were dropped."""
        if self._hook is not None:
            if self._drops.have_ended():
                return self._requests.resync(self._hook.states)
            self._hook.compare()
        return self._requests.periodic_items()

    def _fail(self, problem: str) -> None:
        if self._publisher is not None:
            self._publisher.fail(problem)

    def record_sleep_state(self, sleep: int = 0, level: int = 0, *_: Any, **__: Any) -> None:
        """Record that the engines fell asleep or woke up."""
        if self._progress is not None:
            self._progress.slept(sleep)
        if self._tap is not None:
            self._tap.record_sleep_state(sleep, level)

    def record_admission_rejection(self, reason: str = "", *_: Any, **__: Any) -> None:
        """Record a request rejected because the front end's queue was full."""
        if self._tap is not None:
            self._tap.record_admission_rejection(reason)

    def log(self, *_: Any, **__: Any) -> None:
        """Do nothing: the exporter prints the statistics line."""


# What other releases require of stat loggers, or do with vLLM's metrics, which this one has not.
SidestepStatLogger.__abstractmethods__ = frozenset()
for _name in vars(loggers.PrometheusStatLogger).keys() - vars(SidestepStatLogger).keys():
    if not _name.startswith("_"):
        _nothing = getattr(loggers.AggregateStatLoggerBase, _name, lambda *_, **__: None)
        setattr(SidestepStatLogger, _name, _nothing)


def _samples(families: Iterable[Family], engines: Iterable[int] = (0,)) -> list[Samples]:
    """Return one item per engine and family; runs in the publisher thread, about once a second."""
    now = time.monotonic()
    return [Samples(engine, now, [family]) for family in families for engine in engines]
