"""What a server's polls make of it over half a minute and more."""

from __future__ import annotations

import logging

import pytest

from intakes import Fed
from pages import parse
from sidestep.engines.items import Item
from sidestep.engines.triton.wire import ModelStats, TritonStats
from sidestep.errors import PollError
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.triton.state import CONNECT_LIMIT, STALE_AFTER, ServerState

SERVER = EngineInfo("triton/t", "triton", {})
MODEL = EngineInfo("triton/t/m/1", "triton", {"model": "m", "version": "1"})
SLOW, GONE = PollError("slow", "no answer"), PollError("unreachable", "refused")


class Polls:
    """A server that is polled once a second."""

    def __init__(self) -> None:
        self.fed = Fed()
        self.fed.now = 1000.0
        self.feed = ServerFeed(self.fed.intake, "triton t")
        self.log = logging.getLogger("sidestep.triton")
        self.state = ServerState(self.feed, "triton t", 1.0, self._tell, self.log)

    def _tell(self, item: Item) -> None:
        self.feed.tell(SERVER, item)

    def good(self) -> None:
        """Statistics of one model, in which an instance was idle."""
        now = self.fed.now
        self.state.poll_started(now)
        self.state.statistics_received(now)
        self.feed.tell(MODEL, TritonStats(0, now, 1e9 + now, ModelStats(), 1))
        self.state.succeeded(now, 0.01, 1)
        self.wait(1.0)

    def bad(self, error: PollError) -> None:
        """None, for such a cause."""
        self.state.poll_started(self.fed.now)
        self.state.failed(self.fed.now, error)
        self.wait(1.0)

    def wait(self, seconds: float) -> None:
        """The exporter looks around meanwhile."""
        until = self.fed.now + seconds
        while self.fed.now < until:
            self.fed.pass_time(0.5)
            self.state.expire(self.fed.now)
            while self.fed.intake.busy:
                self.fed.intake.work()

    def shows(self, name: str) -> bool:
        """Whether a family is on the page."""
        return name in parse(self.fed.page)

    @property
    def is_up(self) -> bool:
        """Whether the model's engine is."""
        return bool(self.fed.intake.registry.engines[MODEL.id].streams)

    @property
    def now(self) -> str:
        """The state on the page."""
        samples = parse(self.fed.page)["sidestep_triton_state"].samples
        return next(dict(labels)["state"] for (_, labels), value in samples.items() if value)


COUNTER, GAUGE = "nv_inference_request_success", "sidestep_triton_instances"


@pytest.mark.parametrize("cause", ["slow", "restricted", "bad_answer", "http_500", "not_ready"])
def test_what_answers_wrong_is_stale_for_as_long_as_it_lasts(cause: str) -> None:
    """Its engines stay up; after half a minute its gauges are not shown, its counters are."""
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


def test_a_question_that_waits_is_no_silence() -> None:
    """A model that takes minutes to load blocks the port for so long."""
    polls = Polls()
    polls.good()
    polls.state.poll_started(polls.fed.now)
    polls.wait(STALE_AFTER - 2)
    assert (polls.now, polls.is_up, polls.shows(GAUGE)) == ("stale", True, True)
    polls.wait(600)

    assert (polls.now, polls.is_up) == ("stale", True)
    assert (polls.shows(COUNTER), polls.shows(GAUGE)) == (True, False)


def test_what_cannot_be_reached_is_down_at_once() -> None:
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


def test_a_server_that_never_had_statistics_is_down() -> None:
    """Whatever it answers; the page says so for as long as it lasts."""
    polls = Polls()
    for _ in range(400):
        polls.bad(PollError("restricted", "?"))
        assert polls.now == "down"
    assert not polls.fed.intake.registry.engines[SERVER.id].streams


def test_a_server_whose_first_answer_does_not_come_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The page says so from the begin, the log once something must be there."""
    polls = Polls()
    polls.state.poll_started(polls.fed.now)
    polls.wait(0.5)
    assert polls.now == "down"
    assert not polls.fed.intake.registry.engines[SERVER.id].streams
    polls.wait(CONNECT_LIMIT - 1)
    assert not caplog.messages
    polls.wait(30)
    assert len(caplog.messages) == 1
    assert "slow: no answer for 6.0 s so far" in caplog.text
    polls.good()

    assert (polls.now, polls.is_up) == ("up", True)


def test_a_question_that_may_not_have_arrived_keeps_nothing_up() -> None:
    """Until a connection must be there."""
    polls = Polls()
    polls.good()
    heard = polls.feed._stream.heard
    polls.state.poll_started(polls.fed.now)
    polls.wait(CONNECT_LIMIT - 0.5)
    assert polls.feed._stream.heard == heard
    polls.wait(1.0)

    assert polls.feed._stream.heard > heard


def test_a_failure_that_comes_and_goes_is_said_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And that it is over, too."""
    caplog.set_level("INFO", "sidestep")
    polls = Polls()
    for _ in range(20):
        polls.good()
        polls.bad(SLOW)
        polls.bad(GONE)

    assert [line.split(": ")[1] for line in caplog.messages] == [
        "slow",
        "unreachable",
        "polled again",
    ]
