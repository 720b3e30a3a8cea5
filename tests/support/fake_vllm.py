"""Modules of vLLM's shape: a scheduler and its core's loop, and a front end with stat loggers."""

from __future__ import annotations

import enum
import importlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

OURS = ("sidestep_adapters.vllm.scheduler", "sidestep_adapters.vllm.plugin")


def config() -> Any:
    """Return what the plugins read of a ``VllmConfig``."""
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="m", max_model_len=100),
        parallel_config=SimpleNamespace(data_parallel_rank=0),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        cache_config=SimpleNamespace(metrics_info=dict, enable_prefix_caching=False),
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
    """

    def __init__(self, vllm_config: Any, *, log_stats: bool = False) -> None:
        self.vllm_config, self.log_stats = vllm_config, log_stats
        pool = SimpleNamespace(metrics_collector=None, null_block=SimpleNamespace(block_id=0))
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[])
        self.structured_output_manager = SimpleNamespace()
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pause_state = 0
        self.admits = self.answers = True

    def add_request(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def set_pause_state(self, pause_state: int) -> None:
        """Pause or resume."""
        self.pause_state = pause_state

    def schedule(self) -> Any:
        """Return the next batch: all of a prompt, then one token at a time."""
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
    """The core's thread: it schedules, executes and updates while there are requests."""

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


class KVCacheMetricsCollector:
    """The collector of a block pool, which is made with ``--kv-cache-metrics``."""

    def __init__(self, sample_rate: float = 0.01) -> None:
        self.sample_rate = sample_rate

    def on_block_allocated(self, block: Any) -> None:
        """Note a block."""

    def reset(self) -> None:
        """Forget all."""

    def drain_events(self) -> list[Any]:
        """Return the blocks that were evicted."""
        return []


class SchedulerStats:
    """The core's stats: a class of its own, as the plugin remembers what it found out about one."""


class IterationStats:
    """Stats of outputs."""

    def __init__(self, num_prompt_tokens: int = 0) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_generation_tokens = 0


class FinishReason(enum.IntEnum):
    """Why a request has ended."""

    STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreEventType(enum.IntEnum):
    """What happened to a request in the scheduler."""

    QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3


class EngineCoreEvent(msgspec.Struct):
    """An event of a request, at the engine's time."""

    type: EngineCoreEventType
    timestamp: float


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request's output of a step."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finish_reason: FinishReason | None = None
    events: list[EngineCoreEvent] | None = None
    prefill_stats: Any = None
    num_nans_in_logits: int = 0


class ParentRequest:
    """A request with ``n`` parallel samples."""

    def __init__(self, request_id: str, n: int, *, streams: bool = False) -> None:
        self.request_id = request_id
        self.sampling_params = SimpleNamespace(n=n)
        self.streams = streams
        self.child_requests = {f"{index}_{request_id}" for index in range(n)}
        self.output_aggregator: list[Any] = [None] * n

    def get_outputs(self, child: str, completion: Any) -> list[Any]:
        """Return what its client is sent now: without streaming, all samples at once."""
        if completion.finish_reason is not None:
            self.child_requests.discard(child)
        if self.streams:
            return [completion]
        self.output_aggregator[completion.index] = completion
        return [] if self.child_requests else self.output_aggregator


class RequestState:
    """A front end's state of a request.

    Attributes:
        stop_at: Number of tokens that completes its stop string; None: it has none.
        input_chunk_queue: A session's inputs that wait; None: it has answered all of its input.
    """

    def __init__(self, request: Any, parent: ParentRequest | None, index: int) -> None:
        self.request_id = request.request_id
        self.parent_req, self.request_index = parent, index
        self.lora_name = request.lora_name
        self.prompt_len: int = request.prompt_len
        self.max_tokens_param = request.max_tokens
        self.stop_at: int | None = request.stop_at
        self.remote_prefill_cached_tokens = request.remote_prefill_cached_tokens
        self.tokens = 0
        self.is_prefilling = True
        self.queue = SimpleNamespace(output=None)
        self.streaming_input = request.resumable
        self.input_chunk_queue: deque[Any] | None = deque() if request.resumable else None

    def continue_with(self, request: Any) -> None:
        """Begin a session's next input."""
        self.streaming_input = not request.final
        self.prompt_len += request.prompt_len
        self.is_prefilling = True

    def put(self, reason: FinishReason | None) -> None:
        """Send the client an output, which only its end is if it does not stream."""
        text = None if reason is None else str(reason)
        completion = SimpleNamespace(index=self.request_index, finish_reason=text)
        if self.parent_req is None:
            outputs = [completion]
        elif reason is None and not self.parent_req.streams:
            outputs = []
        else:
            outputs = self.parent_req.get_outputs(self.request_id, completion)
        if outputs:
            self.queue.output = SimpleNamespace(outputs=outputs)


