"""One poll of a Triton server: query it, and derive an update for each version of its models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from sidestep.errors import PollError, WireError
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.logs import Limited
from sidestep_adapters.triton.models import Models, PollTime, VersionUpdate, detached_version
from sidestep_adapters.triton.queries import Queries, StatisticsAnswer
from sidestep_adapters.triton.server import Server, detail
from sidestep_adapters.triton.statistics import ModelVersion

SLICE = 0.001
"""Seconds of decoding after which the event loop may run other tasks."""
MAX_VERSIONS = 4096
"""Maximum versions of one server: each takes memory here, whether it is exposed or not."""


class PollResult(NamedTuple):
    """Result of a poll.

    Attributes:
        poll_time: When the statistics were received.
        seconds: Duration of the query for statistics.
        failure: Why some statistics are missing.
    """

    poll_time: PollTime
    seconds: float
    failure: PollError | None


class StatisticsPoll:
    """Polls the statistics of one server.

    Args:
        server: The server's API.
        models: State of the server's models.
        queries: Queries to the server.
        on_statistics: Called when statistics were received.
        on_update: Called with each update, in order.
        reject: Counts rejected statistics by reason.
        attached: Returns the attached engines, with those from before a restart of the exporter.
        lines: Rate-limited log.
        name: The server's name in the log.
    """

    def __init__(
        self,
        *,
        server: Server,
        models: Models,
        queries: Queries,
        on_statistics: Callable[[], None],
        on_update: Callable[[VersionUpdate], None],
        reject: Callable[[str], None],
        attached: Callable[[], Mapping[str, EngineInfo]],
        lines: Limited,
        name: str,
    ) -> None:
        self.models = models
        self.queries = queries
        self._server = server
        self._on_statistics = on_statistics
        self._on_update = on_update
        self._reject = reject
        self._attached = attached
        self._lines = lines
        self._name = name
        self._slice_end = 0.0
        """End of the current slice of decoding."""

    async def poll(self) -> PollResult:
        """Query the server and pass on the updates.

        Raises:
            PollError: There are no statistics.
        """
        await self.queries.check()
        started = time.monotonic()
        answer = await self.queries.statistics()
        poll_time = PollTime(time.monotonic(), time.time())
        self._slice_end = time.perf_counter() + SLICE
        found = await self._pieces_by_version(answer.pieces)
        self._on_statistics()
        attached = dict(self._attached())
        new: dict[ModelVersion, bytes] = {}
        for version, piece in found.items():
            await self._yield_to_loop()
            if not self._update_known(version, piece, poll_time):
                new[version] = piece
        configs = await self.queries.configs(version.name for version in new)
        for version, piece in new.items():
            await self._yield_to_loop()
            if version.name in configs:
                try:
                    for update in self.models.update_new(
                        version, piece, poll_time, configs[version.name]
                    ):
                        self._emit_new(update, attached)
                except WireError as error:
                    self._reject_version(version, error)
            else:
                for update in self.models.defer(version, piece, poll_time):
                    self._on_update(update)
        server = attached.get(self.models.server.id)
        if server is not None and server != self.models.server:
            # Before its restart the exporter exposed the server with other labels.
            self._on_update(VersionUpdate(server, None, detach=True))
        others = attached.keys() - self.models.engines
        for update in self.models.absent(found, poll_time, answer.covers):
            self._on_update(update)
        self._detach_unknown((attached[other] for other in others), found, answer, poll_time)
        return PollResult(poll_time, poll_time.stamp - started, answer.failure)

    async def _pieces_by_version(self, pieces: Iterable[bytes]) -> dict[ModelVersion, bytes]:
        """Return the pieces of selected models by version.

        Raises:
            PollError: A piece does not name its version, or two pieces name the same.
        """
        found: dict[ModelVersion, bytes] = {}
        for piece in pieces:
            await self._yield_to_loop()
            try:
                version = self.models.find_version(piece) or self._server.version_of(piece)
            except WireError as error:
                raise PollError("bad_answer", detail(error)) from None
            if version in found:
                twice = f"version {version.version!r:.200} of {version.name!r:.200} twice"
                raise PollError("bad_answer", twice)
            if len(found) >= MAX_VERSIONS:
                raise PollError("bad_answer", f"more than {MAX_VERSIONS} versions of models")
            if self.queries.wants(version.name):
                found[version] = piece
        return found

    def _update_known(self, version: ModelVersion, piece: bytes, poll_time: PollTime) -> bool:
        """Pass on the update of a known version; return whether the piece needs no more work."""
        try:
            update = self.models.update(version, piece, poll_time)
            if update is None:
                # No configuration is queried for invalid statistics.
                self._server.stats(piece, False)
        except WireError as error:
            self._reject_version(version, error)
            return True
        if update is not None:
            self._on_update(update)
        return update is not None

    def _emit_new(self, update: VersionUpdate, attached: Mapping[str, EngineInfo]) -> None:
        """Pass on the update of a new version, and detach it under its previous labels."""
        previous = attached.get(update.info.id)
        if previous is not None and previous != update.info and not update.detach:
            self._on_update(VersionUpdate(previous, None, detach=True))
        self._on_update(update)

    def _detach_unknown(
        self,
        others: Iterable[EngineInfo],
        found: Collection[ModelVersion],
        answer: StatisticsAnswer,
        poll_time: PollTime,
    ) -> None:
        """Detach versions that only the exporter before a restart knew."""
        for info in others:
            version = ModelVersion(info.labels["model"], info.labels["version"])
            if version in found:
                continue
            if not self.queries.wants(version.name):
                self._on_update(VersionUpdate(info, None, detach=True))
            elif answer.covers(version.name):
                self._on_update(detached_version(info, poll_time))

    def _reject_version(self, version: ModelVersion, error: WireError) -> None:
        """Count and log invalid statistics of one version, which keeps its last values."""
        self._reject(error.reason)
        self._lines.warning(
            "refused",
            "%s: model %.200r, version %.200r: %s",
            self._name,
            version.name,
            version.version,
            error,
        )

    async def _yield_to_loop(self) -> None:
        if time.perf_counter() > self._slice_end:
            await asyncio.sleep(0)
            self._slice_end = time.perf_counter() + SLICE
