"""The ``sidestep demo`` command: an exporter to which recorded runs of real engines are replayed."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import shutil
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

from sidestep.app.demo_schedule import ROUND, RUNS, Clock, Run, acts, minutes
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
LONGEST_PAUSE = 2.0
"""Seconds to which pauses are shortened: one of a second, slowed down, would look like a stall."""
CONNECT_TIMEOUT = 60.0
"""Seconds to wait for the exporter, whose process also replays: a busy machine is slow."""


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

    With ``realtime``, recorded times are kept, and what is staged happens in each round.

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
        story = Story(exporter, acts(runs) if staged else [], clock)
        _introduce(exporter, runs if staged else (), clock)
        if browse and exporter.addresses:
            await asyncio.to_thread(webbrowser.open, _root(exporter))
        try:
            await _play(players, stop, story.show, once=once)
        finally:
            _show_totals(exporter, players)


async def _play(
    players: Sequence[Player], stop: asyncio.Event, show: Callable[[], None], *, once: bool
) -> None:
    """Replay in threads until ``stop`` is set, or all have ended, and call ``show`` meanwhile."""
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


class Player(Replay):
    """A replay of one run, by the schedule of the rounds unless ``clock`` is None."""

    def __init__(self, run: Run, endpoint: str, clock: Clock | None, *, realtime: bool) -> None:
        steps = ReplayedSteps()
        super().__init__(
            recording(f"{run.name}.rec.gz"),
            endpoint,
            realtime=realtime,
            namespace=run.name,
            connect_timeout=CONNECT_TIMEOUT,
            labels=run.labels,
            longest_pause=LONGEST_PAUSE,
            steps=steps,
        )
        if clock is not None and run.window is not None and run.fills:
            self.fill(run.window.end - run.window.start)
        self.name = run.name
        self._run = run
        self._clock = clock
        self._steps_played = steps
        self._hung_in = self._filled = -1
        """Rounds in which it has hung, and has filled its window."""

    def wait_for_round(self) -> None:
        """Wait for the run's window."""
        if self._clock is None or self._run.window is None:
            return
        start, end = self._run.window
        while not self._stop.wait(0.1):
            number, seconds = self._clock.read()
            if start <= seconds < end and not (self._run.fills and number == self._filled):
                self._filled = number
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
            f"  what is slow      sidestep why {root}",
            f"  states            {root}/-/engines",
        ]
    lines += [
        "Recorded runs of real vLLM, SGLang and Triton servers, replayed over and over;",
        f"the times below are of each round of {minutes(clock.length)}, and staged:",
    ]
    for run in runs:
        lines.append(f"  {run.name:<12} {run.text}".rstrip())
        if run.hang is not None:
            lines.append(f"{'':15}hangs from {run.hang}: its replay pauses, with its own stack")
        if run.window is not None:
            speed = ", slowed down" if run.fills else ""
            lines.append(f"{'':15}from {run.window}{speed}")
    print("\n".join(lines), flush=True)  # noqa: T201


def _sum(exporter: Exporter, family: str) -> int:
    """Return the sum of a family over vLLM's engines."""
    engines = exporter.registry.engines.values()
    found = [engine for engine in engines if engine.layout.dialect == "vllm"]
    return int(sum(scalar(engine, family) for engine in found))


def status_line(exporter: Exporter, number: int, seconds: float, act: str) -> str:
    """Return what happens, and the state of all engines, in at most ``COLUMNS`` characters."""
    ill = [
        f"{engine.labels.get('engine', engine.id)} {health.state.value}"
        for engine, health in exporter.intake.health
        if LEVELS[health.state] != "ok" and health.state is not EngineState.STARTING
    ]
    line = f"round {number + 1}, {minutes(seconds)}  {'  '.join([act, *ill])}"
    return line[:COLUMNS]


class Story:
    """Shows what happens in a round, and where to look."""

    def __init__(self, exporter: Exporter, acts: Sequence[tuple[float, str]], clock: Clock) -> None:
        self._exporter = exporter
        self._acts = acts
        self._clock = clock
        self._shown: tuple[int, str] | None = None

    def show(self) -> None:
        """Print what has just begun as a line of its own, and update the status line of a terminal."""
        number, seconds = self._clock.read()
        begun = (each for each in reversed(self._acts) if each[0] <= seconds)
        start, act = next(begun, (0.0, ""))
        clear = "\x1b[K" if sys.stdout.isatty() else ""
        if self._acts and self._shown != (number, act):
            self._shown = number, act
            sys.stdout.write(f"{clear}{minutes(start):>7}  {act}\n")
        if clear:
            width = shutil.get_terminal_size().columns - 1
            # A line of the log overwrites the status, from its first column on.
            line = status_line(self._exporter, number, seconds, act)
            sys.stdout.write(f"{clear}{escape(line)[:width]}\r")
        sys.stdout.flush()


def _show_totals(exporter: Exporter, players: Sequence[Player]) -> None:
    """Print what was replayed, as the last line."""
    line = (
        f"records {sum(player.progress.records for player in players)}"
        f"  vLLM: prompt tokens {_sum(exporter, 'vllm:prompt_tokens_total')}"
        f"  generated tokens {_sum(exporter, 'vllm:generation_tokens_total')}"
    )
    clear = "\x1b[K" if sys.stdout.isatty() else ""
    sys.stdout.write(f"{clear}{line}\n")
    sys.stdout.flush()
