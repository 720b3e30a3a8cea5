"""Progress of SGLang's scheduler and tokenizer, read from their attributes in the publisher thread.

Nothing runs on SGLang's own threads. What a release lacks is unknown.
"""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import msgspec

from sidestep.protocol.progress import ASLEEP, OVERDUE, PAUSED, STARTING, Progress
from sidestep_adapters.publisher.progress import ProgressMeter, Reading

WARM_UP = 600.0
"""Seconds for which the first step may last: SGLang gives as many to the request of its warm-up."""
SECONDS_PER_TOKEN, MAX_PREFILL = 0.01, 100.0
"""Seconds that the prefill of a prompt takes a slow engine, for each token and at most.

How long it took last says little: the prompt's blocks may have been cached.
"""
CHARACTERS_PER_TOKEN = 4
MAX_GAP = 0.25
"""Most seconds that a wait for a due answer is reported to have lasted.

The exporter learns from these which waits are normal; stalls are not.
"""
INPUT_METHOD = "process_input_requests"
"""Method of the scheduler that runs all requests, of clients and of operators."""
_CONTROL = re.compile("lora|weight|memory_occupation|profile|hicache_storage")
"""A part of the names of operators' requests that may keep the scheduler's loop for long."""


def constructing(method: str) -> Any:
    """Return the object with this method that constructs a collector just now; None without one.

    SGLang gives a collector no reference to the object that owns it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(type(found), method):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


class SchedulerProgress:
    """Measures the progress of a scheduler.

    Args:
        scheduler: The scheduler, which may still load its model.

    Attributes:
        method: A method by which a scheduler is recognized.
    """

    method = "event_loop_normal"

    def __init__(self, scheduler: Any, engine: int) -> None:
        self._scheduler = weakref.ref(scheduler)
        # The thread that constructs the scheduler runs its event loop, too.
        self._thread = threading.get_ident()
        self._meter = ProgressMeter(engine, self._thread)
        self._begun, self._tokens = 0, 0
        self._changed_at = 0.0
        self._ended = 0
        """Number of the last step that has ended."""
        self._is_controlled = False
        """True if the loop ran an operator's request at the last wake."""

    def __call__(self, now: float) -> Progress | None:
        """Return the progress at ``now``; None if it cannot be known."""
        scheduler = self._scheduler()
        if scheduler is None or not _is_readable(scheduler):
            return None
        progress = self._meter.measure(self._read(scheduler, now), now)
        if progress.waiting_age is not None and is_disaggregated(scheduler):
            # Requests may wait for another node to take or to send their KV blocks.
            return msgspec.structs.replace(progress, waiting_age=None, stack=[])
        return progress

    def _read(self, scheduler: Any, now: float) -> Reading:
        if _condition(scheduler):
            # The step that is open goes on when the scheduler does.
            self._changed_at = now
        begun = getattr(scheduler, "forward_ct", 0)
        tokens = max(map(_tokens, _running_batches(scheduler)), default=0)
        longest, longest_tokens = 0.0, 0
        if (begun, bool(tokens)) != (self._begun, bool(self._tokens)):
            if self._tokens and self._ended:
                # The first step is the warm-up, which is no measure of later ones.
                longest, longest_tokens = now - self._changed_at, self._tokens
            self._changed_at = now
        self._begun, self._tokens = begun, tokens
        self._ended = max(self._ended, begun - bool(tokens))
        unfinished = _unfinished(scheduler)
        was_controlled = self._is_controlled
        is_overdue = unfinished > 0 and now - self._changed_at >= OVERDUE
        self._is_controlled = is_overdue and _runs_control(self._thread)
        if was_controlled and not self._is_controlled:
            self._changed_at = now
        is_open = bool(tokens and unfinished) and not self._is_controlled
        is_warming_up = is_open and not self._ended and now - self._changed_at < WARM_UP
        return Reading(
            unfinished,
            self._ended,
            self._changed_at if is_open else None,
            tokens,
            # A step that has begun and ended between two wakes counts as one that has just ended.
            self._changed_at,
            longest=longest,
            longest_tokens=longest_tokens,
            condition=_condition(scheduler) or (STARTING if is_warming_up else ""),
            blocked=lambda: unfinished if self._is_controlled else _blocked(scheduler),
        )


class TokenizerProgress:
    """Measures how long the answer that a tokenizer waits for has been due.

    Attributes:
        method: A method by which a tokenizer manager is recognized.
    """

    method = "generate_request"

    def __init__(self, manager: Any, engine: int) -> None:
        self._manager = weakref.ref(manager)
        self._meter = ProgressMeter(engine, threading.get_ident())
        self._received: float | None = getattr(manager, "last_receive_tstamp", None)
        self._answers = 0
        self._answered_at = 0.0
        self._owed_since: float | None = None
        self._due_at: float | None = None
        """When the next answer may have come from a slow engine; None: none is owed."""
        self._is_excused = False
        """True if the scheduler runs an operator's request, as far as the tokenizer knows."""

    def __call__(self, now: float) -> Progress | None:
        """Return the progress at ``now``; None if it cannot be known."""
        manager = self._manager()
        # Requests of a node for prefill or decode only depend on other nodes.
        if manager is None or self._received is None or is_disaggregated(manager):
            return None
        return self._meter.measure(self._read(manager, now), now)

    def _read(self, manager: Any, now: float) -> Reading:
        longest = 0.0
        if self._is_excused or getattr(manager, "is_pause", False):
            self._due_at, self._answered_at = None, now
        if manager.last_receive_tstamp != self._received:
            self._received = manager.last_receive_tstamp
            if self._answers and self._due_at is not None:
                # The first one ends the warm-up, which is no measure of later ones.
                longest = min(max(0.0, now - self._due_at), MAX_GAP)
            self._answered_at = now
            self._answers += 1
        # Others wait until the engine is resumed, has new weights, or they are tokenized.
        states = tuple(manager.rid_to_state.values())
        sent = [each for each in states if getattr(each, "dispatched", True)]
        if not sent:
            self._owed_since = self._due_at = None
        else:
            self._owed_since = now if self._owed_since is None else self._owed_since
            # Prompts are prefilled in turn: the next answer takes no longer than the longest prompt.
            prefill = min(max(map(_prompt_tokens, sent)) * SECONDS_PER_TOKEN, MAX_PREFILL)
            self._due_at = max(self._owed_since, self._answered_at) + prefill
        is_late = self._due_at is not None and now - self._due_at >= OVERDUE
        self._is_excused = (is_late or self._is_excused) and _awaits_control(manager)
        is_first = bool(sent) and not self._answers and now - (self._owed_since or now) < WARM_UP
        condition = PAUSED if getattr(manager, "is_pause", False) else ""
        return Reading(
            len(sent),
            self._answers,
            None if self._is_excused else self._due_at,
            longest=longest,
            condition=condition or (STARTING if is_first else ""),
        )


