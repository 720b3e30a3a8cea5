"""Replacements of what SGLang does for metrics with each output of a request, in mode ``instead``.

- SGLang's tokenizer makes labels and calls its collector for each output. Here a request remembers
  where its intervals are recorded.
- SGLang's scheduler sends the times of a request with each output, and the detokenizer and the
  tokenizer decode them. Here it sends them with the first output, the last, and after a change.
- SGLang's scheduler prepares a stage of its traces for each token. Here it does so only for traces.

What a release does is tried before it is replaced. If that fails, or a replacement raises, SGLang's
own function runs from then on, and one line of the log says so.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pickle
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sidestep_adapters.sglang.deferred_metrics import DeferredMetrics
from sidestep_adapters.sglang.metric_stubs import MetricStub

log = logging.getLogger(__name__)

TIME_STATS = "sglang.srt.observability.req_time_stats"
MESSAGES = "sglang.srt.managers.io_struct"
PAYLOAD = (
    "sglang.srt.managers.scheduler_components.output_streamer."
    "_GenerationStreamAccumulator.to_payload"
)
"""The function that makes the message of a scheduler's step."""
RECEIVED = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_batch_output"
"""The function that handles the message in the tokenizer."""
OBSERVER, TIMES, SENT = "sidestep_observer", "sidestep_times", "sidestep_sent"
"""Attributes that are added to SGLang's objects of a request."""

Observer = Callable[[float, int], None]
"""Records observations with their weight."""


class Latencies:
    """Recorder of the inter-token latencies of one tokenizer.

    ``signature`` is that of the collector's method: labels, seconds and number of tokens come first.
    """

    def __init__(
        self, stub: MetricStub, deferred: DeferredMetrics, signature: inspect.Signature
    ) -> None:
        self._bind = signature.bind
        self._stub = stub
        self._deferred = deferred
        self._only = None if stub.own else stub.observer({})
        """Records all latencies of a family without own labels."""
        self._last: Observer | None = None
        """What recorded the last latency."""

    def observe(self, *args: Any, **kwargs: Any) -> None:
        """Record the latency of new tokens, in place of the collector's method."""
        try:
            if kwargs or len(args) > 3:  # noqa: PLR2004 - see the class
                args = self._bind(*args, **kwargs).args[:3]
            labels, interval, count = args
            if count > 0:
                self._last = record = self._only or self._stub.observer(labels)
                record(interval / count, count)
        except Exception:  # noqa: BLE001 - no exception may reach the engine
            self._deferred.fail("a latency could not be recorded")

    def replace_in(self, manager: Any) -> None:
        """Replace the function of a tokenizer manager that counts an output, if it is as expected."""
        try:
            _try_collect(manager)
            manager.collect_metrics = self._collector(manager, manager.collect_metrics)
        except Exception as error:  # noqa: BLE001 - other releases may do anything
            log_own_way("count each output", error)
        else:
            log.info("sidestep: latencies are recorded without SGLang's collect_metrics")

    def _collector(self, manager: Any, original: Callable[..., None]) -> Callable[..., None]:
        def give_way(error: Exception) -> None:
            manager.collect_metrics = original
            log_own_way("count each output", error)

        def collect(state: Any, recv_obj: Any, i: int) -> None:
            try:
                record = getattr(state, OBSERVER, None)
                if record is not None and recv_obj.finished_reasons[i] is None:
                    add_latency(record, state, recv_obj.completion_tokens[i])
                    return
            except Exception as error:  # noqa: BLE001 - no exception may reach the engine
                give_way(error)
            self._last = None
            original(state, recv_obj, i)
            try:
                # Labels of a request's own are known from its first latency.
                found = self._last or (self._only if state.ttft_observed else None)
                if found is not None:
                    setattr(state, OBSERVER, found)
            except Exception as error:  # noqa: BLE001 - as above
                give_way(error)

        return collect


def add_latency(record: Observer, state: Any, tokens: int) -> None:
    """Record the latency of a request's new tokens, as SGLang's ``collect_metrics`` does.

    Args:
        record: Records latencies of this request.
        state: SGLang's state of a request that has had its first output, and does not end.
        tokens: All tokens that the request has now.
    """
    new = tokens - state.last_completion_tokens
    if new:
        times, now = state.time_stats, time.perf_counter()
        if new > 0:
            record((now - times.last_time) / new, new)
        times.last_time = now
        state.last_completion_tokens = tokens


def _try_collect(manager: Any) -> None:
    """Raise an exception unless SGLang's function does the same as ``add_latency``."""
    kind = type(manager)
    _check(kind.collect_metrics, "self", "state", "recv_obj", "i")
    times = importlib.import_module(TIME_STATS).APIServerReqTimeStats
    for before, after in ((3, 5), (3, 3), (5, 3)):
        states, found = [], []
        for is_own in (False, True):
            state = SimpleNamespace(
                obj=SimpleNamespace(),
                finished=False,
                ttft_observed=True,
                last_completion_tokens=before,
                time_stats=times(last_time=time.perf_counter() - 100),
            )
            recorded: list[tuple[float, int]] = []
            if is_own:
                add_latency(lambda *call, to=recorded: to.append(call), state, after)
            else:
                stand_in = _StandIn(manager, recorded)
                output = SimpleNamespace(completion_tokens=[after], finished_reasons=[None])
                kind.collect_metrics(stand_in, state, output, 0)
            now = time.perf_counter()
            found.append([(round(latency), count) for latency, count in recorded])
            age = round(now - vars(vars(state).pop("time_stats")).pop("last_time"))
            states.append((age, {**vars(state), "obj": None}))
        if found[0] != found[1] or states[0] != states[1]:
            raise ValueError(f"this release counts {before} and {after} tokens in another way")


