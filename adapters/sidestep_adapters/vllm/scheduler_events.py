"""Conversion of a vLLM scheduler's events to wire items; runs in the publisher thread.

Requests get numbers here; their ids, prompts and tokens stay in the process.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from sidestep.protocol.cache_lookups import AGAIN, COUNTED, NOT_LOOKED_UP, CacheLookups
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep.protocol.limits import printable
from sidestep.protocol.request_events import (
    PREEMPTED,
    RECEIVED,
    RUNNING,
    WAITING,
    Alive,
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Preempted,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep_adapters.publisher.cache_lookups import LookupEvents
from sidestep_adapters.publisher.request_identity import NONE, IdentityMaker
from sidestep_adapters.publisher.translate import client_count
from sidestep_adapters.vllm.ended_steps import EndedSteps
from sidestep_adapters.vllm.event_batches import (
    SAMPLE,
    batches,
    join_key,
    parallel_sample,
    transfer_of,
)

DeferredEvent = tuple[Callable[..., Event | None], Any]
"""A function that makes an event in the publisher thread, and its arguments."""

_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z")
_STATES = {"RUNNING": RUNNING, "PREEMPTED": PREEMPTED}
"""vLLM's names of states; a request in any other waits."""
STOP = FINISH_REASONS.index("stop")
_monotonic = time.monotonic

Taken = tuple[list[str], list[int], list[tuple[str, Any]]]
"""Of outputs: names, numbers of tokens, and of first outputs the name and what is known of the prompt."""

OpenStep = tuple[Any, float | None, int | None]
"""A step that has begun: its batch, when its scheduling began, and the limit; None: unknown."""


