"""A hook that keeps vLLM's front end from building statistics on its event loop, in mode ``instead``.

vLLM builds them for its own metrics: one look at each output of each request. The hook switches that
off, as ``--disable-log-stats`` does, and hands ids, counts and times of the outputs to the publisher's
thread, which makes the same statistics of them (see ``front_end_requests``). No text, no token and no
probability is kept. Whatever the hook cannot be sure of leaves vLLM as it is.
"""

from __future__ import annotations

import inspect
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import FrameType, SimpleNamespace
from typing import Any

from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep_adapters.vllm.front_end_requests import (
    ABORT,
    PREEMPTED,
    QUEUED,
    SCHEDULED,
    STOP,
    Added,
    FrontEndRequests,
    Outputs,
    Special,
)

LENGTH = FINISH_REASONS.index("length")
NAN_CHECK = "VLLM_COMPUTE_NANS_IN_LOGITS"
_PARAMETERS = {
    "process_outputs": ("engine_core_outputs", "engine_core_timestamp", "iteration_stats"),
    "add_request": ("request", "prompt", "parent_req"),
    "abort_requests": ("request_ids",),
}
"""First parameters of the output processor's methods that are wrapped."""
_STATE = {
    "is_prefilling",
    "lora_name",
    "max_tokens_param",
    "parent_req",
    "prompt_len",
    "queue",
    "request_index",
}
"""Attributes of the output processor's requests that are read, which are set when one is made."""
_get_name = attrgetter("request_id")
_monotonic, _wall = time.monotonic, time.time


class UnusableError(Exception):
    """vLLM has to build its statistics; the text says why."""


