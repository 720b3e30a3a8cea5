"""Exporters that read nothing more, acknowledge for a while, and fall silent."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

from fuzz import zmtp_peer as zmtp
from fuzz.hostile_exporter import answered, hostile_exporter

from exporters import until
from peers import ENGINE
from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import encode
from sidestep.protocol.sender import ACK_TIMEOUT
from sidestep_adapters.publisher.publisher import Publisher

PACE = 0.02
"""Seconds between two acknowledgements, so that one always comes within a flush."""
ANSWERING = 4.0
"""Seconds of acknowledgements, in which every buffer of the connection becomes full."""
STEP = IterationStats(3, inter_token_latencies_iter=[0.01] * 1000)


async def test_silence_after_acknowledgements_ends_the_connection(tmp_path: Path) -> None:
    """The publisher's thread neither stays in one flush while they come, nor waits for ever afterwards."""
    silent, left = threading.Event(), threading.Event()

    def behave(peer: socket.socket, number: int) -> None:
        ack = answered(peer, number)
        ack.nonce = None
        deadline = time.monotonic() + ANSWERING
        while time.monotonic() < deadline:
            peer.sendall(zmtp.frame(encode(ack)))
            time.sleep(PACE)
        silent.set()
        left.wait()

    with hostile_exporter(tmp_path / "x", behave) as hostile, contextlib.ExitStack() as ended:
        ended.callback(left.set)
        one = Publisher(hostile.endpoint, "s", [ENGINE], flush_interval=0.002)
        most = 0

        def pushed() -> None:
            nonlocal most
            one.push(VllmStep(0, time.monotonic(), time.time(), None, STEP))
            most = max(most, one.queued)

        def is_silent() -> bool:
            pushed()
            return silent.is_set()

        def is_reopened() -> bool:
            pushed()
            return not one.connected

        await until(lambda: one.connected)
        await until(is_silent)
        assert one.connected
        assert most < ANSWERING / PACE
        await until(is_reopened, timeout=3 * ACK_TIMEOUT)
        one.close(0.0)

    assert one.dropped == 0
