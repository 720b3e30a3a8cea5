"""Hooks that run when a request of SGLang's tokenizer ends or is aborted.

They run once for each request, never for a token: functions of the collector and of the tokenizer
manager are replaced by ones that call them. SGLang does not pass the collector the request's output,
which is read from the variables of the function that calls the collector.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sidestep_adapters.sglang.requests import Aborted, Ended, RequestRecorder, from_output

MAX_FRAMES = 4
"""Callers that are searched: another plugin may have replaced a function, too."""
UNREADABLE = "a request that ended could not be read"


def record_counted(
    recorder: RequestRecorder, collector: Any, adding: Any, native: Any = None
) -> None:
    """Record the requests that ``collector`` counts as finished or as aborted.

    Args:
        recorder: Records them.
        collector: Its two functions are replaced.
        adding: A copy of the collector that counts in the publisher thread.
        native: A copy of the collector that counts at once, for its own page, too.
    """

    def replace(name: str, read: Callable[[], Ended | Aborted | None]) -> None:
        original, count = getattr(collector, name), getattr(adding, name)

        def observe(*args: Any, **kwargs: Any) -> Any:
            try:
                found = read()
                is_held = found is not None and recorder.hold(
                    found, partial(count, *args, **kwargs)
                )
            except Exception:  # noqa: BLE001 - no exception may reach the engine
                is_held = False
                recorder.fail(UNREADABLE)
            if not is_held:
                return original(*args, **kwargs)
            return None if native is None else getattr(native, name)(*args, **kwargs)

        setattr(collector, name, observe)

    replace("observe_one_finished_request", _finished)
    replace("observe_one_aborted_request", _aborted)


def record_uncounted(recorder: RequestRecorder, manager: Any) -> None:
    """Record the requests that no collector counts: those aborted before they ran, or refused."""
    hooks = _Uncounted(recorder, manager)
    # The manager registers the former only after it has made its collector.
    manager._handle_abort_req = hooks.handle_abort
    manager._release_req_states_on_failure = hooks.release


class _Uncounted:
    """Replacements of two functions of a tokenizer manager, which call these."""

    def __init__(self, recorder: RequestRecorder, manager: Any) -> None:
        self._recorder = recorder
        self._manager = manager
        self._handle_abort = manager._handle_abort_req
        self._release = manager._release_req_states_on_failure

    def handle_abort(self, *args: Any, **kwargs: Any) -> Any:
        """Handle that the scheduler has aborted a request of its queue; record the request."""
        try:
            aborted, *_ = (*args, *kwargs.values())
            state = self._manager.rid_to_state.get(aborted.rid)
        except Exception:  # noqa: BLE001 - no exception may reach the engine
            self._recorder.fail(UNREADABLE)
            state = None
        result = self._handle_abort(*args, **kwargs)
        if state is not None and getattr(state, "finished", False):
            self._record(state, getattr(aborted, "finished_reason", None) or {"type": "abort"})
        return result

    def release(self, *args: Any, **kwargs: Any) -> Any:
        """Release requests after an exception; record those that the scheduler does not have."""
        raised = sys.exc_info()[0]
        try:
            request_states, *_ = (*args, *kwargs.values())
            known = self._manager.rid_to_state
            unsent = [
                state
                for rid, state in request_states.items()
                if not state.dispatched and known.get(rid) is state
            ]
        except Exception:  # noqa: BLE001 - as above
            self._recorder.fail(UNREADABLE)
            unsent = []
        result = self._release(*args, **kwargs)
        for state in unsent:
            self._record(state, _reason(raised), time.perf_counter())
        return result

    def _record(self, state: Any, reason: Any, at: float = 0.0) -> None:
        try:
            asked = state.obj
            if getattr(asked, "log_metrics", True):
                prompt = len(getattr(asked, "input_ids", None) or ())
                tokens = len(state.output_ids)
                ended = Ended(asked, state.time_stats, reason, at, False, prompt, tokens)
                self._recorder.hold(ended)
        except Exception:  # noqa: BLE001 - as above
            self._recorder.fail(UNREADABLE)


def _finished() -> Ended:
    found = _caller("state", "recv_obj", "i")
    return from_output(found["state"], found["recv_obj"], found["i"])


def _aborted() -> Aborted | None:
    found = _caller("self", "rid", "abort_all")
    # Without an id all requests are aborted, which SGLang counts once.
    state = found["self"].rid_to_state.get(found["rid"])
    return None if state is None else Aborted(state.obj)


def _reason(raised: type[BaseException] | None) -> str:
    """Return why a request ended that was not sent to the scheduler."""
    if raised is None or not issubclass(raised, Exception):
        # The request's task was cancelled, since its client has left.
        return "abort"
    return "refused" if issubclass(raised, ValueError) else "error"


def _caller(*names: str) -> Mapping[str, Any]:
    """Return the variables of the function that calls the collector, which has ``names`` among them.

    Raises:
        LookupError: There is none.
    """
    frame = sys._getframe(3)
    for _ in range(MAX_FRAMES):
        known = frame.f_code.co_varnames
        if all(name in known for name in names):
            return frame.f_locals
        if frame.f_back is None:
            break
        frame = frame.f_back
    raise LookupError("the caller has other variables than expected")
