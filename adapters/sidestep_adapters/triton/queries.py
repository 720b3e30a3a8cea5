"""Queries that retrieve all statistics of a server at one time."""

from __future__ import annotations

import asyncio
import fnmatch
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from sidestep.errors import PollError
from sidestep.telemetry.logs import Limited
from sidestep_adapters.triton.model_config import STATISTICS, ModelConfig
from sidestep_adapters.triton.server import UNKNOWN_MODEL_PREFIX, Server

IN_FLIGHT = 8
"""Concurrent queries, where each model needs one."""
NAMESPACED_FOR = 60.0
"""Seconds after which a server that is queried model by model is queried for all models again."""
CONFIG_SECONDS = 5.0
"""Maximum seconds for configurations of new models in one poll; the next poll continues."""
MAX_MODEL_QUERIES = 4096
"""Maximum models that are queried one by one."""
MAX_BYTES = 16 << 20
"""Maximum bytes of all statistics that are queried one by one."""
ATTEMPTS = 3
"""Polls without the configuration of a model after which it is exposed without one."""
_INCONCLUSIVE = ("slow", "unreachable", "not_ready")
"""Outcomes that reveal nothing about the queried model."""


class StatisticsAnswer(NamedTuple):
    """Statistics of a server.

    Attributes:
        pieces: One for each ready version.
        covers: Returns whether a model without a piece is not ready.
        failure: Why some statistics are missing.
    """

    pieces: Sequence[bytes]
    covers: Callable[[str], bool]
    failure: PollError | None = None


class Queries:
    """Queries to one server.

    Args:
        server: The server's API.
        models: Names or patterns of models to query; empty for all.
        name: The server's name in the log.
        lines: Rate-limited log.
        clock: Monotonic clock.
    """

    def __init__(
        self,
        server: Server,
        models: Sequence[str],
        name: str,
        lines: Limited,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._name = name
        self._lines = lines
        self._clock = clock
        self._exact = [] if any(map(_is_pattern, models)) else list(models)
        self._patterns = [re.compile(fnmatch.translate(model)) for model in models]
        self._is_checked = False
        """True after the server's extensions were checked on this connection."""
        self._one_by_one = False
        self._query_all_at = 0.0
        """When to query for all models at once again."""
        self._attempts: dict[str, int] = {}
        """Polls in which a model's configuration could not be read."""

    def wants(self, model: str) -> bool:
        """Return whether the model is selected."""
        return not self._patterns or any(each.match(model) for each in self._patterns)

    def reset(self) -> None:
        """Forget the state of a connection: another process may answer from now on."""
        self._is_checked = False
        self._query_all_at = 0.0
        self._attempts.clear()

    async def statistics(self) -> StatisticsAnswer:
        """Return the statistics of all selected models.

        Raises:
            PollError: There are none.
        """
        if self._exact:
            return await self._query_each(self._exact)
        if self._one_by_one and self._clock() < self._query_all_at:
            return await self._query_each(await self._ready())
        try:
            pieces = await self._server.statistics()
        except PollError as error:
            if error.cause != "unknown_model" or UNKNOWN_MODEL_PREFIX not in str(error):
                raise
            self._set_one_by_one(one_by_one=True)
            return await self._query_each(await self._ready())
        self._set_one_by_one(one_by_one=False)
        return StatisticsAnswer(pieces, lambda _: True)

    async def check(self) -> None:
        """Check once per connection that the server has the statistics extension.

        Raises:
            PollError: The server lacks it, or did not answer.
        """
        if self._is_checked:
            return
        try:
            found = await self._server.extensions()
        except PollError as error:
            if error.cause in (*_INCONCLUSIVE, "bad_answer"):
                raise
            # Access to statistics may be allowed without access to this.
        else:
            if STATISTICS not in found:
                raise PollError(
                    "unsupported", f"the server does not name the extension {STATISTICS!r}"
                )
        self._is_checked = True

    async def configs(self, names: Iterable[str]) -> dict[str, ModelConfig]:
        """Return configurations of models; a missing one may be available in the next poll."""
        found: dict[str, ModelConfig] = {}

        async def get(name: str) -> None:
            # Counted even if the query is cancelled.
            attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
            try:
                found[name] = await self._server.config(name)
            except PollError as error:
                if error.cause in _INCONCLUSIVE and attempts < ATTEMPTS:
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

        wanted = list(dict.fromkeys(names))
        self._attempts = {name: self._attempts[name] for name in wanted if name in self._attempts}
        # Models with fewer attempts come first.
        wanted.sort(key=lambda name: self._attempts.get(name, 0))
        await _run_each(wanted, get, CONFIG_SECONDS)
        for name in wanted:
            if self._attempts.get(name, 0) >= ATTEMPTS:
                found.setdefault(name, ModelConfig())
            if name in found:
                del self._attempts[name]
        return found

    async def _ready(self) -> list[str]:
        found = [name for name in await self._server.ready() if self.wants(name)]
        if len(found) > MAX_MODEL_QUERIES:
            raise PollError(
                "bad_answer", f"more than {MAX_MODEL_QUERIES} models to query one by one"
            )
        return found

    async def _query_each(self, names: Sequence[str]) -> StatisticsAnswer:
        pieces: list[bytes] = []
        failed: dict[str, PollError] = {}
        remaining_bytes = MAX_BYTES

        async def get(name: str) -> None:
            nonlocal remaining_bytes
            if any(error.cause in _INCONCLUSIVE for error in failed.values()):
                failed[name] = next(iter(failed.values()))
                return
            try:
                found = await self._server.statistics(name)
            except PollError as error:
                # An unknown model is not ready.
                if error.cause != "unknown_model":
                    failed[name] = error
                return
            remaining_bytes -= sum(map(len, found))
            if remaining_bytes < 0:
                failed[name] = PollError("bad_answer", f"more than {MAX_BYTES >> 20} MiB in all")
            else:
                pieces.extend(found)

        await _run_each(names, get)
        failure = next(iter(failed.values()), None)
        if failure is not None and len(failed) == len(names):
            raise failure
        return StatisticsAnswer(pieces, lambda name: name not in failed, failure)

    def _set_one_by_one(self, *, one_by_one: bool) -> None:
        if one_by_one != self._one_by_one:
            self._lines.info(
                f"one by one {one_by_one}",
                "%s: the server has --model-namespacing and cannot return all models at once:"
                " models are queried one by one, and models that share a name are not available"
                if one_by_one
                else "%s: the server returns all models at once again",
                self._name,
            )
        self._one_by_one = one_by_one
        self._query_all_at = self._clock() + NAMESPACED_FOR


def _is_pattern(model: str) -> bool:
    return any(character in model for character in "*?[")


async def _run_each(
    names: Sequence[str], get: Callable[[str], Awaitable[None]], seconds: float | None = None
) -> None:
    """Run ``get`` for each name, some concurrently; cancel the rest after ``seconds``."""
    if not names:
        return
    waiting = iter(names)

    async def work() -> None:
        for name in waiting:
            await get(name)

    workers = [asyncio.ensure_future(work()) for _ in range(min(IN_FLIGHT, len(names)))]
    try:
        done, _ = await asyncio.wait(workers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for worker in done:
            worker.result()
    finally:
        for worker in workers:
            worker.cancel()