class OutputHook:
    """Wrappers of the methods of one front end's output processor.

    Each calls the original, whatever happens to the hook.

    Args:
        front_end: An ``AsyncLLM``.
        engines: vLLM's indexes of its engines, in the order of the stream's Hello.
        requests: Takes what is recorded.
        fail: Called inside ``except`` with a description of the problem.
        sends_identity: Whether requests' ids and headers may be sent.
        nan_check: Whether outputs report NaNs in logits.
    """

    def __init__(
        self,
        front_end: Any,
        engines: Sequence[int],
        requests: FrontEndRequests,
        fail: Callable[[str], None],
        *,
        sends_identity: bool,
        nan_check: bool,
    ) -> None:
        self._states: dict[str, Any] = front_end.output_processor.request_states
        # What holds the hook must not keep the front end alive.
        self._client = weakref.ref(front_end.engine_core)
        self._index = {number: index for index, number in enumerate(engines)}
        self._requests = requests
        self._record = requests.record
        self._fail = fail
        self._sends_identity = sends_identity
        self._nan_check = nan_check
        self._received: tuple[float, float] | None = None
        """Unix and monotonic time at which the step was received whose outputs are recorded."""
        self._prompt_tokens = 0

    @property
    def states(self) -> dict[str, Any]:
        """The front end's unfinished requests by name."""
        return self._states

    def wrappers(self, processor: Any) -> dict[str, Callable[..., Any]]:
        """Return the wrappers of this output processor's methods, by their names."""
        return {
            "process_outputs": self._around_outputs(processor.process_outputs),
            "add_request": self._around_add(processor.add_request),
            "abort_requests": self._around_abort(processor.abort_requests),
        }

    def step_ended(self, number: int, *, is_slice: bool) -> int | None:
        """Record the end of the step of engine ``number``; on the event loop.

        Returns:
            Tokens of the prompts that had their first output in it; None if it had no output.
        """
        if self._received is None:
            return None
        self._received = None
        self._record(self._requests.step_ended, self._index[number], is_slice)
        tokens, self._prompt_tokens = self._prompt_tokens, 0
        return tokens

    def _lose(self, problem: str) -> None:
        """Count what could not be recorded as dropped, so that the requests are compared later."""
        self._fail(problem)
        self._requests.dropped += 1

    def _around_outputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            taken = None
            try:
                if outputs:
                    taken = self._take(outputs)
                    stamp = args[0] if args else kwargs["engine_core_timestamp"]
            except Exception:  # noqa: BLE001 - an exception here ends serving
                self._lose("outputs could not be read")
            result = original(outputs, *args, **kwargs)
            if taken is not None:
                try:
                    self._hand_over(stamp, *taken, result.reqs_to_abort)
                except Exception:  # noqa: BLE001 - as above
                    self._lose("outputs could not be recorded")
            return result

        return process_outputs

    def _take(
        self, outputs: Sequence[Any]
    ) -> tuple[list[str], list[int], list[tuple[Any, Any, int, bool]]]:
        """Return names and numbers of tokens of outputs, and those that have more.

        The latter come with their states, with the tokens of their prompts, and with whether they are
        the first of these. The original changes that, and the lists of tokens. This is the only place
        that looks at every output.
        """
        if self._received is None:
            self._received = _wall(), _monotonic()
        names = [*map(_get_name, outputs)]
        tokens = [len(output.new_token_ids) for output in outputs]
        if self._nan_check:
            special = [o for o in outputs if o.events or o.finish_reason is not None or _nans(o)]
        else:
            special = [o for o in outputs if o.events or o.finish_reason is not None]
        found = []
        for output in special:
            state = self._states.get(output.request_id)
            # vLLM ignores outputs after a client has left.
            prompt = (0, False) if state is None else (state.prompt_len, state.is_prefilling)
            found.append((output, state, *prompt))
        return names, tokens, found

    def _hand_over(
        self,
        stamp: float,
        names: list[str],
        tokens: list[int],
        special: list[tuple[Any, Any, int, bool]],
        stopped: Iterable[str],
    ) -> None:
        """Record outputs, after the original has decided which of their requests end."""
        assert self._received is not None
        ended = []
        events = []
        for output, state, prompt_tokens, is_first in special:
            name, reason = output.request_id, output.finish_reason
            if output.events or self._nan_check:
                events.append(self._special(output, prompt_tokens, is_first=is_first))
            if reason is not None and state is not None and name not in self._states:
                ended.append((name, _final_reason(int(reason), state)))
        # A session that the engine has ended is among them, too: its own reason comes first.
        ended += [(name, STOP) for name in stopped]
        outputs = Outputs(stamp, *self._received, names, tokens, events, ended)
        self._record(self._requests.outputs, outputs, size=len(names))

    def _special(self, output: Any, prompt_tokens: int, *, is_first: bool) -> Special:
        prompt = None
        stats = output.prefill_stats
        if stats is not None:
            local, external = stats.num_local_cached_tokens, stats.num_external_cached_tokens
            prompt = stats.num_computed_tokens, local, external
        events = [(int(event.type), event.timestamp) for event in output.events or ()]
        if is_first:
            self._prompt_tokens += prompt_tokens
        is_corrupted = self._nan_check and _nans(output) > 0
        return Special(output.request_id, events, is_first, prompt_tokens, prompt, is_corrupted)

    def _around_add(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(request: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(request, *args, **kwargs)
            try:
                self._add(request)
            except Exception:  # noqa: BLE001 - an exception here refuses the request
                self._lose("a request could not be recorded")
            return result

        return add_request

    def _add(self, request: Any) -> None:
        name = request.request_id
        state = self._states.get(name)
        if state is None:
            # A session whose user sends no more input, and which has answered all of it.
            self._record(self._requests.left, [(name, -1)], STOP, _monotonic(), _wall())
            return
        parent, client = state.parent_req, None
        if self._sends_identity:
            shown = getattr(request, "external_req_id", None) or _client_id(name, parent)
            priority = getattr(request, "priority", 0)
            client = shown, request.cache_salt, getattr(request, "trace_headers", None), priority
        added = Added(
            name,
            request.arrival_time,
            state.prompt_len,
            state.lora_name,
            state.max_tokens_param,
            0 if parent is None else parent.sampling_params.n,
            getattr(state, "remote_prefill_cached_tokens", None),
            client,
        )
        self._record(self._requests.added, added)

    def _around_abort(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def abort_requests(*args: Any, **kwargs: Any) -> Any:
            aborted = original(*args, **kwargs)
            try:
                if aborted:
                    names = [(name, self._engine_of(name)) for name in aborted]
                    self._record(self._requests.left, names, ABORT, _monotonic(), _wall())
            except Exception:  # noqa: BLE001 - an exception here leaves the request in the engine
                self._lose("an abort could not be recorded")
            return aborted

        return abort_requests

    def _engine_of(self, name: str) -> int:
        """Return the index of a request's engine; -1 if it is unknown."""
        engine = getattr(self._client(), "reqs_in_flight", {}).get(name)
        return -1 if engine is None else self._index.get(int.from_bytes(engine, "little"), -1)


def _nans(output: Any) -> int:
    found: int = output.num_nans_in_logits
    return found


def _client_id(name: str, parent: Any) -> str:
    found: str = name if parent is None else parent.request_id
    return found


def _final_reason(reason: int, state: Any) -> int:
    """Return why a request has ended: its last token may also have completed a stop string."""
    if reason == LENGTH:
        last = getattr(getattr(state.queue, "output", None), "outputs", ())
        # Parallel samples are sent when the last one has ended.
        held = getattr(state.parent_req, "output_aggregator", ())
        for one in (*last, *held):
            if getattr(one, "index", None) == state.request_index and one.finish_reason:
                return FINISH_REASONS.index(one.finish_reason)
    return reason


def pin_nan_check(envs: Any) -> None:
    """Make a variable of vLLM a plain attribute of its module ``envs``.

    The module reads the environment whenever it is asked. Up to 0.32, vLLM's statistics ask it for
    each output of each request, at 1 to 2 us; its cores and workers have a cache, front ends none.
    """
    if NAN_CHECK not in vars(envs) and hasattr(envs, NAN_CHECK):
        setattr(envs, NAN_CHECK, getattr(envs, NAN_CHECK))


def install(
    front_end: Any,
    config: Any,
    base: type,
    make: Callable[[], OutputHook],
    callers: FrameType | None,
) -> OutputHook:
    """Install the hook that ``make`` makes, and switch vLLM's statistics off.

    Args:
        front_end: An ``AsyncLLM`` that is being made.
        config: Its ``VllmConfig``.
        base: Class of vLLM's stat loggers that write its statistics to the log.
        make: Makes the hook.
        callers: Frame of the caller, whose callers may have the server's arguments.

    Raises:
        UnusableError: vLLM has to build its statistics.
    """
    _check_use(config, callers)
    loggers = _other_loggers(front_end, base)
    try:
        _check_release(front_end)
        hook = make()
        processor = front_end.output_processor
        _replace(
            [
                *((processor, *wrapper) for wrapper in hook.wrappers(processor).items()),
                *(
                    (one, "log_stats", False)
                    for one in (front_end, processor, processor.lora_states)
                ),
                # Others would write throughputs of 0; the exporter writes a statistics line.
                (front_end.logger_manager, "stat_loggers", loggers),
            ]
        )
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise UnusableError(f"this release of vLLM is another: {error}") from error
    return hook


def _replace(attributes: Iterable[tuple[Any, str, Any]]) -> None:
    """Set attributes of objects: all of them or, if one cannot be set, none."""
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in attributes:
            before = getattr(owner, name)
            setattr(owner, name, value)
            replaced.append((owner, name, before))
    except Exception:
        for owner, name, before in reversed(replaced):
            setattr(owner, name, before)
        raise


def _check_use(config: Any, callers: FrameType | None) -> None:
    """Refuse options that show statistics elsewhere than in metrics."""
    observability = getattr(config, "observability_config", None)
    if getattr(observability, "otlp_traces_endpoint", None):
        raise UnusableError("--otlp-traces-endpoint needs them")
    if getattr(config, "watermark_config", None) is not None:
        raise UnusableError("--watermark-config needs them")
    if getattr(getattr(config, "parallel_config", None), "enable_elastic_ep", False):
        raise UnusableError("--enable-elastic-ep makes new stat loggers only with them")
    while callers is not None:
        arguments = callers.f_locals.get("args")
        if getattr(arguments, "enable_per_request_metrics", False):
            raise UnusableError("--enable-per-request-metrics needs them")
        callers = callers.f_back


def _other_loggers(front_end: Any, base: type) -> list[Any]:
    """Return the front end's stat loggers without those that write to the log.

    Raises:
        UnusableError: There is one of another kind.
    """
    kept = []
    for logger in front_end.logger_manager.stat_loggers:
        several = getattr(logger, "per_engine_stat_loggers", None)
        if not all(
            isinstance(one, base) for one in ([logger] if several is None else several.values())
        ):
            kept.append(logger)
    for logger in kept:
        if not type(logger).__module__.startswith("sidestep_adapters."):
            raise UnusableError(f"the stat logger {type(logger).__name__} needs them")
    return kept


def _check_release(front_end: Any) -> None:
    """Compare what the hook reads of vLLM with what this release has.

    Raises:
        AttributeError: Something is missing, or has another meaning.
        ImportError: A module is missing.
        TypeError: A class takes other arguments.
        ValueError: A method has no signature.
    """
    from vllm.v1.engine import (  # noqa: PLC0415 - only a front end has it
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        FinishReason,
    )

    processor = front_end.output_processor
    for name, parameters in _PARAMETERS.items():
        found = tuple(inspect.signature(getattr(processor, name)).parameters)
        if found[: len(parameters)] != parameters:
            raise AttributeError(f"{name}({', '.join(found)}) takes other parameters")
    if not (front_end.log_stats and processor.log_stats and processor.lora_states.log_stats):
        raise AttributeError("its log_stats means something else")
    if tuple(str(reason) for reason in FinishReason) != FINISH_REASONS[: len(FinishReason)]:
        raise AttributeError("its finish reasons are others")
    state = sys.modules[type(processor).__module__].RequestState
    if lacking := _STATE.difference(state.__init__.__code__.co_names):
        raise AttributeError(f"its requests have no {', '.join(sorted(lacking))}")
    kinds = EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED, EngineCoreEventType.PREEMPTED
    if tuple(map(int, kinds)) != (QUEUED, SCHEDULED, PREEMPTED):
        raise AttributeError("its event types are others")
    event = EngineCoreEvent(type=EngineCoreEventType.QUEUED, timestamp=1.0)
    output = EngineCoreOutput(request_id="a", new_token_ids=[1], events=[event])
    if not hasattr(output, "prefill_stats"):
        raise AttributeError(
            "its outputs do not say which tokens of a prompt were cached, and where"
        )
    stand_in = SimpleNamespace(
        output_processor=SimpleNamespace(request_states={}), engine_core=front_end.engine_core
    )
    taken: list[Outputs] = []
    recorder: Any = SimpleNamespace(record=lambda *args, **_: taken.append(args[1]), outputs=None)
    hook = OutputHook(
        stand_in, [0], recorder, lambda _: None, sends_identity=False, nan_check=False
    )
    hook._hand_over(1.0, *hook._take([output]), ["b"])
    names, tokens, special, ended = taken[0][3:]
    if (names, tokens, ended) != (["a"], [1], [("b", STOP)]) or special[0].events != [
        (QUEUED, 1.0)
    ]:
        raise AttributeError("its outputs are others")
