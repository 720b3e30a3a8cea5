"""Modules of vLLM's shape: a scheduler and its core's loop, and a front end with stat loggers."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

OURS = ("sidestep_adapters.vllm.scheduler", "sidestep_adapters.vllm.plugin")


def config() -> Any:
    """Return what the plugins read of a ``VllmConfig``."""
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="m", max_model_len=100),
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        cache_config=SimpleNamespace(metrics_info=dict),
        # The front end's description names no tap.
        observability_config=SimpleNamespace(),
    )


class Request:
    """A request of the scheduler's."""

    def __init__(self, request_id: str, prompt: int = 7) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = self.num_tokens = prompt
        self.num_output_tokens = self.num_preemptions = 0
        self.arrival_time = time.time()
        self.events = [SimpleNamespace(timestamp=time.monotonic())]
        self.lora_request = None
        self.sampling_params = SimpleNamespace(max_tokens=50, stop=[])
        self.status = SimpleNamespace(name="WAITING")

    def get_finished_reason(self) -> int:
        """Return that it ended by itself."""
        return 0

    def is_finished(self) -> bool:
        """Return that it has not ended."""
        return False


class Scheduler:
    """A scheduler that runs every request until a test ends it.

    Attributes:
        admits: Whether waiting requests join the batch.
        answers: Whether steps have output.
        allocate_slots: Called while a batch is scheduled.
    """

    def __init__(self, vllm_config: Any, *, log_stats: bool = False) -> None:
        self.vllm_config, self.log_stats = vllm_config, log_stats
        pool = SimpleNamespace(metrics_collector=None)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.structured_output_manager = SimpleNamespace()
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pause_state = 0
        self.admits = self.answers = True
        self.allocate_slots: Callable[[], None] = lambda: None

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> Any:
        """Return the next batch: all of a prompt, then one token at a time."""
        self.allocate_slots()
        new: list[Request] = []
        if self.admits:
            new, self.waiting = self.waiting, []
        cached, self.running = self.running, [*self.running, *new]
        for request in new:
            request.events.append(SimpleNamespace(timestamp=time.monotonic()))
        tokens = {r.request_id: 1 for r in cached} | {r.request_id: r.num_tokens for r in new}
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r.request_id, num_computed_tokens=0) for r in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r in cached],
                resumed_req_ids=set(),
                num_computed_tokens=[0] * len(cached),
            ),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
        )

    def update_from_output(self, scheduler_output: Any, _: Any = None) -> dict[int, Any]:
        """Return one token for each request of the batch."""
        if not self.answers:
            return {}
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=[0], events=None)
            for name in scheduler_output.num_scheduled_tokens
        ]
        return {0: SimpleNamespace(timestamp=time.monotonic(), outputs=outputs)}

    def finish_all(self) -> None:
        """End all requests."""
        for request in [*self.requests.values()]:
            self._free_request(request)

    def _free_request(self, request: Request) -> None:
        del self.requests[request.request_id]
        self.waiting = [each for each in self.waiting if each is not request]
        self.running = [each for each in self.running if each is not request]

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests."""
        return len(self.waiting) + len(self.running)

    def shutdown(self) -> None:
        """End."""


class Core:
    """The core's thread: it schedules, executes and updates while there are requests.

    Attributes:
        execute_model: Called between the first and the last.
        steps: How often it has done so.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.execute_model: Callable[[], object] = lambda: None
        self.steps = 0
        self._calls: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_busy_loop)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Call ``function`` on the thread, between two steps."""
        self._calls.append(function)

    def close(self) -> None:
        """End the thread and the scheduler."""
        self._stop.set()
        self._thread.join()
        self.scheduler.shutdown()

    def _run_busy_loop(self) -> None:
        while not self._stop.wait(0.002):
            while self._calls:
                self._calls.pop(0)()
            if self.scheduler.get_num_unfinished_requests():
                batch = self.scheduler.schedule()
                self.execute_model()
                self.scheduler.update_from_output(batch, None)
                self.steps += 1


class SchedulerStats:
    """The core's stats: a class of its own, as the plugin remembers what it found out about one."""


class IterationStats:
    """Stats of outputs."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens


class StatLoggerBase:
    """The base class of stat loggers."""


class AsyncLLM:
    """A front end: the requests that it has accepted, and the stat loggers that it makes."""

    def __init__(self, client: Any, engines: list[int], stat_logger: Any) -> None:
        self.output_processor = SimpleNamespace(request_states={})
        self.output_handler: Any = None
        self.engine_core = client
        self.logger_manager = StatLoggerManager(engines, stat_logger)

    def add_request(self, request_id: str, prompt: int = 7, **more: Any) -> Any:
        """Accept a request."""
        state = SimpleNamespace(prompt_len=prompt, is_prefilling=True, **more)
        self.output_processor.request_states[request_id] = state
        return state


class LLMEngine(AsyncLLM):
    """The engine of offline inference, which makes steps when it is called."""

    def step(self) -> None:
        """Make a step."""


class StatLoggerManager:
    """The maker of stat loggers: it passes on no reference to the front end."""

    def __init__(self, engines: list[int], stat_logger: Any) -> None:
        self.stat_loggers = [stat_logger(vllm_config=config(), engine_indexes=engines)]

    def record(self, prompt_tokens: int | None, engine_idx: int = 0) -> None:
        """Record outputs of an engine; without any the core has sent its own stats only."""
        iteration = None if prompt_tokens is None else IterationStats(prompt_tokens)
        for logger in self.stat_loggers:
            logger.record(SchedulerStats(), iteration, None, engine_idx=engine_idx)


class PrometheusStatLogger(StatLoggerBase):
    """vLLM's own metrics, which a stat logger of a derived class replaces."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Make these modules those of vLLM."""
    loggers = SimpleNamespace(
        StatLoggerBase=StatLoggerBase,
        AggregateStatLoggerBase=object,
        PrometheusStatLogger=PrometheusStatLogger,
    )
    modules = {
        "vllm.v1.core.sched.scheduler": SimpleNamespace(Scheduler=Scheduler),
        "vllm.v1.engine": SimpleNamespace(EngineCoreRequest=object),
        "vllm.v1.metrics": SimpleNamespace(loggers=loggers),
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(vars(content))
        patch.setitem(sys.modules, name, module)
        parent = name.rpartition(".")[0]
        while parent:
            patch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
            parent = parent.rpartition(".")[0]


@contextmanager
def importable(patch: pytest.MonkeyPatch, endpoint: str) -> Iterator[SimpleNamespace]:
    """Make these modules those of vLLM, and return our classes that derive from theirs."""
    patch.setenv("SIDESTEP_ENDPOINT", endpoint)
    patch.setenv("SIDESTEP_NAMESPACE", "pod")
    install(patch)
    environment = importlib.import_module("sidestep_adapters.publisher.environment")
    environment.usable_endpoint.cache_clear()
    try:
        found = [importlib.import_module(name) for name in OURS]
        yield SimpleNamespace(
            scheduler=found[0].SidestepScheduler, stat_logger=found[1].SidestepStatLogger
        )
    finally:
        for name in OURS:
            sys.modules.pop(name, None)
        environment.usable_endpoint.cache_clear()
