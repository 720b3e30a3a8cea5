"""Derivation of updates from the statistics of one poll, for each version of a server's models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from sidestep.errors import PollError, WireError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.models import Models, PollTime, VersionUpdate, detached_version
from sidestep_adapters.triton.queries import Queries, StatisticsAnswer
from sidestep_adapters.triton.statistics import ModelVersion, read, version_of

SLICE = 0.001
"""Seconds of decoding after which the event loop may run other tasks."""
MAX_VERSIONS = 4096
"""Maximum versions of one server: each takes memory here, whether it is exposed or not."""


class StatisticsReader:
    """Reads the statistics of one server.

    Args:
        models: State of the server's models.
        queries: Queries for the configurations of new models.
        feed: The ingest side of the server; its engines include those from before a restart of
            the exporter.
        emit: Called with each update, in order.
        lines: Rate-limited log.
        name: The server's name in the log.
    """

    def __init__(
        self,
        models: Models,
        queries: Queries,
        feed: ServerFeed,
        *,
        emit: Callable[[VersionUpdate], None],
        lines: RateLimitedLog,
        name: str,
    ) -> None:
        self._models = models
        self._queries = queries
        self._feed = feed
        self._emit = emit
        self._lines = lines
        self._name = name
        self._slice_end = 0.0
        """End of the current slice of decoding."""

    async def pieces_by_version(self, pieces: Iterable[bytes]) -> dict[ModelVersion, bytes]:
        """Return the pieces of selected models by version.

        Raises:
            PollError: A piece does not name its version, or two pieces name the same.
        """
        self._slice_end = time.perf_counter() + SLICE
        found: dict[ModelVersion, bytes] = {}
        for piece in pieces:
            await self._yield_to_loop()
            version = self._models.find_version(piece) or version_of(piece)
            if version in found:
                twice = f"version {version.version!r:.200} of {version.name!r:.200} twice"
                raise PollError("bad_answer", twice)
            if len(found) >= MAX_VERSIONS:
                raise PollError("bad_answer", f"more than {MAX_VERSIONS} versions of models")
            if self._queries.wants(version):
                found[version] = piece
        return found

    async def update(
        self, found: Mapping[ModelVersion, bytes], answer: StatisticsAnswer, poll_time: PollTime
    ) -> None:
        """Emit the updates of an answer, whose pieces are ``found``."""
        attached = dict(self._feed.engines)
        new: dict[ModelVersion, bytes] = {}
        for version, piece in found.items():
            await self._yield_to_loop()
            if not self._update_known(version, piece, poll_time):
                new[version] = piece
        configs = await self._queries.configs(version.name for version in new)
        for version, piece in new.items():
            await self._yield_to_loop()
            self._update_new(version, piece, poll_time, configs.get(version.name), attached)
        self._detach_relabelled(self._models.server, attached)
        others = attached.keys() - self._models.engines
        for update in self._models.absent(found, poll_time, answer.has_failed):
            self._emit(update)
        self._detach_unknown((attached[other] for other in others), found, answer, poll_time)

    def _update_known(self, version: ModelVersion, piece: bytes, poll_time: PollTime) -> bool:
        """Emit the update of a known version; return whether the piece needs no more work."""
        try:
            update = self._models.update(version, piece, poll_time)
            if update is None:
                # No configuration is queried for invalid statistics.
                read(piece, has_cache=False)
        except WireError as error:
            self._reject(version, error)
            return True
        if update is not None:
            self._emit(update)
        return update is not None

    def _update_new(
        self,
        version: ModelVersion,
        piece: bytes,
        poll_time: PollTime,
        config: ModelConfig | None,
        attached: Mapping[str, EngineInfo],
    ) -> None:
        """Emit the updates of a version that is new or was reloaded."""
        if config is None:
            for update in self._models.defer(version, piece, poll_time):
                self._emit(update)
            return
        try:
            for update in self._models.update_new(version, piece, poll_time, config):
                if not update.detach:
                    self._detach_relabelled(update.info, attached)
                self._emit(update)
        except WireError as error:
            self._reject(version, error)

    def _detach_relabelled(self, info: EngineInfo, attached: Mapping[str, EngineInfo]) -> None:
        """Detach an engine that the exporter before a restart exposed with other labels."""
        previous = attached.get(info.id)
        if previous is not None and previous != info:
            self._emit(VersionUpdate(previous, None, detach=True))

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
            if not self._queries.wants(version):
                self._emit(VersionUpdate(info, None, detach=True))
            elif not answer.has_failed(version):
                self._emit(detached_version(info, poll_time))

    def _reject(self, version: ModelVersion, error: WireError) -> None:
        """Count and log invalid statistics of one version, which keeps its last values."""
        self._feed.intake.reject(error.reason)
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
