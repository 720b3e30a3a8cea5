"""The ``sidestep demo`` command: an exporter that a recorded engine feeds."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from pathlib import Path

from sidestep.app import Exporter
from sidestep.config.settings import Config
from sidestep.errors import SidestepError
from sidestep.metrics.computed_gauges import scalar
from sidestep_adapters.recording.replay import Replay

REFRESH = 0.5


async def run_demo(config: Config, path: Path, *, once: bool, realtime: bool) -> None:
    """Serve and replay the recording until Ctrl-C, or once.

    Raises:
        SidestepError: An address is in use, or the recording cannot be played.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Exporter(config).running() as exporter:
        player = Replay(path, exporter.endpoints[0], realtime=realtime, namespace="demo")
        page = exporter.url.removesuffix(config.web_telemetry_path)
        print(f"sidestep demo: {page}/  (metrics: {exporter.url}; Ctrl-C ends)", flush=True)  # noqa: T201
        failed: list[SidestepError] = []
        halted = threading.Event()

        def play() -> None:
            try:
                player.run(once=once, stop=halted)
            except SidestepError as error:
                failed.append(error)
            finally:
                loop.call_soon_threadsafe(stop.set)

        thread = threading.Thread(target=play, name="sidestep-demo")
        thread.start()
        while not stop.is_set():
            _status(exporter, player)
            with contextlib.suppress(asyncio.TimeoutError):  # not yet the builtin in 3.10
                await asyncio.wait_for(stop.wait(), REFRESH)
        halted.set()
        await asyncio.to_thread(thread.join)
        _status(exporter, player, last=True)
        if failed:
            raise failed[0]


def _status(exporter: Exporter, player: Replay, *, last: bool = False) -> None:
    """Write a status line; on a terminal it is updated in place, elsewhere only the last is printed."""
    moves = sys.stdout.isatty()
    if not moves and not last:
        return
    engines = list(exporter.registry.engines.values())

    def total(name: str) -> int:
        return int(sum(scalar(engine, name) for engine in engines))

    progress = player.progress
    line = (
        f"round {progress.rounds + (not last)}  records {progress.records}"
        f"  running {total('vllm:num_requests_running')}"
        f"  waiting {total('vllm:num_requests_waiting')}"
        f"  prompt tokens {total('vllm:prompt_tokens_total')}"
        f"  generated tokens {total('vllm:generation_tokens_total')}"
    )
    end = "\n" if last else ""
    sys.stdout.write(f"\r\x1b[K{line}{end}" if moves else f"{line}\n")
    sys.stdout.flush()
