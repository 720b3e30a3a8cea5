"""Queries that retrieve all statistics of a server at one time."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from sidestep.config.triton_servers import ModelChoice
from sidestep.errors import PollError
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.triton.http import TritonApi
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.statistics import ModelVersion

IN_FLIGHT = 8
"""Concurrent queries, where each model needs one."""
CONFIG_SECONDS = 5.0
"""Maximum seconds for configurations of new models in one poll; the next poll continues."""
MAX_BYTES = 16 << 20
"""Maximum bytes of all statistics that are queried one by one."""
_INCONCLUSIVE = ("slow", "unreachable", "not_ready")
"""Outcomes that reveal nothing about the queried model."""

T = TypeVar("T")


class StatisticsAnswer(NamedTuple):
    """Statistics of a server.

    Attributes:
        failed: Choices whose query failed, with its error; any other without a piece is not ready.
    """

    pieces: Sequence[bytes]
    failed: Mapping[ModelChoice, PollError]

    @property
    def failure(self) -> PollError | None:
        """Return why some statistics are missing."""
        return next(iter(self.failed.values()), None)

    def has_failed(self, version: ModelVersion) -> bool:
        """Return whether the query that would have returned ``version`` failed."""
        name = version.name
        return ModelChoice(name) in self.failed or ModelChoice(name, version.version) in self.failed


class Queries:
    """Queries to one server.

    Args:
        models: The models to query; empty for all.
    """

    def __init__(
        self, api: TritonApi, models: Sequence[ModelChoice], name: str, lines: RateLimitedLog
    ) -> None:
        self._api = api
        self._name = name
        self._lines = lines
        self._exact = [] if any(_is_pattern(choice.name) for choice in models) else _unique(models)
        self._patterns = [(re.compile(fnmatch.translate(c.name)), c.version) for c in models]

    def wants(self, version: ModelVersion) -> bool:
        """Return whether a version of a model is selected."""
        return not self._patterns or any(
            name.match(version.name) and selected in ("", version.version)
            for name, selected in self._patterns
        )

    async def statistics(self) -> StatisticsAnswer:
        """Return the statistics of all selected models."""
        if self._exact:
            return await self._query_each(self._exact)
        return StatisticsAnswer(await self._api.statistics(), {})

    async def configs(self, names: Iterable[str]) -> dict[str, ModelConfig]:
        """Return configurations of models; a missing one may be available in the next poll."""
        found: dict[str, ModelConfig] = {}

        async def get(name: str) -> None:
            try:
                found[name] = await self._api.config(name)
            except PollError as error:
                if error.cause in _INCONCLUSIVE:
                    return
                found[name] = ModelConfig()
                self._lines.warning(
                    "config",
                    "%s: no configuration of model %.200r: %s; it is exposed without metric tags"
                    " and instances",
                    self._name,
                    name,
                    error,
                )

        await _run_each(dict.fromkeys(names), get, CONFIG_SECONDS)
        return found

    async def _query_each(self, choices: Sequence[ModelChoice]) -> StatisticsAnswer:
        pieces: list[bytes] = []
        failed: dict[ModelChoice, PollError] = {}
        remaining_bytes = MAX_BYTES

        async def get(choice: ModelChoice) -> None:
            nonlocal remaining_bytes
            if any(error.cause in _INCONCLUSIVE for error in failed.values()):
                failed[choice] = next(iter(failed.values()))
                return
            try:
                found = await self._api.statistics(*choice)
            except PollError as error:
                # An unknown model or version is not ready.
                if error.cause != "unknown_model":
                    failed[choice] = error.without_frames()
                return
            remaining_bytes -= sum(map(len, found))
            if remaining_bytes < 0:
                failed[choice] = PollError("bad_answer", f"more than {MAX_BYTES >> 20} MiB in all")
            else:
                pieces.extend(found)

        await _run_each(choices, get)
        answer = StatisticsAnswer(pieces, failed)
        if answer.failure is not None and len(failed) == len(choices):
            raise answer.failure
        return answer


def _unique(choices: Sequence[ModelChoice]) -> list[ModelChoice]:
    """Return the choices without those that others include."""
    return [
        choice
        for choice in dict.fromkeys(choices)
        if not choice.version or ModelChoice(choice.name) not in choices
    ]


def _is_pattern(model: str) -> bool:
    return any(character in model for character in "*?[")


async def _run_each(
    items: Collection[T], get: Callable[[T], Awaitable[None]], seconds: float | None = None
) -> None:
    """Run ``get`` for each item, some concurrently; cancel the rest after ``seconds``."""
    free = asyncio.Semaphore(IN_FLIGHT)

    async def run(item: T) -> None:
        async with free:
            await get(item)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.gather(*map(run, items)), seconds)
