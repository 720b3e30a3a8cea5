"""The loop of polls: what a discarded poll had read is freed."""

from __future__ import annotations

import asyncio
import gc
import weakref

from sidestep_adapters.polling.poller import Poller


class Body:
    """A part of an answer."""


class Stuck(Poller):
    """Its polls have read a body and get no further."""

    def __init__(self) -> None:
        super().__init__(1.0, self._closed)
        self.bodies: weakref.WeakSet[Body] = weakref.WeakSet()
        self.polls = 0

    async def poll(self) -> float:
        """Read a body, and wait for the rest."""
        body = Body()
        self.bodies.add(body)
        self.polls += 1
        return await asyncio.Future()

    async def _closed(self) -> None:
        """There is no connection."""


async def test_no_discarded_poll_keeps_what_it_has_read() -> None:
    """Not even until the next collection of garbage: at each limit of memory a body would be added."""
    poller = Stuck()
    gc.disable()
    try:
        poller.open(lambda: None)
        for cuts in range(5):
            while poller.polls <= cuts:
                await asyncio.sleep(0)
            poller.cut()
        while poller.polls <= cuts + 1:
            await asyncio.sleep(0)
        assert len(poller.bodies) == 1
    finally:
        gc.enable()
        poller.close()
        await poller.wait_closed()
