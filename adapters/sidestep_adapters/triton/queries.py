"""Which questions it takes to have all statistics of a server at one moment."""

from __future__ import annotations

import asyncio
import fnmatch
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from sidestep.errors import PollError
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.triton.model_config import STATISTICS, ModelConfig
from sidestep_adapters.triton.server import NAMESPACED, Server

IN_FLIGHT = 8
"""Questions at once, where it takes one for each model."""
NAMESPACED_FOR = 60.0
"""Seconds after which a server that had to be asked model by model is asked for all again."""
CONFIG_SECONDS = 5.0
"""That configurations of new models may take in a poll; the rest is for the next."""
MAX_ASKED = 4096
"""Models that are asked for one by one."""
MAX_BYTES = 16 << 20
"""Of statistics that are asked for one by one, together."""
ATTEMPTS = 3
"""Polls in which the configuration of a model may not be had before it is done without."""
_UNSURE = ("slow", "unreachable", "not_ready")
"""Outcomes that say nothing of what was asked for."""


class Answer(NamedTuple):
    """Statistics.

    Attributes:
        pieces: One for each version that is ready.
        covers: Whether a model of a name that has none among them is not ready.
        failure: Why some are not.
    """

    pieces: Sequence[bytes]
    covers: Callable[[str], bool]
    failure: PollError | None = None


class Questions:
    """Those to one server.

    Args:
        models: Names or patterns of names that are asked for; empty: all.
        name: The server's, in the log.
    """

    def __init__(
        self,
        server: Server,
        models: Sequence[str],
        name: str,
        lines: RateLimitedLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._name = name
        self._lines = lines
        self._clock = clock
        self._exact = [] if any(map(_is_pattern, models)) else list(models)
        self._patterns = [re.compile(fnmatch.translate(model)) for model in models]
        self._is_known = False
        """Whether the server has been asked what it can do."""
        self._one_by_one = False
        self._all_again = 0.0
        """When all are to be asked for at once again."""
        self._attempts: dict[str, int] = {}
        """Polls in which a model's configuration could not be had."""

    def wants(self, model: str) -> bool:
        """Whether a model of this name is asked for."""
        return not self._patterns or any(each.match(model) for each in self._patterns)

    def connect_anew(self) -> None:
        """Another process may answer from now on."""
        self._is_known = False
        self._all_again = 0.0
        self._attempts.clear()

    async def statistics(self) -> Answer:
        """Of all models that are asked for.

        Raises:
            PollError: There are none.
        """
        if self._exact:
            return await self._of_each(self._exact)
        if self._one_by_one and self._clock() < self._all_again:
            return await self._of_each(await self._ready())
        try:
            pieces = await self._server.statistics()
        except PollError as error:
            if error.cause != "unknown_model" or NAMESPACED not in str(error):
                raise
            self._note_namespaces(one_by_one=True)
            return await self._of_each(await self._ready())
        self._note_namespaces(one_by_one=False)
        return Answer(pieces, lambda _: True)

    async def check(self) -> None:
        """Whether the server has the statistics extension at all; asked once a connection.

        Raises:
            PollError: It has not, or did not answer.
        """
        if self._is_known:
            return
        try:
            found = await self._server.extensions()
        except PollError as error:
            if error.cause in (*_UNSURE, "bad_answer"):
                raise
            # It may be allowed to ask for statistics and not for this.
        else:
            if STATISTICS not in found:
                raise PollError(
                    "unsupported", f"the server does not name the extension {STATISTICS!r}"
                )
        self._is_known = True

    async def configs(self, names: Iterable[str]) -> dict[str, ModelConfig]:
        """Configurations of models; one that is not there yet may be in the next poll."""
        found: dict[str, ModelConfig] = {}

        async def get(name: str) -> None:
            # Also where this is cut off.
            attempts = self._attempts[name] = self._attempts.get(name, 0) + 1
            try:
                found[name] = await self._server.config(name)
            except PollError as error:
                if error.cause in _UNSURE and attempts < ATTEMPTS:
                    return
                found[name] = ModelConfig()
                self._lines.warning(
                    "config",
                    "%s: no configuration of model %.200r: %s; it is shown without metric tags"
                    " and instances",
                    self._name,
                    name,
                    error,
                )

        wanted = list(dict.fromkeys(names))
        self._attempts = {name: self._attempts[name] for name in wanted if name in self._attempts}
        # Whose turn never came before comes first.
        wanted.sort(key=lambda name: self._attempts.get(name, 0))
        await _each(wanted, get, CONFIG_SECONDS)
        for name in wanted:
            if self._attempts.get(name, 0) >= ATTEMPTS:
                found.setdefault(name, ModelConfig())
            if name in found:
                del self._attempts[name]
        return found

    async def _ready(self) -> list[str]:
        found = [name for name in await self._server.ready() if self.wants(name)]
        if len(found) > MAX_ASKED:
            raise PollError("bad_answer", f"more than {MAX_ASKED} models, asked for one by one")
        return found

    async def _of_each(self, names: Sequence[str]) -> Answer:
        pieces: list[bytes] = []
        failed: dict[str, PollError] = {}
        room = MAX_BYTES

        async def get(name: str) -> None:
            nonlocal room
            if any(error.cause in _UNSURE for error in failed.values()):
                failed[name] = next(iter(failed.values()))
                return
            try:
                found = await self._server.statistics(name)
            except PollError as error:
                # One that is not known is not there.
                if error.cause != "unknown_model":
                    failed[name] = error
                return
            room -= sum(map(len, found))
            if room < 0:
                failed[name] = PollError("bad_answer", f"more than {MAX_BYTES >> 20} MiB in all")
            else:
                pieces.extend(found)

        await _each(names, get)
        failure = next(iter(failed.values()), None)
        if failure is not None and len(failed) == len(names):
            raise failure
        return Answer(pieces, lambda name: name not in failed, failure)

    def _note_namespaces(self, *, one_by_one: bool) -> None:
        if one_by_one != self._one_by_one:
            self._lines.info(
                f"one by one {one_by_one}",
                "%s: the server has --model-namespacing and cannot tell of all models at once:"
                " each is asked for by itself, of two with the same name none can be had"
                if one_by_one
                else "%s: the server tells of all models at once again",
                self._name,
            )
        self._one_by_one = one_by_one
        self._all_again = self._clock() + NAMESPACED_FOR


def _is_pattern(model: str) -> bool:
    return any(character in model for character in "*?[")


async def _each(
    names: Sequence[str], get: Callable[[str], Awaitable[None]], seconds: float | None = None
) -> None:
    """``get`` each, some at once; whatever happens, none goes on after ``seconds``."""
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
