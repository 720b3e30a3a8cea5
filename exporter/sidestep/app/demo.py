"""The ``sidestep demo`` command: an exporter to which recorded runs of real engines are replayed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import shutil
import signal
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sidestep.app.exporter import Exporter
from sidestep.app.run import running
from sidestep.config.settings import Config
from sidestep.errors import SidestepError
from sidestep.metrics.computed_gauges import scalar
from sidestep.protocol.limits import escape
from sidestep.tracking.health.states import LEVELS, EngineState
from sidestep_adapters.recording.replay import Replay, ReplayedSteps

REFRESH = 0.5
COLUMNS = 80
ROUND = 90.0
"""Seconds after which the schedule of the runs begins again."""
LONGEST_PAUSE = 0.2
"""Seconds to which the recordings' pauses are shortened: engines that wait for a load show little."""
FAMILIES: Mapping[str, str] = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "prompt": "vllm:prompt_tokens_total",
    "generated": "vllm:generation_tokens_total",
}
"""Families that the status line sums."""


class Window(NamedTuple):
    """Seconds of a round, from its start."""

    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.start:.0f} s to {self.end:.0f} s"


class Run(NamedTuple):
    """A recorded run.

    Attributes:
        name: Prefix of its engines' identities; of vLLM also the label ``engine``.
        file: The recording, of the package's data.
        text: Description for people.
        window: When its replay may begin; None: at any time.
        pace: Multiple of the recorded speed.
        hang: When its replay pauses with unfinished requests, like an engine that hangs.
    """

    name: str
    file: str
    text: str
    window: Window | None = None
    pace: float = 1.0
    hang: Window | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Labels that distinguish the run's engines from other runs'."""
        return {"engine": self.name} if self.name.startswith("vllm") else {}


RUNS = (
    Run("vllm-hangs", "spec.rec.gz", "speculative decoding", hang=Window(15.0, 47.0)),
    Run(
        "vllm-full",
        "vllm-0.32.rec.gz",
        "KV cache full, requests wait and are preempted",
        window=Window(50.0, 75.0),
        pace=0.1,
    ),
    Run(
        "vllm-aborts",
        "core_aborts.rec.gz",
        "clients leave; every KV block is followed",
        window=Window(0.0, 5.0),
    ),
    Run("vllm-lora", "core_lora.rec.gz", "two LoRA adapters, room for one"),
    Run("sglang", "sglang.rec.gz", "retractions, aborts, a refused request"),
    Run("triton", "triton.rec.gz", "seven models of one server"),
)


def recording(name: str) -> Path:
    """Return the path of a recorded run that ships with the package."""
    return Path(str(importlib.resources.files("sidestep") / "data" / name))


async def run_demo(
    config: Config,
    *,
    once: bool,
    realtime: bool,
    browse: bool = False,
    runs: Sequence[Run] = RUNS,
    round_seconds: float = ROUND,
) -> None:
    """Serve and replay the runs until Ctrl-C, or once.

    Args:
        config: All settings of the exporter.
        once: Whether to replay each run once, and end.
        realtime: Whether to keep the recorded times; otherwise nothing hangs.
        browse: Whether to open the exporter's page in a browser.
        runs: The runs, with what is staged.
        round_seconds: Seconds after which their schedule begins again.

    Raises:
        SidestepError: An address is in use, or a recording cannot be played.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(Exporter(config)) as exporter:
        staged = realtime and not once
        clock = Clock(round_seconds)
        players = [
            Player(run, exporter.endpoints[0], clock if staged else None, realtime=realtime)
            for run in runs
        ]
        _introduce(exporter, runs if staged else (), clock)
        if browse and exporter.addresses:
            await asyncio.to_thread(webbrowser.open, _root(exporter))
        show = partial(_show_status, exporter, clock)
        try:
            await _play(players, stop, show, once=once)
        finally:
            _show_totals(exporter, players)


async def _play(
    players: Sequence[Player], stop: asyncio.Event, show: Callable[[], None], *, once: bool
) -> None:
    """Replay in threads until ``stop`` is set, or all have ended, and call ``show`` meanwhile.

    Raises:
        SidestepError: A recording cannot be played.
    """
    loop = asyncio.get_running_loop()
    failed: list[SidestepError] = []
    halted = threading.Event()
    playing = set(players)

    def ended(player: Player) -> None:
        playing.discard(player)
        if failed or not playing:
            stop.set()

    def play(player: Player) -> None:
        try:
            player.run(once=once, stop=halted)
        except SidestepError as error:
            failed.append(error)
        finally:
            loop.call_soon_threadsafe(ended, player)

    threads = [
        threading.Thread(target=play, args=(player,), name=f"sidestep-demo-{player.name}")
        for player in players
    ]
    for thread in threads:
        thread.start()
    while not stop.is_set():
        show()
        with contextlib.suppress(asyncio.TimeoutError):  # not yet the builtin in 3.10
            await asyncio.wait_for(stop.wait(), REFRESH)
    halted.set()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    if failed:
        raise failed[0]


