"""The state of a server by its polls, over half a minute and more."""

from __future__ import annotations

import logging

import pytest

from intakes import Fed
from pages import parse
from sidestep.errors import PollError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep.telemetry.logs import RateLimitedLog
from sidestep_adapters.polling.state import STALE_AFTER
from sidestep_adapters.triton.poller import TritonState
from sidestep_adapters.triton.wire import ModelStats, TritonStats

SERVER = EngineInfo("triton/t", "triton", {})
MODEL = EngineInfo("triton/t/m/1", "triton", {"model": "m", "version": "1"})
GONE = PollError("unreachable", "refused")


class Polls:
    """A server that is polled once a second."""

    def __init__(self) -> None:
        self.fed = Fed()
        self.fed.now = 1000.0
        self.feed = ServerFeed(self.fed.intake, "triton t")
        lines = RateLimitedLog(logging.getLogger("sidestep.triton"))
        self.state = TritonState(self.feed, SERVER, "triton t", 1.0, lines)

    def good(self) -> None:
        """Succeed with statistics of one model, in which an instance was idle."""
        now = self.fed.now
        self.state.started(now)
        self.state.statistics_received(now)
        self.feed.apply(MODEL, TritonStats(0, now, 1e9 + now, ModelStats(), 1))
        self.state.polled(now, 0.01, 1)
        self.wait(1.0)

    def bad(self, error: PollError) -> None:
        """Fail with ``cause``."""
        self.state.started(self.fed.now)
        self.state.poll_failed(self.fed.now, error)
        self.wait(1.0)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        until = self.fed.now + seconds
        while self.fed.now < until:
            self.fed.advance(0.5)
            self.state.expire(self.fed.now)
            while self.fed.intake.busy:
                self.fed.intake.work()

    def state_of(self, engine: EngineInfo) -> str:
        """Return the state of an engine."""
        health = self.fed.intake.health.of(self.fed.intake.registry.engines[engine.id])
        return "" if health is None else health.state.value

    def shows(self, name: str) -> bool:
        """Return whether a family is on the page."""
        return name in parse(self.fed.page)

    @property
    def is_up(self) -> bool:
        """Return whether the model's engine is up."""
        return bool(self.fed.intake.registry.engines[MODEL.id].feeds.streams)

    @property
    def now(self) -> str:
        """Return the state on the page."""
        samples = parse(self.fed.page)["sidestep_triton_state"].samples
        return next(dict(labels)["state"] for (_, labels), value in samples.items() if value)


COUNTER, GAUGE = "nv_inference_request_success", "sidestep_triton_instances"


@pytest.mark.parametrize("cause", ["slow", "bad_answer"])
def test_a_server_with_invalid_answers_is_stale(cause: str) -> None:
    """Its engines stay up; after half a minute its gauges are hidden, its counters are not."""
    polls = Polls()
    polls.good()
    for _ in range(int(STALE_AFTER) - 2):
        polls.bad(PollError(cause, "?"))
    assert (polls.now, polls.is_up, polls.shows(GAUGE)) == ("stale", True, True)
    for _ in range(600):
        polls.bad(PollError(cause, "?"))
    assert (polls.now, polls.is_up) == ("stale", True)
    assert (polls.shows(COUNTER), polls.shows(GAUGE)) == (True, False)
    polls.good()

    assert (polls.now, polls.is_up, polls.shows(GAUGE)) == ("up", True, True)


def test_an_unreachable_server_is_down_at_once() -> None:
    """Its gauges go after half a minute, its counters after five; its state stays."""
    polls = Polls()
    polls.good()
    polls.bad(GONE)
    assert (polls.now, polls.is_up) == ("down", False)
    assert polls.shows(GAUGE)
    for _ in range(35):
        polls.bad(GONE)
    assert (polls.shows(COUNTER), polls.shows(GAUGE)) == (True, False)
    for _ in range(300):
        polls.bad(GONE)
        assert polls.now == "down"
    assert not polls.shows(COUNTER)
    polls.good()

    assert (polls.now, polls.is_up, polls.shows(COUNTER)) == ("up", True, True)
