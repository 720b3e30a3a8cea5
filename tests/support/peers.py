"""Peers of an exporter: real publishers, and connections that speak ZMTP byte by byte."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from sidestep.app.exporter import Exporter
from sidestep.engines.vllm.wire import VllmStep
from sidestep.metrics.computed_gauges import scalar
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

LABELS = {"engine": "0", "model_name": "m"}


def count(tokens: int = 1) -> VllmStep:
    """Return a step that generated ``tokens``."""
    iteration = IterationStats(num_generation_tokens=tokens)
    return VllmStep(0, time.monotonic(), time.time(), None, iteration)


def publisher(
    endpoint: str,
    stream: str = "s",
    engine: str = "e",
    bounds: dict[str, list[float]] | None = None,
    info: dict[str, dict[str, str]] | None = None,
    *,
    flush_interval: float = 0.01,
) -> Publisher:
    """Return a publisher of one engine."""
    described = EngineInfo(engine, "vllm", LABELS, info=info or {}, bounds=bounds or {})
    return Publisher(endpoint, stream, [described], flush_interval=flush_interval)


def generated(exporter: Exporter, engine: str = "e") -> int:
    """Return the generated tokens that the exporter has counted for ``engine``."""
    found = exporter.registry.engines.get(engine)
    return 0 if found is None else int(scalar(found, "vllm:generation_tokens_total"))


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def zmtp(path: Path) -> socket.socket:
    """Connect as a DEALER, handshake included, to send any bytes afterwards."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(10)
    ready = _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"")
    body = b"\x05READY" + ready
    try:
        peer.connect(str(path))
        peer.sendall(GREETING + b"\x04" + bytes([len(body)]) + body)
        heard = b""
        # libzmq may take what is sent before its READY for part of the handshake.
        while b"READY" not in heard:
            heard += peer.recv(1024) or _closed()
    except OSError:
        peer.close()
        raise
    return peer


def _closed() -> NoReturn:
    raise ConnectionResetError


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


@contextlib.contextmanager
def endless(path: Path, frame: bytes) -> Iterator[list[int]]:
    """Send parts of a message that never ends, and connect again whenever cut off."""
    stop = threading.Event()
    sent: list[int] = []

    def attack() -> None:
        while not stop.wait(0.005):
            with contextlib.suppress(OSError), zmtp(path) as peer:
                sent.append(0)
                while not stop.is_set():
                    peer.sendall(frame)
                    sent[-1] += len(frame)

    thread = threading.Thread(target=attack)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()