class Clock:
    """The time of the rounds."""

    def __init__(self, seconds: float) -> None:
        self.length = seconds
        self._began = time.monotonic()

    def read(self) -> tuple[int, float]:
        """Return the number of the round, from 0 on, and its seconds so far."""
        number, seconds = divmod(time.monotonic() - self._began, self.length)
        return int(number), seconds


class Player(Replay):
    """A replay of one run, by the schedule of the rounds unless ``clock`` is None."""

    def __init__(self, run: Run, endpoint: str, clock: Clock | None, *, realtime: bool) -> None:
        steps = ReplayedSteps()
        super().__init__(
            recording(run.file),
            endpoint,
            realtime=realtime,
            namespace=run.name,
            labels=run.labels,
            pace=1.0 if clock is None else run.pace,
            longest_pause=LONGEST_PAUSE,
            steps=steps,
        )
        self.name = run.name
        self._run = run
        self._clock = clock
        self._steps_played = steps
        self._hung_in = -1

    def wait_for_round(self) -> None:
        """Wait for the run's window."""
        if self._clock is None or self._run.window is None:
            return
        start, end = self._run.window
        while not start <= self._clock.read()[1] < end:
            if self._stop.wait(0.1):
                return

    def wait_for_record(self) -> float:
        """Hang if it is time for it and requests are open."""
        if self._clock is None or self._run.hang is None or not self._steps_played.unfinished:
            return 0.0
        number, seconds = self._clock.read()
        start, end = self._run.hang
        if number == self._hung_in or not start <= seconds < end:
            return 0.0
        self._hung_in = number
        return self._staged_hang(end - seconds)

    def _staged_hang(self, seconds: float) -> float:
        """Wait, as an engine whose step does not end; this is the stack that the exporter shows."""
        self._steps_played.begin_hang()
        self._stop.wait(seconds)
        self._steps_played.end_hang()
        return seconds


def _root(exporter: Exporter) -> str:
    """Return the address of the exporter's page for people."""
    return exporter.url.removesuffix(exporter.config.web_telemetry_path)


def _introduce(exporter: Exporter, runs: Sequence[Run], clock: Clock) -> None:
    """Print where to look, and what the runs will do."""
    print(f"sidestep demo: metrics on {exporter.url}  (Ctrl-C ends)", flush=True)  # noqa: T201
    if not runs:
        return
    lines = []
    if exporter.addresses:
        root = _root(exporter)
        lines += [
            f"  page for people   {root}/",
            f"  at the terminal   sidestep top {root}",
            f"  states            {root}/-/engines",
        ]
    lines += [
        "Recorded runs of real vLLM, SGLang and Triton servers, replayed over and over;",
        f"the times below are of each round of {clock.length:.0f} s, and staged:",
    ]
    for run in runs:
        lines.append(f"  {run.name:<12} {run.text}".rstrip())
        if run.hang is not None:
            lines.append(f"{'':15}hangs from {run.hang}: its replay pauses, with its own stack")
        if run.window is not None:
            pace = "" if run.pace == 1 else f", at {run.pace:g} of the recorded speed"
            lines.append(f"{'':15}once a round, from {run.window.start:.0f} s on{pace}")
    print("\n".join(lines), flush=True)  # noqa: T201


def _sum(exporter: Exporter, what: str) -> int:
    """Return the sum of a family over vLLM's engines."""
    engines = exporter.registry.engines.values()
    found = [engine for engine in engines if engine.layout.dialect == "vllm"]
    return int(sum(scalar(engine, FAMILIES[what]) for engine in found))


def status_line(exporter: Exporter, number: int, seconds: float) -> str:
    """Return the state of all engines in at most ``COLUMNS`` characters."""
    ill = [
        f"{engine.labels.get('engine', engine.id)} {health.state.value}"
        for engine, health in exporter.intake.health
        if LEVELS[health.state] != "ok" and health.state is not EngineState.STARTING
    ]
    line = (
        f"round {number + 1}, {seconds:.0f} s  {', '.join(ill) or 'all well'}"
        f"  vLLM: running {_sum(exporter, 'running')}"
        f"  waiting {_sum(exporter, 'waiting')}"
        f"  generated tokens {_sum(exporter, 'generated')}"
    )
    return line[:COLUMNS]


def _show_status(exporter: Exporter, clock: Clock) -> None:
    """Update the status line, on a terminal."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        # A line of the log overwrites the status, from its first column on.
        sys.stdout.write(f"\x1b[K{escape(status_line(exporter, *clock.read()))[:width]}\r")
        sys.stdout.flush()


def _show_totals(exporter: Exporter, players: Sequence[Player]) -> None:
    """Print what was replayed, as the last line."""
    line = (
        f"records {sum(player.progress.records for player in players)}"
        f"  vLLM: prompt tokens {_sum(exporter, 'prompt')}"
        f"  generated tokens {_sum(exporter, 'generated')}"
    )
    clear = "\x1b[K" if sys.stdout.isatty() else ""
    sys.stdout.write(f"{clear}{line}\n")
    sys.stdout.flush()
