"""Triton's poller as a process of its own, beside the server, that pushes to an exporter elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence

from sidestep.config.triton_servers import Server
from sidestep.errors import ConfigError, RunError
from sidestep.ingest.shutdown import Ending
from sidestep.ingest.source import PATIENCE, Sources
from sidestep.protocol.limits import is_printable
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.environment import identity, log_as
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.triton.poller import Triton
from sidestep_adapters.triton.sources import engine_of, poller
from sidestep_adapters.triton.stream_outlet import StreamOutlet

log = logging.getLogger("sidestep.triton")

TICK = 0.25
MAX_NAMESPACE = 128
BUDGET = 0.001
"""Seconds of looks handed over after which the event loop gets its turn."""


class Polling:
    """Polls servers and pushes what they say, in the running event loop.

    Args:
        endpoint: The exporter's.
        namespace: What tells these servers from those of the same URLs elsewhere.

    Raises:
        ConfigError: A file that a server needs cannot be read, or its page is to be passed on, or
            the namespace cannot be a part of names.
    """

    def __init__(self, servers: Sequence[Server], endpoint: str, namespace: str) -> None:
        if len(namespace) > MAX_NAMESPACE or not is_printable(namespace):
            raise ConfigError(f"a namespace must be printable, {MAX_NAMESPACE} characters at most")
        self._endpoint = endpoint
        self._namespace = namespace
        self._outlets: list[StreamOutlet] = []
        self._sources = Sources([self._source(server) for server in servers])
        self._is_coming = False
        """Whether a turn is scheduled."""

    def _source(self, server: Server) -> Triton:
        if server.metrics:
            raise ConfigError(
                f"{server.target.url}: metrics= is the exporter's, with --triton; give the page to"
                " its --scrape, or to Prometheus"
            )
        server = dataclasses.replace(server, namespace=self._namespace)

        def publish(number: int, infos: Sequence[EngineInfo]) -> Publisher:
            stream = identity(self._namespace, server.target.url, f"triton{number}")
            return Publisher(self._endpoint, stream, infos)

        outlet = StreamOutlet(engine_of(server), publish)
        self._outlets.append(outlet)
        return poller(server, outlet, outlet.publishers[0].fail, has_failures=True)

    @property
    def publishers(self) -> list[Publisher]:
        """Of all streams."""
        return [publisher for outlet in self._outlets for publisher in outlet.publishers]

    async def run(self, stop: asyncio.Event) -> None:
        """Poll until ``stop``.

        Raises:
            RunError: Another process has the name of one of the streams.
        """
        self._sources.open(self._come)
        stopped = asyncio.ensure_future(stop.wait())
        try:
            while not stop.is_set():
                await asyncio.wait([stopped], timeout=TICK)
                self._sources.pass_time(time.monotonic())
                self._come()
                if any(publisher.refused for publisher in self.publishers):
                    raise RunError(
                        "another process polls the same server in the same namespace; give one of"
                        " them another SIDESTEP_NAMESPACE"
                    )
        finally:
            stopped.cancel()
            self._sources.close()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._sources.wait_closed(), PATIENCE)
            await asyncio.gather(*(asyncio.to_thread(each.close) for each in self.publishers))

    def _come(self) -> None:
        if not self._is_coming:
            self._is_coming = True
            asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        """Hand over a slice of what was found."""
        self._is_coming = False
        deadline = time.perf_counter() + BUDGET
        while self._sources.take(time.monotonic()):
            if time.perf_counter() > deadline:
                self._come()
                break


async def poll(servers: Sequence[Server], endpoint: str, namespace: str) -> None:
    """Poll until SIGTERM or SIGINT, then say goodbye to the exporter and return.

    Raises:
        ConfigError: See ``Polling``.
        RunError: See ``Polling.run`` and ``Ending.check``.
    """
    log_as("sidestep")
    ending = Ending()
    polling = Polling(servers, endpoint, namespace)
    log.info("polling %s for the exporter at %s", ", ".join(s.name for s in servers), endpoint)
    await polling.run(ending.stop)
    ending.check()
    log.info("stopped")
