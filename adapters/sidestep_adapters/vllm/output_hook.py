"""A hook that keeps vLLM's front end from building statistics on its event loop, in mode ``instead``.

vLLM builds them for its own metrics: one look at each output of each request. The hook switches that
off, as ``--disable-log-stats`` does, and hands numbers, counts and times of the outputs to the publisher's
thread, which makes the same statistics of them (see ``front_end_requests``). No text, no token and no
probability is kept. Whatever the hook cannot be sure of leaves vLLM as it is.
"""

from __future__ import annotations

import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep_adapters.vllm.event_batches import join_key, transfer_of
from sidestep_adapters.vllm.front_end_requests import (
    ABORT,
    STOP,
    Added,
    FrontEndRequests,
    Outputs,
    Special,
)

UNSEEN_CALLS = 5
"""Calls of ``compare`` for which a request may be missing: the records of its end may still wait."""
LENGTH, REPETITION = map(FINISH_REASONS.index, ("length", "repetition"))
_monotonic, _wall = time.monotonic, time.time


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
        # What holds the hook must not keep the front end alive.
        self._processor = weakref.ref(front_end.output_processor)
        self._client = weakref.ref(front_end.engine_core)
        self._index = {number: index for index, number in enumerate(engines)}
        self._requests = requests
        self._numbers = requests.numbers
        self._takes_outputs = requests.takes_outputs
        self._record = requests.record
        self._fail = fail
        self._sends_identity = sends_identity
        self._nan_check = nan_check
        self._received: tuple[float, float] | None = None
        """Unix and monotonic time at which the step was received whose outputs are recorded."""
        self._stamp = 0.0
        self._prompt_tokens = 0
        self._unseen: dict[str, int] = {}

    @property
    def states(self) -> dict[str, Any]:
        """The front end's unfinished requests by name."""
        return getattr(self._processor(), "request_states", {})

    def compare(self) -> None:
        """Notice requests that have left without a wrapper's notice; about once a second, in the thread."""
        states, before = self.states, self._unseen
        gone = {name: before.get(name, 0) + 1 for name in [*self._numbers] if name not in states}
        self._unseen = gone
        if lost := [name for name, calls in gone.items() if calls > UNSEEN_CALLS]:
            for name in lost:
                self._numbers.pop(name, None)
            self._lose("requests have left unseen")

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
        if number not in self._index:
            # Otherwise its outputs would be those of the engine that ends a step next.
            self._skip("an engine is unknown")
            return None
        self._record(self._requests.step_ended, self._index[number], is_slice)
        tokens, self._prompt_tokens = self._prompt_tokens, 0
        return tokens

    def _lose(self, problem: str) -> None:
        """Count what could not be recorded as dropped, so that the requests are compared later."""
        self._fail(problem)
        self._requests.dropped += 1

    def _skip(self, problem: str) -> None:
        """Forget the outputs of a step that cannot be recorded."""
        self._received, self._prompt_tokens = None, 0
        self._record(self._requests.skip)
        self._lose(problem)

    def _around_outputs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def process_outputs(*args: Any, **kwargs: Any) -> Any:
            taken = None
            try:
                outputs = args[0] if args else kwargs["engine_core_outputs"]
                # An iterator has no length; read here, it would be empty for the original.
                if len(outputs):
                    stamp = args[1] if len(args) > 1 else kwargs["engine_core_timestamp"]
                    if self._received is not None and stamp != self._stamp:
                        self._skip("the end of a step was not recorded")
                    self._stamp = stamp
                    taken = self._take(outputs)
            except Exception:  # noqa: BLE001 - an exception here ends serving
                self._lose("outputs could not be read")
            result = original(*args, **kwargs)
            if taken is not None:
                try:
                    self._hand_over(stamp, *taken, result.reqs_to_abort)
                except Exception:  # noqa: BLE001 - as above
                    self._lose("outputs could not be recorded")
            return result

        return process_outputs

    def _take(
        self, outputs: Sequence[Any]
    ) -> tuple[Sequence[int], Sequence[int], list[tuple[Any, Any, int, bool]]]:
        """Return the numbers of outputs' requests, their tokens, and the outputs that have more.

        The latter come with their states, with the tokens of their prompts, and with whether they are
        the first of these. The original changes that, and the lists of tokens. This is the only place
        that looks at every output.
        """
        if self._received is None:
            self._received = _wall(), _monotonic()
        numbers: Sequence[int] = ()
        tokens: Sequence[int] = ()
        if self._takes_outputs:
            # Names would keep memory from being used again while they wait for the thread, and objects
            # that both threads count references of move from core to core: an array is of neither.
            number = self._numbers.get
            # Comprehensions read a struct's attribute in half the time of an attrgetter.
            numbers = array("Q", [number(output.request_id, 0) for output in outputs])
            if [output for output in outputs if len(output.new_token_ids) != 1]:
                tokens = [len(output.new_token_ids) for output in outputs]
        if self._nan_check:
            special = [o for o in outputs if o.events or o.finish_reason is not None or _nans(o)]
        else:
            special = [o for o in outputs if o.events or o.finish_reason is not None]
        found, states = [], self.states
        for output in special:
            state = states.get(output.request_id)
            # vLLM ignores outputs after a client has left.
            prompt = (0, False) if state is None else (state.prompt_len, state.is_prefilling)
            found.append((output, state, *prompt))
        return numbers, tokens, found

    def _hand_over(
        self,
        stamp: float,
        numbers: Sequence[int],
        tokens: Sequence[int],
        special: list[tuple[Any, Any, int, bool]],
        stopped: Iterable[str],
    ) -> None:
        """Record outputs, after the original has decided which of their requests end."""
        assert self._received is not None
        ended, events, states = [], [], self.states
        for output, state, prompt_tokens, is_first in special:
            name, reason = output.request_id, output.finish_reason
            if output.events or self._nan_check:
                events.append(self._special(output, prompt_tokens, is_first=is_first))
            if reason is not None and state is not None and name not in states:
                ended.append((name, _final_reason(int(reason), state)))
        # A session that the engine has ended is among them, too: its own reason comes first.
        ended += [(name, STOP) for name in stopped]
        numbered = [
            (number, reason)
            for name, reason in ended
            if (number := self._numbers.pop(name, None)) is not None
        ]
        outputs = Outputs(stamp, *self._received, numbers, tokens, events, numbered)
        self._record(self._requests.outputs, outputs, size=len(numbers) or 1)

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
        number = self._numbers.get(output.request_id)
        return Special(number, events, is_first, prompt_tokens, prompt, is_corrupted)

    def _around_add(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_request(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            try:
                self._add(args[0] if args else kwargs["request"])
            except Exception:  # noqa: BLE001 - an exception here refuses the request
                self._lose("a request could not be recorded")
            return result

        return add_request

    def _add(self, request: Any) -> None:
        name = request.request_id
        state = self.states.get(name)
        if state is None:
            # A session whose user sends no more input, and which has answered all of it.
            self._leave([(name, -1)], STOP)
            return
        parent, client = state.parent_req, None
        sampling = getattr(request, "sampling_params", None)
        extra = getattr(sampling, "extra_args", None) or {}
        transfer = extra.get("kv_transfer_params")
        if self._sends_identity:
            shown = getattr(request, "external_req_id", None)
            shown = shown or (name if parent is None else parent.request_id)
            priority = getattr(request, "priority", 0)
            trace = getattr(request, "trace_headers", None)
            client = shown, request.cache_salt, trace, priority, join_key(transfer, name)
        added = Added(
            self._requests.number(name),
            name,
            request.arrival_time,
            state.prompt_len,
            state.lora_name,
            state.max_tokens_param,
            0 if parent is None else parent.sampling_params.n,
            getattr(state, "remote_prefill_cached_tokens", None),
            client,
            transfer_of(transfer),
        )
        self._record(self._requests.added, added)

    def _around_abort(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def abort_requests(*args: Any, **kwargs: Any) -> Any:
            aborted = original(*args, **kwargs)
            try:
                if len(aborted):
                    self._leave([(name, self._engine_of(name)) for name in aborted], ABORT)
            except Exception:  # noqa: BLE001 - an exception here leaves the request in the engine
                self._lose("an abort could not be recorded")
            return aborted

        return abort_requests

    def _leave(self, names: Iterable[tuple[str, int]], reason: int) -> None:
        """Record requests that have left, with the indexes of their engines."""
        numbered = [
            (number, engine)
            for name, engine in names
            if (number := self._numbers.pop(name, None)) is not None
        ]
        self._record(self._requests.left, numbered, reason, _monotonic(), _wall())

    def _engine_of(self, name: str) -> int:
        """Return the index of a request's engine; -1 if it is unknown."""
        engine = getattr(self._client(), "reqs_in_flight", {}).get(name)
        return -1 if engine is None else self._index.get(int.from_bytes(engine, "little"), -1)


def _nans(output: Any) -> int:
    found: int = output.num_nans_in_logits
    return found


def _final_reason(reason: int, state: Any) -> int:
    """Return why a request has ended: its last token may also have completed a stop string."""
    if reason in (LENGTH, REPETITION):
        last = getattr(getattr(state.queue, "output", None), "outputs", ())
        # Parallel samples are sent when the last one has ended.
        held = getattr(state.parent_req, "output_aggregator", ())
        for one in (*last, *held):
            if getattr(one, "index", None) == state.request_index and one.finish_reason:
                return FINISH_REASONS.index(one.finish_reason)
    return reason
