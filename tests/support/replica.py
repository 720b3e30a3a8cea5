"""A server of two processes as a program: each number that it reads is of steps that each process pushes.

It answers with the number once the exporter has saved them.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

from peers import count as step
from sidestep.protocol.messages import CORE, FRONT_END, EngineInfo
from sidestep_adapters.publisher.environment import identity, namespace
from sidestep_adapters.publisher.publisher import Publisher

ROLES = {"core": CORE, "api0": FRONT_END}


def publish(name: str, endpoint: str, pipe: Connection) -> None:
    """Push steps as one of the server's processes, until the pipe ends."""
    labels = {"engine": "0", "model_name": "m"}
    engine = EngineInfo(identity(namespace(), "m", "0"), "vllm", labels, role=ROLES[name])
    publisher = Publisher(endpoint, identity(namespace(), "m", f"engine0/{name}"), [engine])
    while (count := pipe.recv()) >= 0:
        for _ in range(count):
            publisher.push(step())
        while not publisher.drained:
            time.sleep(0.02)
        pipe.send(count)
    publisher.close()


def main() -> None:
    """Run the server; its arguments are the endpoint and what a server's command line has."""
    context = multiprocessing.get_context("fork")
    pipes = []
    for name in ROLES:
        ours, theirs = context.Pipe()
        context.Process(target=publish, args=(name, sys.argv[1], theirs), daemon=True).start()
        pipes.append(ours)
    for line in sys.stdin:
        for pipe in pipes:
            pipe.send(int(line))
        sys.stdout.write(f"{sum(pipe.recv() for pipe in pipes)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
