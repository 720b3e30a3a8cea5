"""Versions of one server's models: what each was last found with, and under which labels. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from sidestep.engines.triton.rows import CACHE, EXECUTES, FAILURES
from sidestep.engines.triton.statistics import CountersResetError, difference
from sidestep.engines.triton.wire import ModelStats, TritonStats
from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.statistics import Head

DIALECT = "triton"

Read = Callable[[bytes, bool], ModelStats]
"""What a piece says, of a model with or without a response cache."""


class Look(NamedTuple):
    """One version of a model at one moment.

    Attributes:
        item: None: nothing is known of it.
        leaves: Whether nothing more will be told of it under these labels.
    """

    info: EngineInfo
    item: TritonStats | None
    leaves: bool = False


class Moment(NamedTuple):
    """When an answer was there: by this host's monotonic clock, and in Unix time."""

    stamp: float
    wall: float


class _Version(msgspec.Struct):
    piece: bytes
    stats: ModelStats
    info: EngineInfo
    instances: int


class Models:
    """Those of one server.

    Args:
        name: The server's, in the identities of its engines.
        labels: Of all its series.
        has_failures: Whether failed requests are shown from here.
        read: Reads a piece of an answer.
    """

    def __init__(
        self, name: str, labels: Mapping[str, str], read: Read, *, has_failures: bool
    ) -> None:
        self.server = server_engine(name, labels)
        self._name = name
        self._labels = labels
        self._read = read
        self._has_failures = has_failures
        self._versions: dict[Head, _Version] = {}
        self._by_piece: dict[bytes, Head] = {}
        self._configs: dict[str, ModelConfig] = {}

    def __len__(self) -> int:
        return len(self._versions)

    def find(self, piece: bytes) -> Head | None:
        """Whose statistics ``piece`` is, where the last look found the same."""
        return self._by_piece.get(piece)

    def look(self, head: Head, piece: bytes, moment: Moment) -> Look | None:
        """What ``piece`` says; None where the model's configuration has to be had first.

        Raises:
            WireError: It contradicts itself.
        """
        known = self._versions.get(head)
        if known is None:
            return None
        if known.piece != piece:
            stats = self._read(piece, self._configs[head.name].has_cache)
            if _is_loaded_anew(stats, known.stats):
                return None
            self._keep(head, known, piece, stats)
        return Look(known.info, _item(moment, known.stats, known.instances))

    def look_anew(
        self, head: Head, piece: bytes, moment: Moment, config: ModelConfig
    ) -> Iterator[Look]:
        """Likewise, of a version that is new or has begun anew.

        Raises:
            WireError: It contradicts itself.
        """
        stats = self._read(piece, config.has_cache)
        known = self._versions.get(head)
        info = self._info(head, config)
        if known is not None and known.info != info:
            # Other labels are other series.
            yield Look(known.info, None, leaves=True)
        self._configs[head.name] = config
        version = self._versions[head] = _Version(b"", stats, info, config.instances)
        self._keep(head, version, piece, stats)
        yield Look(info, _item(moment, stats, config.instances))

    def absent(
        self, found: Iterable[Head], moment: Moment, covers: Callable[[str], bool]
    ) -> Iterator[Look]:
        """Versions that an answer about all models of ``covers`` does not have among ``found``."""
        for head in self._versions.keys() - set(found):
            if covers(head.name):
                yield from self._drop(head, moment)
        names = {head.name for head in self._versions}
        for name in self._configs.keys() - names:
            del self._configs[name]

    def wait(self, head: Head, piece: bytes, moment: Moment) -> Iterator[Look]:
        """Remember that a version has begun anew whose configuration is not there yet.

        By the time that it is there, the version may look as if it had gone on.
        """
        known = self._versions.get(head)
        if known is not None:
            try:
                difference(self._read(piece, False), known.stats)
            except CountersResetError:
                yield from self._drop(head, moment)

    def _drop(self, head: Head, moment: Moment) -> Iterator[Look]:
        version = self._versions.pop(head)
        self._by_piece.pop(version.piece, None)
        yield gone(version.info, moment)

    @property
    def engines(self) -> set[str]:
        """Identities of the server and of the versions that it has."""
        return {self.server.id, *(version.info.id for version in self._versions.values())}

    def forget(self) -> None:
        """Let go of all that the server has said."""
        self._versions.clear()
        self._by_piece.clear()
        self._configs.clear()

    def _keep(self, head: Head, version: _Version, piece: bytes, stats: ModelStats) -> None:
        self._by_piece.pop(version.piece, None)
        self._by_piece[piece] = head
        version.piece, version.stats = piece, stats

    def _info(self, head: Head, config: ModelConfig) -> EngineInfo:
        # What the operator says has the last word.
        labels = {**config.tags, **self._labels, "model": head.name, "version": head.version}
        features = {
            FAILURES: self._has_failures,
            CACHE: config.has_cache,
            EXECUTES: config.executes,
        }
        return EngineInfo(
            identity(self._name, head.name, head.version),
            DIALECT,
            labels,
            features=sorted(name for name, is_on in features.items() if is_on),
        )


def server_engine(name: str, labels: Mapping[str, str]) -> EngineInfo:
    """Return the engine that the server itself is."""
    return EngineInfo(identity(name), DIALECT, dict(labels))


def identity(*parts: str) -> str:
    """Of a server, or of a version of one of its models."""
    name = "/".join((DIALECT, *parts))
    if len(name) > MAX_LABEL_CHARS:
        name = f"{DIALECT}/{blake2b(name.encode(), digest_size=16).hexdigest()}"
    return name


def gone(info: EngineInfo, moment: Moment) -> Look:
    """A version that the server does not have ready."""
    return Look(info, _item(moment, None, 0), leaves=True)


def _is_loaded_anew(new: ModelStats, old: ModelStats) -> bool:
    """Whether its configuration may be another; what is to be counted the exporter decides."""
    now, before = new.inference_stats.success, old.inference_stats.success
    return (
        new.execution_count < old.execution_count
        or new.last_inference < old.last_inference
        or now.count < before.count
        or now.ns < before.ns
    )


def _item(moment: Moment, stats: ModelStats | None, instances: int) -> TritonStats:
    return TritonStats(0, moment.stamp, moment.wall, stats, instances)
