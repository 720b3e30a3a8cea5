"""One poll of a Triton server: questions, answers, and what they say of each version."""

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
"""Seconds of reading after which the event loop gets its turn."""
MAX_VERSIONS = 4096
"""Of one server: each takes memory here, whether it is shown or not."""


class PollResult(NamedTuple):
    """What a poll came to.

    Attributes:
        seconds: From asking for statistics until they were there.
    """

    poll_time: PollTime
    seconds: float
    failure: PollError | None


class StatisticsPoll:
    """Polls one server.

    Args:
        heard: Called when statistics are there.
        hand: Takes each look, in their order.
        reject: Counts what could not be taken, by its reason.
        known: Engines that are fed, those among them from before an exporter's restart.
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
        """When the slice of reading that is under way is over."""

    async def poll(self) -> PollResult:
        """Ask, and hand on what is there.

        Raises:
            PollError: Nothing is.
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
            # An exporter before this one showed it with other labels.
            self._on_update(VersionUpdate(server, None, detach=True))
        others = attached.keys() - self.models.engines
        for update in self.models.absent(found, poll_time, answer.covers):
            self._on_update(update)
        self._detach_unknown((attached[other] for other in others), found, answer, poll_time)
        return PollResult(poll_time, poll_time.stamp - started, answer.failure)

    async def _pieces_by_version(self, pieces: Iterable[bytes]) -> dict[ModelVersion, bytes]:
        """The pieces of models that are wanted, by whose they are.

        Raises:
            PollError: One does not say, or two are the same version's.
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
        """Hand on what ``piece`` says; whether that is all that can be done with it."""
        try:
            update = self.models.update(version, piece, poll_time)
            if update is None:
                # Nothing more is asked about what cannot be shown anyway.
                self._server.stats(piece, False)
        except WireError as error:
            self._reject_version(version, error)
            return True
        if update is not None:
            self._on_update(update)
        return update is not None

    def _emit_new(self, update: VersionUpdate, attached: Mapping[str, EngineInfo]) -> None:
        """Hand on a look at a new version, which may have been known with other labels."""
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
        """Part with versions of which only an exporter knew that was started anew."""
        for info in others:
            version = ModelVersion(info.labels["model"], info.labels["version"])
            if version in found:
                continue
            if not self.queries.wants(version.name):
                self._on_update(VersionUpdate(info, None, detach=True))
            elif answer.covers(version.name):
                self._on_update(detached_version(info, poll_time))

    def _reject_version(self, version: ModelVersion, error: WireError) -> None:
        """One version's statistics are no good: it stays as it was."""
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
