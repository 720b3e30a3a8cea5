"""State of one server's models: last statistics, configuration and labels by version. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import NamedTuple

from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.triton.differences import CountersResetError, difference
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.rows import CACHE, EXECUTES, FAILURES
from sidestep_adapters.triton.statistics import ModelVersion, read
from sidestep_adapters.triton.wire import ModelStats, TritonStats

DIALECT = "triton"


class VersionUpdate(NamedTuple):
    """State of one version of a model at one time.

    Attributes:
        info: The version as an engine.
        item: Its statistics; None if they are unknown.
        detach: Whether the version exports nothing more under these labels.
    """

    info: EngineInfo
    item: TritonStats | None
    detach: bool = False


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
    """Models of one server.

    Args:
        name: The server's name, in the identities of its engines.
        labels: Labels of all its series.
        has_failures: Whether failed requests are exposed from statistics.
    """

    def __init__(self, name: str, labels: Mapping[str, str], *, has_failures: bool) -> None:
        self.server = server_engine(name, labels)
        self._name = name
        self._labels = labels
        self._has_failures = has_failures
        self._versions: dict[ModelVersion, _Version] = {}
        self._by_piece: dict[bytes, ModelVersion] = {}
        self._configs: dict[str, ModelConfig] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def find_version(self, piece: bytes) -> ModelVersion | None:
        """Return the version of ``piece``, if the last poll had the same piece."""
        return self._by_piece.get(piece)

    def update(self, key: ModelVersion, piece: bytes, poll_time: PollTime) -> VersionUpdate | None:
        """Return the update of a known version; None if its configuration has to be queried first.

        Raises:
            WireError: ``piece`` is invalid.
        """
        previous = self._versions.get(key)
        if previous is None:
            return None
        if previous.piece != piece:
            stats = read(piece, has_cache=self._configs[key.name].has_cache)
            if _is_reloaded(stats, previous.stats):
                return None
            previous = previous._replace(piece=piece, stats=stats)
            self._store(key, previous)
        return VersionUpdate(previous.info, _item(poll_time, previous.stats, previous.instances))

    def update_new(
        self, key: ModelVersion, piece: bytes, poll_time: PollTime, config: ModelConfig
    ) -> Iterator[VersionUpdate]:
        """Yield the updates of a version that is new or was reloaded.

        Raises:
            WireError: ``piece`` is invalid.
        """
        stats = read(piece, has_cache=config.has_cache)
        previous = self._versions.get(key)
        info = self._info(key, config)
        if previous is not None and previous.info != info:
            # Changed labels are new series.
            yield VersionUpdate(previous.info, None, detach=True)
        self._configs[key.name] = config
        self._store(key, _Version(piece, stats, info, config.instances))
        yield VersionUpdate(info, _item(poll_time, stats, config.instances))

    def absent(
        self,
        found: Iterable[ModelVersion],
        poll_time: PollTime,
        has_failed: Callable[[ModelVersion], bool],
    ) -> Iterator[VersionUpdate]:
        """Yield updates of versions that are missing in an answer and whose query has not failed."""
        for key in self._versions.keys() - set(found):
            if not has_failed(key):
                yield from self._drop(key, poll_time)
        names = {key.name for key in self._versions}
        for name in self._configs.keys() - names:
            del self._configs[name]

    def defer(
        self, key: ModelVersion, piece: bytes, poll_time: PollTime
    ) -> Iterator[VersionUpdate]:
        """Drop a reloaded version whose configuration is not known yet.

        By the time its configuration is known, its statistics may look continuous.
        """
        previous = self._versions.get(key)
        if previous is not None:
            try:
                difference(read(piece, has_cache=False), previous.stats)
            except CountersResetError:
                yield from self._drop(key, poll_time)

    def _drop(self, key: ModelVersion, poll_time: PollTime) -> Iterator[VersionUpdate]:
        version = self._versions.pop(key)
        self._by_piece.pop(version.piece, None)
        yield detached_version(version.info, poll_time)

    @property
    def engines(self) -> set[str]:
        """Return the identities of the server and its versions."""
        return {self.server.id, *(version.info.id for version in self._versions.values())}

    def clear(self) -> None:
        """Forget the state of all models."""
        self._versions.clear()
        self._by_piece.clear()
        self._configs.clear()

    def _store(self, key: ModelVersion, version: _Version) -> None:
        previous = self._versions.get(key)
        if previous is not None:
            self._by_piece.pop(previous.piece, None)
        self._by_piece[version.piece] = key
        self._versions[key] = version

    def _info(self, key: ModelVersion, config: ModelConfig) -> EngineInfo:
        # Configured labels override tags.
        labels = {**config.tags, **self._labels, "model": key.name, "version": key.version}
        features = {
            FAILURES: self._has_failures,
            CACHE: config.has_cache,
            EXECUTES: config.executes,
        }
        return EngineInfo(
            identity(self._name, key.name, key.version),
            DIALECT,
            labels,
            features=sorted(name for name, is_on in features.items() if is_on),
        )


def server_engine(name: str, labels: Mapping[str, str]) -> EngineInfo:
    """Return the engine that represents the server itself."""
    return EngineInfo(identity(name), DIALECT, dict(labels))


def identity(*parts: str) -> str:
    """Return the identity of a server, or of a version of one of its models."""
    name = "/".join((DIALECT, *parts))
    if len(name) > MAX_LABEL_CHARS:
        name = f"{DIALECT}/{blake2b(name.encode(), digest_size=16).hexdigest()}"
    return name


def detached_version(info: EngineInfo, poll_time: PollTime) -> VersionUpdate:
    """Return the update that detaches a version that is not ready."""
    return VersionUpdate(info, _item(poll_time, None, 0), detach=True)


def _is_reloaded(new: ModelStats, old: ModelStats) -> bool:
    """Return whether the configuration may have changed; the exporter detects counter resets itself."""
    now, before = new.inference_stats.success, old.inference_stats.success
    return (
        new.execution_count < old.execution_count
        or new.last_inference < old.last_inference
        or now.count < before.count
        or now.ns < before.ns
    )


def _item(poll_time: PollTime, stats: ModelStats | None, instances: int) -> TritonStats:
    return TritonStats(0, poll_time.stamp, poll_time.wall, stats, instances)
