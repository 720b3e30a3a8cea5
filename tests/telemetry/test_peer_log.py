"""Log lines on a connection, with time as data."""

from __future__ import annotations

import logging

import pytest

from sidestep.telemetry.peer_log import PATIENCE, PeerLog

log = logging.getLogger("sidestep.test")


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, log.name)


@pytest.fixture
def peer() -> PeerLog:
    """The log of one connection."""
    return PeerLog(log, "sidestep", "the exporter at ipc:///x")


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return level and text of the lines since the last call."""
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def test_an_outage_has_a_line_after_ten_seconds_and_one_at_its_end(
    peer: PeerLog, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning with the cause, from the start as well as later."""
    for began in (0.0, 1000.0):
        for step in range(99):
            peer.absent(began + step / 10, "Connection refused")
        assert lines(caplog) == []
        for step in range(100, 300):
            peer.absent(began + step / 10, "Connection refused")
        peer.connected(began + 34.0)
        peer.connected(began + 35.0)

        assert lines(caplog) == [
            (
                "WARNING",
                "sidestep: no connection to the exporter at ipc:///x for 10 s: Connection refused",
            ),
            (
                "INFO",
                "sidestep: connected to the exporter at ipc:///x, after 34 s without a connection",
            ),
        ]


def test_a_short_outage_has_no_line(peer: PeerLog, caplog: pytest.LogCaptureFixture) -> None:
    """An exporter that restarts logs its own lines."""
    peer.connected(0.0)
    lines(caplog)
    peer.absent(100.0, "")
    peer.absent(109.0, "")
    peer.connected(109.5)
    peer.absent(110.0, "")
    peer.absent(119.0, "")

    assert lines(caplog) == []


def test_another_cause_has_a_line_of_its_own(
    peer: PeerLog, caplog: pytest.LogCaptureFixture
) -> None:
    """A minute after the last one; without a cause, the peer does not answer."""
    causes = ["", *["Permission denied"] * 200]
    for now, cause in enumerate(causes, int(PATIENCE)):
        peer.absent(now - PATIENCE, cause)
    found = [text.rpartition("ipc:///x ")[2] for _, text in lines(caplog)]

    assert found == ["for 10 s: Permission denied"]
    peer.absent(250.0, "")
    assert [text.rpartition(" s: ")[2] for _, text in lines(caplog)] == ["no answer"]


def test_a_cause_from_a_peer_is_printable(peer: PeerLog, caplog: pytest.LogCaptureFixture) -> None:
    """A terminal must not obey it."""
    peer.absent(0.0, "")
    peer.absent(PATIENCE, "the peer asks for \x1b[31m\n keys")
    ((_, text),) = lines(caplog)

    assert text.isprintable()
