"""A stand-in engine for a pod's container: it pushes items of a seed through the real publisher.

Its folder shows how far each of its processes is: ``pushed-N`` is written at each push and outlives the process.
Process N begins once there is a file ``go-N`` and pauses at ``pause-N``. At SIGTERM it goes on for a while, as an
engine does with its requests, and then sends the rest.
"""

from __future__ import annotations

import os
import signal
import threading
from argparse import Namespace
from pathlib import Path

from chaos.engine import Engine

FOLDER = Path("/run/engine")
RATE = 100.0
"""Items a second."""
STOP = 2.0
"""Seconds for which it pushes on after SIGTERM."""
CLOSE = 20.0
TICK = 0.05


def main() -> None:
    """Push until SIGTERM."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    source = 1 + len(list(FOLDER.glob("pushed-*")))
    progress = FOLDER / f"pushed-{source}"
    endpoint = os.environ["SIDESTEP_ENDPOINT"]
    engine = Engine(
        Namespace(
            endpoint=endpoint, progress=progress, seed=source, source=source, rate=RATE, work=0.0, hold=True
        )
    )  # fmt: skip
    go, pause = FOLDER / f"go-{source}", FOLDER / f"pause-{source}"
    pushes = False
    while not ended.wait(TICK):
        if go.exists() and not pushes:
            pushes = True
            engine.go()
        if pause.exists():
            engine.pause()
    if pushes and not pause.exists():
        threading.Event().wait(STOP)
    engine.pause()
    engine.publisher.close(CLOSE)


if __name__ == "__main__":
    main()
