"""Front ends of vLLM's shape with the plugin's hook, at simulated times and without a publisher."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fake_vllm import (
    AsyncLLM,
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    FinishReason,
)
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import Item, encode_item
from sidestep.protocol.messages import FRONT_END, REQUEST_EVENTS, EngineInfo
from sidestep_adapters.publisher.request_identity import identity_maker
from sidestep_adapters.vllm.front_end_events import RequestEventItems
from sidestep_adapters.vllm.front_end_requests import FrontEndLatencyItems
from sidestep_adapters.vllm.output_hook import OutputHook

WALL, ENGINE = 1000.0, 64.0
"""What Unix time and the engines' time are ahead of the front ends' monotonic time."""


class Clock:
    """The time of front ends."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        module = "sidestep_adapters.vllm"
        patch.setattr(f"{module}.output_hook._monotonic", lambda: self.now)
        patch.setattr(f"{module}.output_hook._wall", lambda: self.wall)
        times = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.wall)
        for name in ("front_end_events", "front_end_requests"):
            patch.setattr(f"{module}.{name}.time", times)

    @property
    def wall(self) -> float:
        """Unix time."""
        return self.now + WALL

    @property
    def engine(self) -> float:
        """Time of the engines."""
        return self.now + ENGINE


class HookedFrontEnd:
    """A front end, the hook in it, and what the publisher's thread makes of its records."""

    def __init__(
        self,
        clock: Clock,
        engines: Sequence[int] = (0,),
        *,
        process: int = 0,
        processes: int = 1,
        tapped: bool = False,
        nan_check: bool = False,
    ) -> None:
        self.clock = clock
        self.failures: list[str] = []
        self.requests: Any = FrontEndLatencyItems(self.failures.append)
        if not tapped:
            self.requests = RequestEventItems(
                self.failures.append, len(engines), process, processes, identity_maker()
            )
        logger = SimpleNamespace(record=self._record)
        client = Client()
        if len(engines) > 1:
            client.reqs_in_flight = {}
        self.llm = AsyncLLM(client, list(engines), lambda **_: logger)
        self.hook = OutputHook(
            self.llm,
            engines,
            self.requests,
            self.failures.append,
            sends_identity=False,
            nan_check=nan_check,
        )
        for name, wrapper in self.hook.wrappers(self.llm.output_processor).items():
            setattr(self.llm.output_processor, name, wrapper)
        self.llm.log_stats = False
        self.prompt_tokens: list[int | None] = []

    def _record(self, stats: Any, iteration: Any, _: Any, engine_idx: int) -> None:
        assert iteration is None
        self.prompt_tokens.append(self.hook.step_ended(engine_idx, is_slice=stats is None))

    def add(self, name: str, prompt: int = 7, **more: Any) -> Any:
        """Accept a request now."""
        return self.llm.add_request(name, prompt, arrival=self.clock.wall, **more)

    def receive(self, *outputs: EngineCoreOutput, **more: Any) -> None:
        """Receive the outputs of a step that has ended now."""
        self.llm.receive(outputs, self.clock.engine, **more)

    def encoded(self) -> list[bytes]:
        """Return the items of all records, as they are sent."""
        made: list[Item] = []
        while len(self.requests):
            made += self.requests.items()
        return [encode_item(item) for item in made]

    def items(self) -> list[Any]:
        """Return the items of all records, as they arrive."""
        return [DIALECTS.decode(item) for item in self.encoded()]

    def events(self) -> list[Any]:
        """Return all events in the items."""
        return [event for item in self.items() for event in item.events]


class Client:
    """The client of engines; only that of several knows where requests are."""

    reqs_in_flight: dict[str, bytes]


def infos(engines: Sequence[int] = (0,), *, tapped: bool = False) -> list[EngineInfo]:
    """Describe the engines as a front end does."""
    return [
        EngineInfo(
            f"e{number}",
            "vllm",
            {"engine": str(number), "model_name": "m"},
            features=["engine_core"] if tapped else [REQUEST_EVENTS],
            role=FRONT_END if tapped else "",
        )
        for number in engines
    ]


def output(
    name: str,
    tokens: int = 1,
    *,
    prompt: tuple[int, int, int] | None = None,
    reason: FinishReason | None = None,
    nans: int = 0,
    **events: float,
) -> EngineCoreOutput:
    """Return a request's output; ``events`` are their times, in order."""
    kinds = EngineCoreEventType.__members__
    names = "num_computed_tokens", "num_local_cached_tokens", "num_external_cached_tokens"
    return EngineCoreOutput(
        name,
        [0] * tokens,
        finish_reason=reason,
        events=[EngineCoreEvent(kinds[kind.rstrip("_").upper()], at) for kind, at in events.items()]
        or None,
        prefill_stats=None
        if prompt is None
        else SimpleNamespace(**dict(zip(names, prompt, strict=True))),
        num_nans_in_logits=nans,
    )
