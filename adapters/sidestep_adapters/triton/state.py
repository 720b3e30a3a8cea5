"""State of a Triton server, exported as series of the engine that represents the server itself."""

from __future__ import annotations

from sidestep.errors import WireError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.scrape.poll_state import STATES
from sidestep_adapters.scrape.server_state import OUTCOMES, ServerState
from sidestep_adapters.triton.api import advice


class TritonState(ServerState):
    """State of one server.

    Args:
        feed: The ingest side of the server.
        server: The engine that represents the server itself.
        name: The server's name in the log.
        interval: Seconds between polls.
        lines: Rate-limited log.
    """

    def __init__(
        self,
        feed: ServerFeed,
        server: EngineInfo,
        name: str,
        interval: float,
        lines: RateLimitedLog,
    ) -> None:
        super().__init__(feed, name, interval, lines, advice=advice, export=self._export_state)
        self._server = server
        self._polled: tuple[Family, ...] = ()
        """Families of the complete poll that is being noted."""

    def polled(self, now: float, seconds: float, versions: int) -> None:
        """Note a complete poll, with its number of versions and its duration in seconds."""
        duration = Family(
            "sidestep_triton_poll_duration_seconds",
            "histogram",
            samples=[Sample(observations=[seconds])],
        )
        number = Family(
            "sidestep_triton_model_versions", "gauge", samples=[Sample(value=float(versions))]
        )
        self._polled = duration, number
        self.succeeded(now, f"model versions: {versions}")
        self._polled = ()

    def _export_state(self, now: float, outcome: str) -> None:
        states = [Sample([state], float(state == self.state)) for state in STATES]
        counted = dict.fromkeys(OUTCOMES, 0.0)
        if outcome:
            counted[outcome] = 1.0
        polls = [Sample([name], count) for name, count in counted.items()]
        item = Samples(
            0,
            now,
            [
                Family("sidestep_triton_state", "gauge", ["state"], states),
                Family("sidestep_triton_polls_total", "counter", ["outcome"], polls),
                *self._polled,
            ],
        )
        try:
            self._feed.apply(self._server, item)
        except WireError as error:
            self._feed.intake.reject(error.reason)
            self._lines.warning(
                "export", "%s: the server's state is not exposed: %s", self._name, error
            )
