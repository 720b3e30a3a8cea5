"""The sources of ``--triton``: one poller for each server, while the exporter runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from sidestep.config.settings import Config
from sidestep.config.triton_servers import Server
from sidestep.errors import ConfigError, PollError, WireError
from sidestep.ingest.intake import Intake
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.polling.poller import Poller
from sidestep_adapters.polling.state import OUTCOMES, STATES, ServerState
from sidestep_adapters.triton.http import ADVICE, TritonApi
from sidestep_adapters.triton.models import Models, PollTime, server_engine
from sidestep_adapters.triton.queries import Queries
from sidestep_adapters.triton.wire import TritonStats

log = logging.getLogger("sidestep.triton")


class TritonState(ServerState):
    """State of one server, which is exposed as an engine of its own."""

    def __init__(
        self,
        feed: ServerFeed,
        server: EngineInfo,
        name: str,
        interval: float,
        lines: RateLimitedLog,
    ) -> None:
        super().__init__(feed, name, interval, lines, advice=ADVICE, export=self._export_state)
        self._server = server

    def polled(self, now: float, seconds: float, versions: int) -> None:
        """Record a complete poll, with its number of versions and its duration in seconds."""
        duration = Sample(observations=[seconds])
        number = Sample(value=float(versions))
        self._apply(
            now,
            Family("sidestep_triton_poll_duration_seconds", "histogram", samples=[duration]),
            Family("sidestep_triton_model_versions", "gauge", samples=[number]),
        )
        self.succeeded(now, f"model versions: {versions}")

    def _export_state(self, now: float, outcome: str) -> None:
        states = [Sample([state], float(state == self.state)) for state in STATES]
        outcomes = dict.fromkeys((*OUTCOMES, outcome) if outcome else OUTCOMES)
        polls = [Sample([each], float(each == outcome)) for each in outcomes]
        self._apply(
            now,
            Family("sidestep_triton_state", "gauge", ["state"], states),
            Family("sidestep_triton_polls_total", "counter", ["outcome"], polls),
            is_answer=False,
        )

    def _apply(self, now: float, *families: Family, is_answer: bool = True) -> None:
        try:
            self._feed.apply(self._server, Samples(0, now, list(families)), is_answer=is_answer)
        except WireError as error:
            self._feed.intake.reject(error.reason)
            self._lines.warning(
                "export", "%s: the server's state is not exposed: %s", self._name, error
            )


class TritonPoller(Poller):
    """Polls one server.

    Args:
        has_failures: Whether failed requests are exposed under Triton's own name: its page can
            have them by reason.
    """

    def __init__(
        self, server: Server, api: TritonApi, feed: ServerFeed, *, has_failures: bool
    ) -> None:
        target = server.target
        super().__init__(target.interval, api.client.close)
        self._feed = feed
        self._lines = lines = RateLimitedLog(log)
        self._name = name = f"triton {target.name}"
        self._queries = Queries(api, server.models, name, lines)
        self._models = Models(
            target.name,
            dict(target.labels),
            self._queries,
            feed,
            emit=lambda *update: self.queue(partial(self._apply_update, *update)),
            lines=lines,
            has_failures=has_failures,
        )
        self.state = TritonState(feed, self._models.server, name, target.interval, lines)

    def tick(self, now: float) -> None:
        """Detect a slow server."""
        self.state.expire(now)

    def cut(self) -> None:
        """Discard the state of the server's models and the waiting updates, and start again."""
        self._models.clear()
        super().cut()

    async def poll(self) -> float:
        """Poll the server once, and queue the updates."""
        self.state.started(time.monotonic())
        try:
            started = time.monotonic()
            answer = await self._queries.statistics()
            poll_time = PollTime(time.monotonic(), time.time())
            found = await self._models.pieces_by_version(answer.pieces)
            self.queue(partial(self.state.statistics_received, time.monotonic()))
            await self._models.update(found, answer, poll_time)
        except PollError as error:
            self._fail(error)
            return self._interval
        if answer.failure is not None:
            self._fail(answer.failure)
        else:
            now, seconds = poll_time.stamp, poll_time.stamp - started
            self.queue(lambda: self.state.polled(now, seconds, len(self._models)))
        return self._interval

    def _fail(self, error: PollError) -> None:
        self.queue(partial(self.state.poll_failed, time.monotonic(), error.without_frames()))

    def _apply_update(self, info: EngineInfo, item: TritonStats | None, is_detached: bool) -> None:
        identity = info.id
        if item is not None:
            try:
                self._feed.apply(info, item)
            except WireError as error:
                self._feed.intake.reject(error.reason)
                self._lines.warning(
                    "export", "%s: %s is not exposed: %s", self._name, identity, error
                )
        if is_detached:
            self._feed.unbind(identity)


def sources(config: Config, intake: Intake, _: object) -> Sequence[TritonPoller]:
    """Return one poller for each ``--triton``."""
    # A family cannot come from both a page and statistics, which have other labels.
    has_failures = not any(server.metrics for server in config.triton)
    return [_source(server, intake, has_failures=has_failures) for server in config.triton]


def _source(server: Server, intake: Intake, *, has_failures: bool) -> TritonPoller:
    name = server.target.name
    api = TritonApi(server.target)
    try:
        intake.registry.check(server_engine(name, dict(server.target.labels)))
        api.client.check()
    except (ConfigError, WireError) as error:
        raise ConfigError(f"--triton {name}: {error}") from None
    feed = ServerFeed(intake, f"triton {name}")
    return TritonPoller(server, api, feed, has_failures=has_failures)
