"""The sender's heartbeats: when they are due, and the progress that they carry."""

from __future__ import annotations

from random import Random

import pytest

from sidestep.engines.folding import ItemFolder
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    Ack,
    EngineInfo,
    Heartbeat,
    Hello,
    decode_from_sender,
    encode,
)
from sidestep.protocol.progress import OVERDUE, Progress
from sidestep.protocol.sender import HEARTBEAT, OVERDUE_HEARTBEAT, Sender

ENGINE = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"})
EARLIER = 0.01


def open_sender() -> Sender:
    """Return a sender whose Hello was answered, and which sent its first heartbeat, at 0."""
    sender = Sender("s", 7, [ENGINE], Random(1), ItemFolder())
    hello = decode_from_sender(sender.next_frame(0.0) or b"")
    assert isinstance(hello, Hello)
    sender.sent(0.0)
    sender.receive(encode(Ack(VERSION, 5, 7, hello.nonce, 0, 0)), 0.0)
    assert beat(sender, 0.0) is not None
    return sender


def beat(sender: Sender, now: float) -> Heartbeat | None:
    """Send the heartbeat that is due at ``now``, and return it; None if none is."""
    frame = sender.next_frame(now)
    if frame is None:
        return None
    sender.sent(now)
    message = decode_from_sender(frame)
    assert isinstance(message, Heartbeat)
    return message


def late(**ages: float) -> Progress:
    """Return progress with these ages."""
    return Progress(0, unfinished=1, **ages)  # type: ignore[arg-type]


def test_a_heartbeat_carries_the_last_progress() -> None:
    """Each one repeats it until there is another."""
    sender = open_sender()
    sender.report([Progress(0, steps=1), Progress(1)])
    sender.report([Progress(0, steps=2), Progress(1)])

    for now in (HEARTBEAT, 2 * HEARTBEAT):
        assert beat(sender, now - EARLIER) is None
        found = beat(sender, now)
        assert found is not None
        assert found.progress == [Progress(0, steps=2), Progress(1)]


@pytest.mark.parametrize("age", ["step_age", "waiting_age", "output_age"])
@pytest.mark.parametrize(
    ("seconds", "interval"),
    [(OVERDUE - EARLIER, HEARTBEAT), (OVERDUE, OVERDUE_HEARTBEAT)],
)
def test_heartbeats_are_due_earlier_while_progress_is_overdue(
    age: str, seconds: float, interval: float
) -> None:
    """Of any engine, by any of its ages."""
    sender = open_sender()
    for number in range(1, 4):
        sender.report([Progress(0), late(**{age: seconds})])
        assert beat(sender, number * interval - EARLIER) is None
        assert sender.idle(number * interval - EARLIER)
        assert not sender.idle(number * interval)
        assert beat(sender, number * interval) is not None
    sender.report([Progress(0)])
    assert beat(sender, 3 * interval + HEARTBEAT - EARLIER) is None


def test_the_longest_step_is_kept_until_a_heartbeat_carries_it() -> None:
    """And is carried once: each counts as a step of its own at the exporter."""
    sender = open_sender()
    for longest, tokens in [(0.5, 5), (3.0, 30), (1.0, 10), (0.0, 0)]:
        sender.report([Progress(0, longest=longest, longest_tokens=tokens)])
    found = [beat(sender, HEARTBEAT), beat(sender, 2 * HEARTBEAT)]
    sender.report([Progress(0, longest=0.25, longest_tokens=2)])
    found.append(beat(sender, 3 * HEARTBEAT))

    assert [(3.0, 30), (0.0, 0), (0.25, 2)] == [
        (each.progress[0].longest, each.progress[0].longest_tokens) for each in found if each
    ]
