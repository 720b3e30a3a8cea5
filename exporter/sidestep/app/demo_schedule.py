"""What ``sidestep demo`` plays, and when: its runs, and the round in which problems are staged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

ROUND = 1800.0
"""Seconds after which the schedule of the runs begins again."""
WELL = "all is well"


class Window(NamedTuple):
    """Seconds of a round, from its start."""

    start: float
    end: float

    def __str__(self) -> str:
        return f"{minutes(self.start)} to {minutes(self.end)}"


class Run(NamedTuple):
    """A recorded run.

    Attributes:
        name: Name of its recording, and prefix of its engines' identities; of vLLM also the label ``engine``.
        window: When it is played; None: always.
        fills: Whether it is played once in the window, at the speed that fills it; otherwise it is
            played at the recorded speed, over and over.
        hang: When its replay pauses with unfinished requests, like an engine that hangs.
        look: Where to look once its window, or its hang, has begun.
    """

    name: str
    text: str
    window: Window | None = None
    fills: bool = False
    hang: Window | None = None
    look: str = ""

    @property
    def labels(self) -> dict[str, str]:
        """Labels that distinguish the run's engines from other runs': each run is a model of its own."""
        if not self.name.startswith("vllm"):
            return {}
        return {"engine": self.name, "model_name": self.name}

    @property
    def act(self) -> Window | None:
        """When it needs attention; None: never."""
        return self.hang or self.window


RUNS = (
    Run(
        "vllm-full",
        "three times the requests that its 4 slots take",
        window=Window(60.0, 780.0),
        fills=True,
        look="vllm-full is full: its row on the page, sidestep why",
    ),
    Run(
        "vllm-hangs",
        "a light load; then a step that does not end",
        hang=Window(105.0, 195.0),
        look="vllm-hangs hangs: its stack is on the page",
    ),
    Run(
        "vllm-aborts",
        "every second client leaves",
        window=Window(210.0, 250.0),
        look="vllm-aborts: clients leave: finished requests in its details",
    ),
    Run(
        "vllm-lora",
        "three LoRA adapters, room for one",
        window=Window(255.0, 295.0),
        look="vllm-lora waits for adapters: sidestep why --engine vllm-lora",
    ),
    Run(
        "vllm-cache",
        "conversations in a KV cache that is too small",
        window=Window(300.0, 1260.0),
        fills=True,
        look="vllm-cache is too small: the curve in its details on the page",
    ),
    Run("sglang", "a light load"),
    Run("triton", "seven models of one server"),
)


def minutes(seconds: float) -> str:
    """Return a time of a round as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def acts(runs: Sequence[Run]) -> list[tuple[float, str]]:
    """Return what happens in a round, and where to look, by the second at which it begins."""
    staged = [(run.act, run.look) for run in runs if run.act is not None]
    end = max((window.end for window, _ in staged), default=0.0)
    found = [(0.0, WELL), *((window.start, look) for window, look in staged)]
    return sorted([*found, *([(end, f"{WELL} until the next round")] if end else [])])


class Clock:
    """The time of the rounds."""

    def __init__(self, seconds: float) -> None:
        self.length = seconds
        self._began = time.monotonic()

    def read(self) -> tuple[int, float]:
        """Return the number of the round, from 0 on, and its seconds so far."""
        number, seconds = divmod(time.monotonic() - self._began, self.length)
        return int(number), seconds
