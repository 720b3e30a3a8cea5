"""A tap of vLLM's scheduler, called with objects that are shaped like vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item, encode_item
from sidestep.protocol.cache_lookups import CacheLookups
from sidestep.protocol.request_events import Event, RequestEvents
from sidestep_adapters.vllm.scheduler_events import SchedulerEvents
from sidestep_adapters.vllm.scheduler_tap import SchedulerTap

E = TypeVar("E", bound=Event)


class Bench:
    """A tap and the items it has pushed."""

    def __init__(self, **options: Any) -> None:
        self.pushed: list[Callable[[], Iterable[RequestEvents | CacheLookups]]] = []
        self.failures: list[str] = []
        events = SchedulerEvents(self.failures.append, **options)
        self.tap = SchedulerTap(self.pushed.append, self.failures.append, events)
        self.requests: dict[str, Any] = {}

    def decoded(self) -> list[Item]:
        """Return the items pushed since the last call, after encoding and decoding."""
        self.tap.flush()
        pushed, self.pushed[:] = self.pushed[:], []
        return [DIALECTS.decode(encode_item(item)) for make in pushed for item in make()]

    def items(self) -> list[RequestEvents]:
        """Return those with events of requests."""
        return [item for item in self.decoded() if isinstance(item, RequestEvents)]

    def events(self) -> list[Event]:
        """Return the events of ``items``."""
        return [event for item in self.items() for event in item.events]

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of ``items`` that have this type."""
        return [event for event in self.events() if isinstance(event, kind)]

    def ask(self, name: str, stamp: float = 1.0, **more: Any) -> Any:
        """Queue a request."""
        request = SimpleNamespace(
            request_id=name,
            events=[SimpleNamespace(timestamp=stamp)],
            arrival_time=100.0,
            num_prompt_tokens=7,
            num_output_tokens=3,
            num_preemptions=0,
            lora_request=None,
            sampling_params=SimpleNamespace(max_tokens=50, stop=[]),
            status=SimpleNamespace(name="WAITING"),
            get_finished_reason=lambda: 1,
            is_finished=lambda: False,
        )
        vars(request).update(more)
        self.requests[name] = request
        self.tap.queued(request)
        return request

    def schedule(
        self, *new: str, resumed: tuple[str, ...] = (), found: int = 4, **counts: int
    ) -> Any:
        """Return a batch; ``new`` and ``resumed`` join it, ``counts`` are tokens by request.

        Requests that join it have found so many tokens in a cache.
        """
        for name in (*new, *resumed):
            self.requests[name].events.append(SimpleNamespace(timestamp=2.0))
        batch = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=n, num_computed_tokens=found) for n in new],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(counts), resumed_req_ids=set(resumed), num_computed_tokens=[10]
            ),
            num_scheduled_tokens=counts,
        )
        self.tap.scheduled(batch, self.requests, 1.5)
        return batch

    def update(self, batch: Any, *clients: dict[str, int], prompts: tuple[str, ...] = ()) -> None:
        """Process the batch's output: tokens by request, per API server."""
        self.tap.update_started()
        stats = SimpleNamespace(
            num_computed_tokens=5, num_local_cached_tokens=2, num_external_cached_tokens=1
        )
        outputs = {
            index: SimpleNamespace(
                timestamp=3.0 + index,
                outputs=[
                    SimpleNamespace(
                        request_id=name,
                        new_token_ids=[0] * count,
                        events=["scheduled"] if name in prompts else None,
                        prefill_stats=stats if name in prompts else None,
                        num_nans_in_logits=int(name == "nan"),
                    )
                    for name, count in found.items()
                ],
            )
            for index, found in enumerate(clients)
        }
        self.tap.update_finished(batch, outputs)
