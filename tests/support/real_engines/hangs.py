"""What the tests of hangs share: wedges of a server, requests that wait, and what must be seen."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Protocol, Self

from real_engines.comparison import labels_of, parse, value
from real_engines.health_watch import HealthWatch, Seen
from real_engines.load import Answer, Ask, Client

FOUND_WITHIN = 15.0
"""Seconds from a wedge to the state ``stalled``."""
STAYS = 8
"""Answers for which the state must stay, once found."""
OK_WITHIN = 5.0
"""Seconds from the release of a wedge to the state ``ok``."""


class Server(Protocol):
    """A server whose processes have titles."""

    def titled(self, text: str) -> list[int]:
        """Return the processes whose command line has ``text``."""


@dataclasses.dataclass(frozen=True)
class Wedge:
    """A way for a server to hang.

    Attributes:
        core: Title of the process that a wedge with a file hangs.
        name: Name of the file that asks the server for it, or ``stop`` and a process's title.
        reason: The reason with which it is found.
        frame: A function in the stack, where that of the core's thread can be read.
        is_running: Whether requests run when it happens; else they arrive afterwards.
    """

    core: ClassVar[str]
    name: str
    reason: str
    frame: str = ""
    is_running: bool = True

    @property
    def title(self) -> str:
        """Return the title of the process that stops, or nothing."""
        stop, _, title = self.name.partition(" ")
        return title if stop == "stop" else ""

    @contextlib.contextmanager
    def applied(self, server: Server, folder: Path) -> Iterator[None]:
        """Wedge the server until the end of the block."""
        (pid,) = server.titled(self.title or self.core)
        if self.title:
            os.kill(pid, signal.SIGSTOP)
        else:
            (folder / self.name).touch()
        try:
            yield
        finally:
            if self.title:
                os.kill(pid, signal.SIGCONT)
            else:
                (folder / self.name).unlink()
                # It interrupts a C call that holds the GIL.
                os.kill(pid, signal.SIGUSR1)


class Requests:
    """Completions that a test asks for, and leaves at its end."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: list[asyncio.Task[Answer]] = []

    def begin(self, *asks: Ask) -> None:
        """Ask for completions, without waiting for them."""
        self._tasks += [asyncio.create_task(self._client.ask(ask)) for ask in asks]

    def keep(self, *asks: Ask) -> None:
        """Ask for each completion again and again."""

        async def repeat(ask: Ask) -> Answer:
            while True:
                await self._client.ask(ask)

        self._tasks += [asyncio.create_task(repeat(ask)) for ask in asks]

    async def answers(self) -> list[Answer]:
        """Wait until all completions have ended."""
        return await asyncio.gather(*self._tasks)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def is_stalled(seen: Seen) -> bool:
    """Return whether the engine is stalled."""
    return seen.state == "stalled"


def is_well(seen: Seen) -> bool:
    """Return whether the engine makes progress, or has nothing to do."""
    return seen.state in ("ok", "idle")


def no_alarm(states: Counter[str], what: str) -> bool:
    """Return whether an engine with these states was never found to hang, and print them."""
    print(f"\n{what}: {dict(states)}")  # noqa: T201 - for the one who runs it
    return bool(states) and not any(
        name.startswith(("stalled", "unreachable", "stopped")) for name in states
    )


async def assert_shown(watch: HealthWatch, engine: str, reason: str, /, **labels: str) -> str:
    """Assert that probes and metrics show that the engine with ``labels`` is stalled."""
    status, body = await watch.get(f"/-/engines/{engine}")
    assert (503, "stalled", reason) == (status, body["state"], body["reason"])
    status, _ = await watch.get("/-/engines")
    assert status == 503
    _, text = await watch.get("/metrics")
    page = parse(text)
    states = {
        found["state"]: value(page, "sidestep_engine_state", **found)
        for found in labels_of(page, "sidestep_engine_state")
        if labels.items() <= found.items()
    }
    assert {name for name, number in states.items() if number} == {"stalled"}
    assert {0.0, 1.0} == set(states.values())
    stalled = labels_of(page, "sidestep_engine_stalled_seconds")
    assert [reason] == [found["reason"] for found in stalled if labels.items() <= found.items()]
    status, stack = await watch.get(f"/api/v1/engines/{engine}/stack")
    return stack if status == 200 else ""


async def long_prefills(
    client: Client, ask: Callable[[int, int], Ask], longest: int
) -> list[float]:
    """Ask for answers to long and short prompts among other requests; return the longest gaps in seconds.

    ``ask`` makes a request of a prompt's tokens and the answer's.
    """
    gaps = []
    for prompt in (longest, 40, 300, longest, longest // 4, longest):
        answers = await client.ask_all([ask(prompt, 20), *(ask(40, 100) for _ in range(3))])
        assert {200} == {answer.status for answer in answers}
        gaps.append(round(max(answer.longest_gap for answer in answers), 1))
    return gaps