class OutputProcessor:
    """What handles the outputs of a front end's requests."""

    def __init__(self) -> None:
        self.log_stats = True
        self.lora_states = SimpleNamespace(log_stats=True)
        self.request_states: dict[str, RequestState] = {}
        self.parent_requests: dict[str, ParentRequest] = {}

    def add_request(
        self,
        request: Any,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
    ) -> None:
        """Accept a request, or the next input of a session."""
        del prompt
        state = self.request_states.get(request.request_id)
        if state is None:
            self.request_states[request.request_id] = RequestState(
                request, parent_req, request_index
            )
            if parent_req is not None:
                self.parent_requests[parent_req.request_id] = parent_req
        elif request.resumable:
            if state.input_chunk_queue is None:
                state.continue_with(request)
                state.input_chunk_queue = deque()
            else:
                state.input_chunk_queue.append(request)
        elif state.input_chunk_queue is None:
            self._finish(state)
        elif state.input_chunk_queue:
            state.input_chunk_queue[-1].final = True
        else:
            state.streaming_input = False

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Forget requests, and all samples of a parent."""
        aborted = []
        for name in request_ids:
            state = self.request_states.pop(name, None)
            if state is not None:
                aborted.append(name)
                state.put(FinishReason.ABORT)
            elif (parent := self.parent_requests.pop(name, None)) is not None:
                aborted += self.abort_requests(sorted(parent.child_requests), internal)
        return aborted

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> Any:
        """Send outputs to clients, look for stop strings, and end requests."""
        del engine_core_timestamp, weight_version
        to_abort = []
        for output in engine_core_outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                # Ignore output for already-aborted request.
                continue
            if iteration_stats is not None:
                iteration_stats.num_generation_tokens += len(output.new_token_ids)
            state.is_prefilling = False
            before, reason = state.tokens, output.finish_reason
            state.tokens += len(output.new_token_ids)
            if state.stop_at is not None and state.tokens >= state.stop_at:
                reason = FinishReason.STOP
                del output.new_token_ids[state.stop_at - before :]
            is_boundary = state.streaming_input and reason not in (
                FinishReason.ABORT,
                FinishReason.ERROR,
            )
            state.put(reason)
            if reason is None:
                continue
            if is_boundary:
                if state.input_chunk_queue:
                    state.continue_with(state.input_chunk_queue.popleft())
                else:
                    state.input_chunk_queue = None
                continue
            self._finish(state)
            if state.streaming_input or output.finish_reason is None:
                to_abort.append(output.request_id)
        return SimpleNamespace(request_outputs=[], reqs_to_abort=to_abort)

    def _finish(self, state: RequestState) -> None:
        del self.request_states[state.request_id]
        parent = state.parent_req
        if parent is not None and not parent.child_requests:
            self.parent_requests.pop(parent.request_id, None)


class AsyncLLM:
    """A front end: the requests that it has accepted, and the stat loggers that it makes."""

    def __init__(self, client: Any, engines: list[int], stat_logger: Any) -> None:
        self.log_stats = True
        self.output_processor: Any = OutputProcessor()
        self.output_handler: Any = None
        self.engine_core = client
        self.aborts: list[str] = []
        self.logger_manager = StatLoggerManager(engines, stat_logger)

    def add_request(
        self,
        request_id: str,
        prompt: int = 7,
        *,
        engine: int | None = None,
        arrival: float = 0.0,
        parent: ParentRequest | None = None,
        resumable: bool = False,
        **more: Any,
    ) -> Any:
        """Accept a request; ``more`` are attributes of its state."""
        given = {"lora_name": None, "max_tokens": 50, "stop_at": None, "final": False}
        given["remote_prefill_cached_tokens"] = None
        request = SimpleNamespace(
            request_id=request_id,
            arrival_time=arrival or time.time(),
            prompt_len=prompt,
            resumable=resumable,
            cache_salt=None,
            **{name: more.pop(name, default) for name, default in given.items()},
        )
        index = int(request_id.partition("_")[0]) if parent is not None else 0
        self.output_processor.add_request(request, None, parent, index)
        if engine is not None and hasattr(self.engine_core, "reqs_in_flight"):
            self.engine_core.reqs_in_flight[request_id] = engine.to_bytes(2, "little")
        state: Any = self.output_processor.request_states.get(request_id)
        vars(state or request).update(more)
        return state

    def abort(self, *names: str) -> None:
        """End requests whose clients have left."""
        self.aborts += self.output_processor.abort_requests(names, internal=True)

    def receive(
        self,
        outputs: Sequence[EngineCoreOutput],
        stamp: float = 1.0,
        engine: int = 0,
        *,
        has_stats: bool = True,
        chunk: int = 128,
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Handle the outputs of a step; other tasks run ``between`` two chunks of them."""
        iteration = IterationStats() if self.log_stats and outputs else None
        for start in range(0, len(outputs), chunk):
            found = self.output_processor.process_outputs(
                [*outputs[start : start + chunk]], stamp, iteration, weight_version=None
            )
            if start + chunk < len(outputs):
                between()
            self.aborts += found.reqs_to_abort
        for logger in self.logger_manager.stat_loggers:
            stats = SchedulerStats() if has_stats else None
            logger.record(stats, iteration, None, engine_idx=engine)


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

    def log_engine_initialized(self) -> None:
        """Tell the stat loggers that the engines are ready."""
        for logger in self.stat_loggers:
            logger.log_engine_initialized()


class StatLoggerBase:
    """The base class of stat loggers."""

    def log_engine_initialized(self) -> None:
        """Do nothing."""


class LoggingStatLogger(StatLoggerBase):
    """The writer of vLLM's statistics line."""


class PrometheusStatLogger(StatLoggerBase):
    """vLLM's own metrics, which a stat logger of a derived class replaces."""


def install(patch: pytest.MonkeyPatch) -> None:
    """Make these modules those of vLLM."""
    loggers = SimpleNamespace(
        StatLoggerBase=StatLoggerBase,
        AggregateStatLoggerBase=object,
        LoggingStatLogger=LoggingStatLogger,
        PrometheusStatLogger=PrometheusStatLogger,
    )
    modules = {
        "vllm.v1.core.sched.scheduler": SimpleNamespace(Scheduler=Scheduler),
        "vllm.v1.core.kv_cache_metrics": SimpleNamespace(
            KVCacheMetricsCollector=KVCacheMetricsCollector
        ),
        "vllm.v1.engine": SimpleNamespace(
            EngineCoreRequest=object,
            EngineCoreEvent=EngineCoreEvent,
            EngineCoreEventType=EngineCoreEventType,
            EngineCoreOutput=EngineCoreOutput,
            FinishReason=FinishReason,
        ),
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
