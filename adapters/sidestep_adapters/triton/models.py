"""State of one server's models: last statistics, configuration and labels by version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from sidestep.errors import PollError, WireError
from sidestep.ingest.local_stream import ServerFeed, identity
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.triton.differences import CountersResetError, difference
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.queries import Queries, StatisticsAnswer
from sidestep_adapters.triton.rows import CACHE, EXECUTES, FAILURES
from sidestep_adapters.triton.statistics import ModelVersion, read, version_of
from sidestep_adapters.triton.wire import ModelStats, TritonStats

DIALECT = "triton"
SLICE = 0.001
"""Seconds of decoding after which the event loop may run other tasks."""
MAX_VERSIONS = 4096
"""Maximum versions of one server: each takes memory here, whether it is exposed or not."""

Emit = Callable[[EngineInfo, TritonStats | None, bool], None]
"""Called with an engine, its statistics if they are known, and whether the engine is detached."""


class PollTime(NamedTuple):
    """When an answer was received: by this host's monotonic clock, and in Unix time."""

    stamp: float
    wall: float


class _Version(NamedTuple):
    piece: bytes
    stats: ModelStats
    info: EngineInfo
    instances: int


class Models:
    """Models of one server; derives the updates of its engines from the statistics of each poll.

    Args:
        has_failures: Whether failed requests are exposed from statistics.
    """

    def __init__(
        self,
        name: str,
        labels: Mapping[str, str],
        queries: Queries,
        feed: ServerFeed,
        *,
        emit: Emit,
        lines: RateLimitedLog,
        has_failures: bool,
    ) -> None:
        self.server = server_engine(name, labels)
        self._name = name
        self._labels = labels
        self._queries = queries
        self._feed = feed
        self._emit = emit
        self._lines = lines
        self._has_failures = has_failures
        self._versions: dict[ModelVersion, _Version] = {}
        self._configs: dict[str, ModelConfig] = {}
        self._slice_end = 0.0
        """End of the current slice of decoding."""

    def __len__(self) -> int:
        return len(self._versions)

    def clear(self) -> None:
        """Forget the state of all models."""
        self._versions.clear()
        self._configs.clear()

    async def pieces_by_version(self, pieces: Iterable[bytes]) -> dict[ModelVersion, bytes]:
        """Return the pieces of selected models by version.

        Raises:
            PollError: A piece does not name its version, or two pieces name the same.
        """
        found: dict[ModelVersion, bytes] = {}
        for piece in pieces:
            await self._yield_to_loop()
            version = version_of(piece)
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
            try:
                if not self._update_known(version, piece, poll_time):
                    new[version] = piece
            except WireError as error:
                self._reject(version, error)
        configs = await self._queries.configs(version.name for version in new)
        for version, piece in new.items():
            await self._yield_to_loop()
            try:
                config = configs.get(version.name)
                if config is None:
                    self._defer(version, piece, poll_time)
                else:
                    self._update_new(version, piece, poll_time, config, attached)
            except WireError as error:
                self._reject(version, error)
        self._detach_relabelled(self.server, attached)
        self._detach_absent(found, answer, poll_time, attached)

    def _update_known(self, version: ModelVersion, piece: bytes, poll_time: PollTime) -> bool:
        """Emit the update of a version; return False if its configuration has to be queried first."""
        previous = self._versions.get(version)
        if previous is None or previous.piece != piece:
            config = self._configs.get(version.name, ModelConfig())
            stats = read(piece, has_cache=config.has_cache)
            if previous is None or _is_reloaded(stats, previous.stats):
                return False
            previous = self._versions[version] = previous._replace(piece=piece, stats=stats)
        self._emit_stats(previous, poll_time)
        return True

    def _update_new(
        self,
        version: ModelVersion,
        piece: bytes,
        poll_time: PollTime,
        config: ModelConfig,
        attached: Mapping[str, EngineInfo],
    ) -> None:
        """Emit the update of a version that is new or was reloaded."""
        stats = read(piece, has_cache=config.has_cache)
        made = _Version(piece, stats, self._info(version, config), config.instances)
        self._configs[version.name] = config
        self._versions[version] = made
        self._detach_relabelled(made.info, attached)
        self._emit_stats(made, poll_time)

    def _defer(self, version: ModelVersion, piece: bytes, poll_time: PollTime) -> None:
        """Drop a reloaded version whose configuration is not known yet.

        By the time its configuration is known, its statistics may look continuous.
        """
        previous = self._versions.get(version)
        if previous is not None:
            try:
                difference(read(piece, has_cache=False), previous.stats)
            except CountersResetError:
                self._drop(version, poll_time)

    def _detach_relabelled(self, info: EngineInfo, attached: Mapping[str, EngineInfo]) -> None:
        """Detach an engine that has had other labels until now: changed labels are new series."""
        previous = attached.get(info.id)
        if previous is not None and previous != info:
            self._emit(previous, None, True)

    def _detach_absent(
        self,
        found: Collection[ModelVersion],
        answer: StatisticsAnswer,
        poll_time: PollTime,
        attached: Mapping[str, EngineInfo],
    ) -> None:
        """Detach the versions that are missing in an answer, unless their query failed."""
        known = {self.server.id, *(version.info.id for version in self._versions.values())}
        for version in [*self._versions]:
            if version not in found and not answer.has_failed(version):
                self._drop(version, poll_time)
        names = {version.name for version in self._versions}
        for name in self._configs.keys() - names:
            del self._configs[name]
        for engine in attached.keys() - known:
            # Only the exporter before a restart knew it.
            info = attached[engine]
            version = ModelVersion(info.labels["model"], info.labels["version"])
            if version in found:
                continue
            if not self._queries.wants(version):
                self._emit(info, None, True)
            elif not answer.has_failed(version):
                self._emit(info, _item(poll_time), True)

    def _drop(self, version: ModelVersion, poll_time: PollTime) -> None:
        """Detach a version that is not ready, and forget it."""
        self._emit(self._versions.pop(version).info, _item(poll_time), True)

    def _emit_stats(self, version: _Version, poll_time: PollTime) -> None:
        self._emit(version.info, _item(poll_time, version.stats, version.instances), False)

    def _info(self, version: ModelVersion, config: ModelConfig) -> EngineInfo:
        # Configured labels override tags.
        labels = {**config.tags, **self._labels, "model": version.name, "version": version.version}
        features = {
            FAILURES: self._has_failures,
            CACHE: config.has_cache,
            EXECUTES: config.executes,
        }
        return EngineInfo(
            identity(DIALECT, self._name, version.name, version.version),
            DIALECT,
            labels,
            features=sorted(name for name, is_on in features.items() if is_on),
        )

    def _reject(self, version: ModelVersion, error: WireError) -> None:
        """Count and log invalid statistics of one version, which keeps its last values."""
        self._feed.intake.reject(error.reason)
        self._lines.warning(
            "refused",
            "triton %s: model %.200r, version %.200r: %s",
            self._name,
            version.name,
            version.version,
            error,
        )

    async def _yield_to_loop(self) -> None:
        if time.perf_counter() > self._slice_end:
            await asyncio.sleep(0)
            self._slice_end = time.perf_counter() + SLICE


def server_engine(name: str, labels: Mapping[str, str]) -> EngineInfo:
    """Return the engine that represents the server itself."""
    return EngineInfo(identity(DIALECT, name), DIALECT, dict(labels))


def _is_reloaded(new: ModelStats, old: ModelStats) -> bool:
    """Return whether the configuration may have changed; the exporter detects counter resets itself."""
    now, before = new.inference_stats.success, old.inference_stats.success
    return (
        new.execution_count < old.execution_count
        or new.last_inference < old.last_inference
        or now.count < before.count
        or now.ns < before.ns
    )


def _item(poll_time: PollTime, stats: ModelStats | None = None, instances: int = 0) -> TritonStats:
    """Return the item of a version; without statistics it is not ready."""
    return TritonStats(0, poll_time.stamp, poll_time.wall, stats, instances)
