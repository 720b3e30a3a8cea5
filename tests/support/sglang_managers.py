"""A tokenizer manager as SGLang's, as far as requests end in it."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

from collectors import TOKENIZER, TokenizerMetricsCollector
from sidestep_adapters.sglang import taps

_numbers = itertools.count(1)


class Manager:
    """A stand-in of SGLang's tokenizer manager, with a collector as the plugin makes SGLang make it."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}
        self.last_receive_tstamp = 0.0
        collector = taps.tapped(TokenizerMetricsCollector, "tokenizer")
        self.metrics_collector: Any = collector(dict(TOKENIZER))
        # SGLang registers the function after it has made the collector.
        self.dispatch_abort = self._handle_abort_req

    async def generate_request(self) -> None:
        """Identify the manager to the plugin."""

    def ask(self, rid: str = "", **options: Any) -> Any:
        """Begin a request, and return its state."""
        asked = SimpleNamespace(
            rid=rid or f"rid{next(_numbers)}",
            **{"sampling_params": {"max_new_tokens": 8}, "text": "secret prompt", **options},
        )
        now = time.perf_counter()
        times = SimpleNamespace(
            created_time=now,
            first_token_time=0.0,
            finished_time=0.0,
            api_server_dispatch_finish_time=now + 0.001,
        )
        state = SimpleNamespace(
            obj=asked,
            time_stats=times,
            dispatched=True,
            abort_sent=False,
            finished=False,
            output_ids=[],
        )
        self.rid_to_state[asked.rid] = state
        return state

    def finish(
        self,
        state: Any,
        output: int = 3,
        *,
        prompt: int = 5,
        cached: int = 0,
        details: dict[str, int] | None = None,
        reason: Any = None,
        retractions: int = 0,
        scheduler: Any = None,
    ) -> None:
        """End a request by an output of the scheduler's, together with another request's output."""
        times = state.time_stats
        times.first_token_time = times.first_token_time or times.created_time + 0.25
        times.finished_time = times.created_time + 1.0
        state.finished = True
        received = SimpleNamespace(
            finished_reasons=[None, reason or {"type": "stop", "matched": 1}],
            prompt_tokens=[0, prompt],
            completion_tokens=[0, output],
            cached_tokens=[0, cached],
            cached_tokens_details=[None, details],
            retraction_counts=[0, retractions],
            spec_num_correct_drafts=[],
            time_stats=[None, scheduler],
        )
        del self.rid_to_state[state.obj.rid]
        self.collect_metrics(state, received, 1)

    def collect_metrics(self, state: Any, recv_obj: Any, i: int) -> None:
        """Count a request that has ended."""
        self.metrics_collector.observe_one_finished_request(
            dict(self.metrics_collector.labels),
            recv_obj.prompt_tokens[i],
            recv_obj.completion_tokens[i],
            recv_obj.cached_tokens[i],
            details=recv_obj.cached_tokens_details[i],
            stream=getattr(state.obj, "stream", False),
        )

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ask the scheduler to abort a request; it ends later."""
        if not abort_all:
            state: Any = self.rid_to_state.get(rid)
            if state is None or state.abort_sent:
                return
            state.abort_sent = True
        self.metrics_collector.observe_one_aborted_request(self.metrics_collector.labels)

    def _handle_abort_req(self, recv_obj: Any) -> str:
        """End a request that the scheduler has taken from its queue."""
        state = self.rid_to_state.pop(recv_obj.rid, None)
        if state is not None:
            state.finished = True
            state.time_stats.finished_time = state.time_stats.created_time + 1.0
        return "handled"

    def _release_req_states_on_failure(self, request_states: dict[str, Any]) -> str:
        """Forget the requests that the scheduler does not have, and abort the others."""
        for rid, state in request_states.items():
            if self.rid_to_state.get(rid) is state and state is not None:
                if state.dispatched:
                    self.abort_request(rid)
                else:
                    del self.rid_to_state[rid]
        return "released"

    def fail(self, state: Any, error: BaseException) -> None:
        """End the handler of a request by an exception."""

        def handle() -> None:
            raise error

        try:
            handle()
        except BaseException:  # noqa: BLE001 - cancellations as well
            self._release_req_states_on_failure({state.obj.rid: state})