class _StandIn:
    """A tokenizer manager with another collector, which accepts latencies only."""

    def __init__(self, manager: Any, recorded: list[tuple[float, int]]) -> None:
        self._manager = manager

        def observe(_: Any, interval: float, count: int) -> None:
            if count > 0:
                recorded.append((interval / count, count))

        self.metrics_collector = SimpleNamespace(labels={}, observe_inter_token_latency=observe)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class Times:
    """The times of requests on their way from the scheduler to the tokenizer.

    Hooks of SGLang's functions: ``send`` around ``PAYLOAD``, ``receive`` around ``RECEIVED``. In place of
    times that have been sent before, a message has empty ones. It encodes them once.

    Args:
        is_alone: Whether one tokenizer gets all messages; others load no plugins.
    """

    def __init__(self, is_alone: Callable[[], bool]) -> None:
        self._is_alone = is_alone
        self._is_on: bool | None = None
        """None before the first message."""
        self._empty = empty_times()
        self._unwrap = importlib.import_module(MESSAGES).unwrap_from_pickle

    def send(
        self, original: Callable[..., Any], accumulator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Make a message without the times that the tokenizer has."""
        try:
            if self._is_on is None:
                self._is_on = self._is_alone()
                if self._is_on:
                    log.info("sidestep: the times of requests are sent when they change")
            if self._is_on:
                self._empty_known(accumulator.time_stats)
        except Exception as error:  # noqa: BLE001 - no exception may reach the engine
            self._is_on = False
            log_own_way("send the times of requests", error)
        return original(accumulator, *args, **kwargs)

    def _empty_known(self, sent: list[Any]) -> None:
        for index, times in enumerate(sent):
            # What else changes in the queue comes with the former, and the end of a request is sent, too.
            state = times.queue_duration_s, times.prefill_finished_time
            known = times.__dict__
            if known.get(SENT) == state and not times.completion_time:
                sent[index] = self._empty
            else:
                known[SENT] = state

    def receive(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Complete a message with the times of earlier ones."""
        try:
            manager, output, *_ = (*args, *kwargs.values())
            if manager.enable_metrics and self._is_on is not False:
                self._complete(manager.rid_to_state, output)
        except Exception as error:  # noqa: BLE001 - no exception may reach the engine
            self._is_on = False
            log_own_way("receive the times of requests", error)
        return original(*args, **kwargs)

    def _complete(self, states: dict[str, Any], output: Any) -> None:
        received = output.time_stats = self._unwrap(output.time_stats)
        for index, rid in enumerate(output.rids if received else ()):
            times, state = received[index], states.get(rid)
            if state is None:
                continue
            if times.has_timing_data:
                # SGLang asks for these with each output, too.
                info = times.convert_to_output_meta_info()
                times.convert_to_output_meta_info = lambda info=info: info
                setattr(state, TIMES, times)
            else:
                received[index] = getattr(state, TIMES, times)


def empty_times() -> Any:
    """Return times that are sent as nothing, after a trial that they are.

    Raises:
        Exception: The release sends times in another way.
    """
    kind = importlib.import_module(TIME_STATS).SchedulerReqTimeStats
    full = kind(enable_metrics=True, queue_duration_s=1.0, prefill_finished_time=2.0)
    sent, nothing = pickle.loads(pickle.dumps([full, kind()]))  # noqa: S301 - our own
    found = sent.has_timing_data, sent.queue_duration_s, nothing.has_timing_data, vars(nothing)
    if found != (True, 1.0, False, {}) or not sent.convert_to_output_meta_info():
        raise ValueError("this release sends the times of requests in another way")
    return kind()


def replace_decode() -> None:
    """Replace the function that notes when a request got its last token in the scheduler.

    A hook in SGLang's registry would add two calls to each token.

    Raises:
        Exception: The release's function does something else.
    """
    kind = importlib.import_module(TIME_STATS).SchedulerReqTimeStats
    original = kind.set_last_decode_finish_time
    _check(original, "self", "ts")

    def note(times: Any, ts: float | None = None) -> None:
        try:
            if not times.trace_ctx.tracing_enable:
                times.last_decode_finish_time = ts or time.perf_counter()
                return
        except Exception as error:  # noqa: BLE001 - no exception may reach the engine
            kind.set_last_decode_finish_time = original
            log_own_way("note the time of each token", error)
        original(times, ts)

    own, ours = (kind(enable_metrics=True, metrics_collector=object()) for _ in range(2))
    original(own, 5.0)
    note(ours, 5.0)
    # The number of tokens, too, is for traces only.
    apart = {"trace_ctx": None, "decode_ct": 0, "metrics_collector": None}
    if {**vars(own), **apart} != {**vars(ours), **apart}:
        raise ValueError("this release notes more than the time of a token")
    kind.set_last_decode_finish_time = note


def _check(function: Callable[..., Any], *parameters: str) -> None:
    """Raise an exception unless ``function`` is SGLang's own and has these parameters."""
    if hasattr(function, "__wrapped__"):
        raise TypeError(f"another plugin has replaced {function.__name__}")
    if (found := tuple(inspect.signature(function).parameters)) != parameters:
        raise TypeError(f"{function.__name__} takes {', '.join(found)}")


def log_own_way(what: str, error: Exception) -> None:
    """Log that SGLang's own functions run, and why."""
    # The text only: a log's handler may keep the exception, and with it SGLang's objects.
    log.warning("sidestep: SGLang's own functions %s from now on: %s", what, repr(error))