class SchedulerEvents:
    """Converter of one scheduler's recorded events to items.

    Args:
        fail: Called inside ``except`` with a description of the problem.
        nan_check: Whether outputs report NaNs in logits.
        identities: Maker of the identities that are sent; None: none are.
        has_suffix: Whether the engine has added a random suffix to its clients' ids.
        lookups: Maker of items of the requests' lookups in the prefix cache; None: none are sent.
    """

    def __init__(
        self,
        fail: Callable[[str], None],
        *,
        nan_check: bool = False,
        identities: IdentityMaker | None = None,
        has_suffix: bool = False,
        lookups: LookupEvents | None = None,
    ) -> None:
        self.lookups = lookups
        self.steps = EndedSteps()
        self._identities = identities or IdentityMaker(NONE)
        self._has_suffix = has_suffix
        self._fail = fail
        self._nan_check = nan_check
        self._source = secrets.randbits(40)
        self._numbers: dict[str, int] = {}
        self._requests: dict[int, Any] = {}
        self._awaiting_output: set[str] = set()
        self._corrupted: set[str] = set()
        self._last_number = 0

    def tick(self, known_until: float = 0.0) -> RequestEvents:
        """Return an item without events, which advances the exporter's clock of an idle engine."""
        return RequestEvents(0, _monotonic(), self._source, [], known_until)

    def current_state(self) -> list[RequestEvents]:
        """Return the scheduler's requests, for an exporter that did not receive their events."""
        stamp = _monotonic()
        deferred = [
            (self._alive, (number, request, stamp)) for number, request in self._requests.items()
        ]
        return self.items(deferred)

    def resync(self) -> list[RequestEvents]:
        """Restart the event stream after events were dropped, as requests may have ended among them.

        A new source discards the requests that the exporter tracks; it then gets the current ones.
        """
        known = len(self._requests)
        self._requests = {n: r for n, r in self._requests.items() if not r.is_finished()}
        self._numbers = {r.request_id: number for number, r in self._requests.items()}
        self._awaiting_output.intersection_update(self._numbers)
        self._corrupted.intersection_update(self._numbers)
        self._source = secrets.randbits(40)
        if self.lookups is not None:
            self.lookups.restart()
        items = self.current_state() or [self.tick()]
        items[0].unseen = known - len(self._requests)
        return items

    def all_items(self, deferred: Iterable[DeferredEvent]) -> list[RequestEvents | CacheLookups]:
        """Return the items of the recorded events, and of the lookups among them."""
        items = self.items(deferred)
        return [*items, *(self.lookups.items(_monotonic()) if self.lookups is not None else ())]

    def items(self, deferred: Iterable[DeferredEvent]) -> list[RequestEvents]:
        """Return the items of the recorded events; unreadable events are counted and left out."""
        events: list[Event] = []
        for make, args in deferred:
            try:
                event = make(*args)
            except Exception:  # noqa: BLE001 - an invalid value drops its own event only
                self._fail("a scheduler event could not be translated")
                continue
            if event is not None:
                events.append(event)
        return self._split(events)

    def _split(self, events: Sequence[Event]) -> list[RequestEvents]:
        stamp = _monotonic()
        return [RequestEvents(0, stamp, self._source, some) for some in batches(events, self._fail)]

    def _number(self, request_id: str) -> int:
        number = self._numbers.get(request_id)
        if number is None:
            self._last_number += 1
            number = self._numbers[request_id] = self._last_number
        return number

    def queued(self, request: Any, stamp: float, arrival: float, tokens: int) -> Queued:
        """Return the event of a queued request, with its attributes at that time."""
        number = self._number(request.request_id)
        self._requests[number] = request
        self._awaiting_output.add(request.request_id)
        event = Queued(number, stamp, arrival, tokens, _adapter(request))
        event.group, event.sample = parallel_sample(request.request_id)
        event.identity, event.max_tokens = self._identity(request), _max_tokens(request)
        event.transfer = transfer_of(_transfer_params(request))
        return event

    def _identity(self, request: Any) -> Identity | None:
        if not self._identities.is_on:
            return None
        name = str(request.request_id)
        found = SAMPLE.fullmatch(name)
        name = name if found is None else found[2]
        return self._identities.make(
            _SUFFIX.sub("", name) if self._has_suffix else name,
            getattr(request, "cache_salt", None),
            getattr(request, "trace_headers", None),
            getattr(request, "priority", 0),
            join_key(_transfer_params(request), request.request_id),
        )

    def _alive(self, number: int, request: Any, stamp: float) -> Alive:
        state = _STATES.get(getattr(request.status, "name", ""), WAITING)
        if state == WAITING and request.num_preemptions:
            state = PREEMPTED
        event = Alive(number, stamp, state, request.arrival_time, request.num_prompt_tokens)
        event.adapter, event.identity = _adapter(request), self._identity(request)
        event.max_tokens = _max_tokens(request)
        event.transfer = transfer_of(_transfer_params(request))
        return event

    def scheduled(
        self,
        request_id: str,
        when: tuple[float, float, float],
        looked_up: tuple[int, int, int] | None = None,
        found: int = 0,
        stats: Any = None,
    ) -> Scheduled:
        """Return the event of a request that joined the batch.

        Args:
            request_id: Its id.
            when: Monotonic seconds; and from when to when it has waited for KV from another engine.
            looked_up: Its full blocks, tokens and preemptions at that time; None: no lookup is sent.
            found: How many of its tokens were found in any cache.
            stats: The engine's ``PrefillStats``, with the tokens that were found in its own cache.
        """
        number = self._number(request_id)
        request = self._requests.get(number)
        if self.lookups is not None and request is not None and looked_up is not None:
            blocks, tokens, preemptions = looked_up
            local = getattr(stats, "num_local_cached_tokens", found)
            hashes = request.block_hashes[:blocks]
            skipped = getattr(request, "skip_reading_prefix_cache", False)
            kind = AGAIN if preemptions else NOT_LOOKED_UP if skipped else COUNTED
            self.lookups.looked_up(number, when[0], hashes, tokens, local, kind=kind)
        return Scheduled(number, *when)

    def preempted(self, request_id: str, stamp: float) -> Preempted:
        """Return the event of a preempted request."""
        number = self._number(request_id)
        if number in self._requests:
            self._release(number, stamp, self._requests[number])
        return Preempted(number, stamp)

    def cache_cleared(self, stamp: float) -> None:
        """Note that the prefix cache was emptied."""
        if self.lookups is not None:
            self.lookups.cleared(stamp)

    def _release(self, number: int, stamp: float, request: Any) -> None:
        if self.lookups is not None:
            self.lookups.released(number, stamp, request.block_hashes)

    def taken(self, outputs: Sequence[Any]) -> Taken:
        """Return what is read of an API server's outputs; on the step's thread.

        Outputs that wait for the publisher thread would cost the step more, in garbage collection.
        """
        names = [output.request_id for output in outputs]
        tokens = [len(output.new_token_ids) for output in outputs]
        if self._nan_check:
            self._corrupted.update(o.request_id for o in outputs if o.num_nans_in_logits)
        # A request's first output has the events until then; older releases say how much was cached only.
        first, cached = [output for output in outputs if output.events], "num_cached_tokens"
        begun = [
            (one.request_id, getattr(one, "prefill_stats", None) or getattr(one, cached, None))
            for one in first
        ]
        return names, tokens, begun

    def iteration(
        self,
        opened: OpenStep,
        stamp: float,
        wall: float,
        clients: Sequence[tuple[float, Sequence[str], Sequence[int], Sequence[tuple[str, Any]]]],
    ) -> Iteration:
        """Return the event of a step.

        Args:
            opened: Its batch, when the scheduling of that began, and the limit that held afterwards.
            stamp: When it ended.
            wall: Unix time of that.
            clients: The timestamp of each API server's outputs, and what ``taken`` has read of them.
        """
        batch, started, limit = opened
        outputs: list[Output] = []
        prompts: list[Prompt] = []
        names: list[str] = []
        for at, served, tokens, begun in clients:
            if served:
                outputs.append(self._output(at, served, tokens))
                prompts += self._prompts(begun)
                names += served
        computed = sum(batch.num_scheduled_tokens.values())
        if computed:
            self.steps.add(started, stamp, computed, has_output=bool(outputs))
        stamp = outputs[0].stamp if outputs else stamp
        step = Iteration(started if started is not None else stamp, stamp, wall, outputs)
        step.prompts, step.limit = prompts, limit
        self._batch(step, names, batch.num_scheduled_tokens, computed)
        cached = batch.scheduled_cached_reqs
        step.kv_tokens = sum(cached.num_computed_tokens) + sum(
            new.num_computed_tokens for new in batch.scheduled_new_reqs
        )
        return step

    def limited(self, stamp: float, wall: float, limit: int) -> Iteration:
        """Return the event of a limit without a step: no request is computed, and none had output."""
        return Iteration(stamp, stamp, wall, limit=limit)

    def _output(self, stamp: float, names: Sequence[str], tokens: Sequence[int]) -> Output:
        requests = [*map(self._numbers.get, names)]
        if None in requests:
            # Its queued event was dropped, or this release has none.
            requests = [self._number(name) for name in names]
        even = tokens.count(1) == len(tokens)
        return Output(stamp, cast("list[int]", requests), [] if even else list(tokens))

    def _batch(
        self, step: Iteration, names: Sequence[str], scheduled: Mapping[str, int], computed: int
    ) -> None:
        """Add the batch, unless its requests are those with output, with one token each."""
        even = computed == len(scheduled)
        if even and list(scheduled) == names and not any(o.tokens for o in step.outputs):
            return
        numbers = self._numbers
        known = [(number, scheduled[n]) for n in scheduled if (number := numbers.get(n))]
        step.scheduled = [number for number, _ in known]
        step.tokens = [] if even else [count for _, count in known]

    def _prompts(self, begun: Sequence[tuple[str, Any]]) -> list[Prompt]:
        """Return the prompts of requests that have their first output."""
        first = [(name, stats) for name, stats in begun if name in self._awaiting_output]
        self._awaiting_output.difference_update(name for name, _ in first)
        prompts = (self._prompt(name, stats) for name, stats in first)
        return [prompt for prompt in prompts if prompt is not None]

    def _prompt(self, name: str, stats: Any) -> Prompt | None:
        number = self._number(name)
        if isinstance(stats, int):
            if number not in self._requests:
                return None
            return Prompt(number, self._requests[number].num_prompt_tokens - stats, stats)
        if stats is None:
            return None
        local, external = stats.num_local_cached_tokens, stats.num_external_cached_tokens
        return Prompt(number, stats.num_computed_tokens, local, external)

    def finished(self, request: Any, stamp: float, wall: float, stopped: bool) -> Finished:
        """Return the event of a request that ended; ``stopped`` if its user closed the session."""
        number = self._number(request.request_id)
        self._release(number, stamp, request)
        del self._numbers[request.request_id]
        self._requests.pop(number, None)
        self._awaiting_output.discard(request.request_id)
        reason = STOP if stopped else int(request.get_finished_reason() or STOP)
        event = Finished(number, stamp, wall, reason, request.num_prompt_tokens)
        event.generation_tokens = request.num_output_tokens
        event.preemptions = request.num_preemptions
        event.max_tokens = _max_tokens(request)
        event.stop_strings = bool(getattr(request.sampling_params, "stop", None))
        event.corrupted = request.request_id in self._corrupted
        self._corrupted.discard(request.request_id)
        if getattr(request.status, "name", "") == "FINISHED_IGNORED":
            event.refused = "prompt_too_long"
        event.cached_tokens = _cached_elsewhere(request)
        event.transfer = transfer_of(_transfer_params(request))
        return event


def _cached_elsewhere(request: Any) -> int | None:
    """Return the cached prompt tokens that vLLM reports for a prompt computed by another engine."""
    params = _transfer_params(request)
    if transfer_of(params) != RECEIVED:
        return None
    return client_count(params.get("remote_prefill_cached_tokens"))


def _transfer_params(request: Any) -> Any:
    return getattr(request, "kv_transfer_params", None)


def _adapter(request: Any) -> str:
    adapter = request.lora_request
    return "" if adapter is None else printable(adapter.lora_name)


def _max_tokens(request: Any) -> int | None:
    return client_count(getattr(request.sampling_params, "max_tokens", None))
