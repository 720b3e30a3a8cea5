"""One poll of a Triton server: questions, answers, and what they say of each version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from sidestep.errors import PollError, WireError
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.triton.models import Look, Models, Moment, gone
from sidestep_adapters.triton.queries import Answer, Questions
from sidestep_adapters.triton.server import Server, detail
from sidestep_adapters.triton.statistics import Head

SLICE = 0.001
"""Seconds of reading after which the event loop gets its turn."""
MAX_VERSIONS = 4096
"""Of one server: each takes memory here, whether it is shown or not."""


class Found(NamedTuple):
    """What a poll came to.

    Attributes:
        seconds: From asking for statistics until they were there.
    """

    moment: Moment
    seconds: float
    failure: PollError | None


class Poller:
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
        questions: Questions,
        heard: Callable[[], None],
        hand: Callable[[Look], None],
        reject: Callable[[str], None],
        known: Callable[[], Mapping[str, EngineInfo]],
        lines: RateLimitedLog,
        name: str,
    ) -> None:
        self.models = models
        self.questions = questions
        self._server = server
        self._heard = heard
        self._hand = hand
        self._reject = reject
        self._known = known
        self._lines = lines
        self._name = name
        self._until = 0.0
        """When the slice of reading that is under way is over."""

    async def poll(self) -> Found:
        """Ask, and hand on what is there.

        Raises:
            PollError: Nothing is.
        """
        await self.questions.check()
        asked = time.monotonic()
        answer = await self.questions.statistics()
        moment = Moment(time.monotonic(), time.time())
        self._until = time.perf_counter() + SLICE
        found = await self._heads(answer.pieces)
        self._heard()
        before = dict(self._known())
        new: dict[Head, bytes] = {}
        for head, piece in found.items():
            await self._breathe()
            if not self._look(head, piece, moment):
                new[head] = piece
        configs = await self.questions.configs(head.name for head in new)
        for head, piece in new.items():
            await self._breathe()
            if head.name in configs:
                try:
                    for look in self.models.look_anew(head, piece, moment, configs[head.name]):
                        self._hand_on(look, before)
                except WireError as error:
                    self._refuse(head, error)
            else:
                for look in self.models.wait(head, piece, moment):
                    self._hand(look)
        server = before.get(self.models.server.id)
        if server is not None and server != self.models.server:
            # An exporter before this one showed it with other labels.
            self._hand(Look(server, None, leaves=True))
        others = before.keys() - self.models.engines
        for look in self.models.absent(found, moment, answer.covers):
            self._hand(look)
        self._leave((before[other] for other in others), found, answer, moment)
        return Found(moment, moment.stamp - asked, answer.failure)

    async def _heads(self, pieces: Iterable[bytes]) -> dict[Head, bytes]:
        """The pieces of models that are wanted, by whose they are.

        Raises:
            PollError: One does not say, or two are the same version's.
        """
        found: dict[Head, bytes] = {}
        for piece in pieces:
            await self._breathe()
            try:
                head = self.models.find(piece) or self._server.head(piece)
            except WireError as error:
                raise PollError("bad_answer", detail(error)) from None
            if head in found:
                twice = f"version {head.version!r:.200} of {head.name!r:.200} twice"
                raise PollError("bad_answer", twice)
            if len(found) >= MAX_VERSIONS:
                raise PollError("bad_answer", f"more than {MAX_VERSIONS} versions of models")
            if self.questions.wants(head.name):
                found[head] = piece
        return found

    def _look(self, head: Head, piece: bytes, moment: Moment) -> bool:
        """Hand on what ``piece`` says; whether that is all that can be done with it."""
        try:
            look = self.models.look(head, piece, moment)
            if look is None:
                # Nothing more is asked about what cannot be shown anyway.
                self._server.stats(piece, False)
        except WireError as error:
            self._refuse(head, error)
            return True
        if look is not None:
            self._hand(look)
        return look is not None

    def _hand_on(self, look: Look, before: Mapping[str, EngineInfo]) -> None:
        """Hand on a look at a new version, which may have been known with other labels."""
        known = before.get(look.info.id)
        if known is not None and known != look.info and not look.leaves:
            self._hand(Look(known, None, leaves=True))
        self._hand(look)

    def _leave(
        self,
        others: Iterable[EngineInfo],
        found: Collection[Head],
        answer: Answer,
        moment: Moment,
    ) -> None:
        """Part with versions of which only an exporter knew that was started anew."""
        for info in others:
            head = Head(info.labels["model"], info.labels["version"])
            if head in found:
                continue
            if not self.questions.wants(head.name):
                self._hand(Look(info, None, leaves=True))
            elif answer.covers(head.name):
                self._hand(gone(info, moment))

    def _refuse(self, head: Head, error: WireError) -> None:
        """One version's statistics are no good: it stays as it was."""
        self._reject(error.reason)
        self._lines.warning(
            "refused",
            "%s: model %.200r, version %.200r: %s",
            self._name,
            head.name,
            head.version,
            error,
        )

    async def _breathe(self) -> None:
        if time.perf_counter() > self._until:
            await asyncio.sleep(0)
            self._until = time.perf_counter() + SLICE