def _condition(scheduler: Any) -> str:
    """Return why a scheduler runs no step on purpose; empty if it should."""
    if getattr(scheduler, "is_initializing", not hasattr(scheduler, "running_batch")):
        return STARTING
    if getattr(scheduler, "_engine_paused", False):
        return PAUSED
    is_asleep = getattr(getattr(scheduler, "weight_updater", scheduler), "offload_tags", None)
    return ASLEEP if is_asleep else ""


def _runs_control(thread: int) -> bool:
    """Return whether a scheduler's thread runs an operator's request, such as to load an adapter."""
    inner: list[str] = []
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_name != INPUT_METHOD:
        inner.append(frame.f_code.co_name)
        frame = frame.f_back
    return frame is not None and any(map(_CONTROL.search, inner))


def _awaits_control(manager: Any) -> bool:
    """Return whether a tokenizer waits for the scheduler to run an operator's request."""
    return any(
        getattr(sent, "_result_event", None) is not None
        for name, sent in tuple(vars(manager).items())
        if name.endswith("_communicator") and _CONTROL.search(name)
    )


def is_disaggregated(owner: Any) -> bool:
    """Return whether a scheduler or a tokenizer belongs to a node for prefill or decode only."""
    mode = getattr(owner, "disaggregation_mode", None)
    return str(getattr(mode, "value", mode)).lower() not in ("null", "none")


def _is_readable(scheduler: Any) -> bool:
    """Return whether a scheduler says which steps it runs."""
    has_steps = hasattr(scheduler, "forward_ct") or not hasattr(scheduler, "running_batch")
    # The loop that multiplexes prefill and decode does not say which batch it runs.
    return has_steps and not getattr(scheduler, "enable_pdmux", False)


def _running_batches(scheduler: Any) -> Iterator[Any]:
    """Yield the batches whose results the scheduler does not have yet."""
    # Older releases have no other name for it.
    yield getattr(scheduler, "cur_batch_for_debug", getattr(scheduler, "cur_batch", None))
    if getattr(scheduler, "enable_overlap", False):
        # The loop may have launched no further one when it waits for this one.
        yield getattr(scheduler, "last_batch", None)


def _tokens(batch: Any) -> int:
    """Return the tokens of a batch; 0 of one without requests, which keeps step with other ranks."""
    requests = len(getattr(batch, "reqs", None) or ())
    mode = getattr(batch, "forward_mode", None)
    is_prefill = requests and mode is not None and mode.is_extend()
    return int((is_prefill and getattr(batch, "extend_num_tokens", 0)) or requests)


def _unfinished(scheduler: Any) -> int:
    """Return how many requests the scheduler has admitted, or has waiting."""
    batches = (
        *_running_batches(scheduler),
        getattr(scheduler, "running_batch", None),
        # Those of a pipeline's stages.
        *(getattr(scheduler, "running_mbs", None) or ()),
    )
    # The batch that runs is mostly the same object as the running one.
    known = {id(batch): batch for batch in batches}.values()
    requests = [each for batch in known for each in tuple(getattr(batch, "reqs", None) or ())]
    requests.append(getattr(scheduler, "chunked_req", None))
    admitted = {id(each) for each in requests if each is not None and not each.finished()}
    waiting = getattr(scheduler, "waiting_queue", ())
    return len(admitted) + len(waiting) + len(waiting_for_grammars(scheduler))


def _blocked(scheduler: Any) -> int:
    """Return how many requests wait for a grammar, or may wait for cached blocks from a storage."""
    stored = getattr(scheduler, "enable_hicache_storage", False)
    waiting = len(getattr(scheduler, "waiting_queue", ())) if stored else 0
    return waiting + len(waiting_for_grammars(scheduler))


def waiting_for_grammars(scheduler: Any) -> Any:
    """Return the requests whose grammar is being compiled."""
    return getattr(getattr(scheduler, "grammar_manager", scheduler), "grammar_queue", ())


def _prompt_tokens(state: Any) -> int:
    """Return about how many tokens a prompt without any answer has; 0 of one with an answer."""
    if getattr(state, "ttft_observed", False):
        return 0
    request = getattr(state, "obj", None)
    tokens = len(getattr(request, "input_ids", None) or ())
    return tokens or len(getattr(request, "text", None) or "") // CHARACTERS_PER_TOKEN
