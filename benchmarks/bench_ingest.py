"""What one core of the exporter takes in: observations applied per second of its CPU time.

"sidestep" is a `sidestep serve` process. "client inside" is the same exporter,
same socket, decoding and session, whose items update prometheus_client's
Counter, Gauge and Histogram children instead. Both are fed over ipc by as many
senders as there are engines, with the plugin's own session code: handshake,
64 KiB batches, window, acknowledgements, heartbeats. An item is one engine step.

"saturating" rows send as fast as the exporter takes it, with latencies of a step
that are equal as recorded, alike, or mixed (see ``benchmarks.steps``); "fixed rate" rows send
so many steps a second over all engines while another process scrapes the page: sidestep alone,
as prometheus_client takes two seconds for what comes in one. Every observation sent must
be on the page, or the benchmark ends with an error. An exporter that cannot keep a fixed rate
falls behind: its "steps/s" are then less.

statsd_exporter is not among the peers: neither Debian nor PyPI has its binary.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import signal
import statistics
import time
from collections.abc import Iterator
from random import Random
from typing import Any, cast, final

import zmq

from benchmarks.client import ClientMetrics
from benchmarks.process import SERVE, ExporterProcess, observations
from benchmarks.scraper import scraping
from benchmarks.steps import Steps, engine_info
from benchmarks.table import percentile, show
from sidestep.app import Exporter
from sidestep.catalog.layout_builder import compile_layout
from sidestep.config.settings import Config, read
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import VllmStep, encode_item
from sidestep.engines.vllm.wire import run_of
from sidestep.metrics.registry import Registry
from sidestep.protocol.sender import Sender, State
from sidestep_adapters.publisher.translate import to_wire

CLIENT = ("-m", "benchmarks.bench_ingest", "--client")
PEERS = {"client inside": CLIENT, "sidestep": SERVE}
PAUSE = 0.005
"""Seconds between two sends at a fixed rate: plugins send every 50 ms, each at its own time."""
WARM_UP = 0.5
DRAIN = 60.0
POOL = 64
AHEAD = 6 << 20
"""Bytes that saturating senders keep ready, all together."""
CLIENT_AHEAD = 256 << 10
"""Likewise, for prometheus_client: it took a minute for the full rings of 16, and its
acknowledgements came so late that they sent all again."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One feeding of one exporter."""

    cpu: float
    seconds: float
    steps: int
    observed: int
    dropped: int
    reconnects: int
    scrapes: list[float]

    @property
    def per_core(self) -> float:
        """Observations per second of CPU time."""
        return self.observed / self.cpu


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latencies", type=int, default=256, help="a step")
    parser.add_argument("--finished", type=int, default=1, help="requests a step")
    parser.add_argument("--seconds", type=float, default=4.0, help="per row and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--fixed-engines", type=int, default=256)
    parser.add_argument("--fixed-latencies", type=int, default=1024, help="a step, fixed rate")
    parser.add_argument("--rate", type=float, default=2000.0, help="steps a second, fixed rate")
    parser.add_argument("--scrape-interval", type=float, default=1.0)
    for flag in (
        "client",
        "ingest.endpoint",
        "web.listen-address",
        "log.stats-interval",
        "log.level",
    ):
        nothing = "store_true" if flag == "client" else "store"
        parser.add_argument(f"--{flag}", action=nothing, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        flags = vars(args)
        serve_client(flags["ingest.endpoint"], flags["web.listen_address"])
        return
    rows: list[list[str]] = []
    for spread, (rate, latencies, engines) in itertools.product(
        ("recorded", "alike", "mixed"),
        (
            (0.0, args.latencies, args.engines),
            (args.rate, args.fixed_latencies, args.fixed_engines),
        ),
    ):
        feed = Feed(latencies, args.finished, spread)
        peers = {"sidestep": SERVE} if rate else PEERS
        runs: dict[str, list[Run]] = {peer: [] for peer in peers}
        for _ in range(args.rounds):
            for peer, command in peers.items():
                interval = args.scrape_interval if rate else 0.0
                run = feed.run(command, engines, rate, args.seconds, interval)
                if peer == "sidestep" and run.dropped:
                    raise SystemExit(f"{run.dropped} steps were dropped")
                runs[peer].append(run)
        what = f"{'fixed rate' if rate else 'saturating'} {spread}"
        rows += [row(what, peer, engines, latencies, runs) for peer in peers]
    show(
        f"Exporter's CPU; {args.finished} finished a step",
        (
            *("feed, exporter", "engines", "values", "steps/s", "CPU us/step", "CPU share"),
            *("dropped", "reconnects", "scrape ms", "p99", "Mobs/s a core", "ratio", "target"),
        ),
        rows,
    )
    print("\nEvery observation that was sent to sidestep is on its page.")


def row(
    what: str, peer: str, engines: int, latencies: int, runs: dict[str, list[Run]]
) -> list[str]:
    """Medians of the rounds."""
    own = runs[peer]
    per_core = {name: statistics.median(run.per_core for run in runs[name]) for name in runs}
    scrapes = [value for run in own for value in run.scrapes]
    compared = peer == "sidestep" and len(runs) > 1
    return [
        f"{what}, {peer}",
        str(engines),
        str(latencies),
        f"{statistics.median(run.steps / run.seconds for run in own):.0f}",
        f"{statistics.median(run.cpu / run.steps for run in own) * 1e6:.1f}",
        f"{statistics.median(run.cpu / run.seconds for run in own):.0%}",
        str(sum(run.dropped for run in own)),
        str(sum(run.reconnects for run in own)),
        *(f"{percentile(scrapes, at) * 1e3:.0f}" if scrapes else "" for at in (0.5, 0.99)),
        f"{per_core[peer] / 1e6:.2f}",
        f"{per_core[peer] / per_core['client inside']:.1f}x" if compared else "",
        "14x" if compared and what == "saturating recorded" else "",
    ]


class Feed:
    """Encoded steps, and the senders that feed them to an exporter."""

    def __init__(self, latencies: int, finished: int, spread: str) -> None:
        steps = Steps(spread=spread)
        schedulers = steps.schedulers[20 : 20 + POOL]
        sources = [_Source(each, steps.iteration(latencies, finished)) for each in schedulers]
        translated = [to_wire(source, VllmStep)[0] for source in sources]
        for step in translated:
            iteration = step.iteration
            run = run_of(iteration.inter_token_latencies_iter) if iteration is not None else None
            if iteration is not None and run is not None:
                iteration.inter_token_latencies_iter_runs = [run]
                iteration.inter_token_latencies_iter = []
        self.items = [encode_item(step) for step in translated]
        self.observed = [_observations(step) for step in translated]

    def run(
        self, command: tuple[str, ...], engines: int, rate: float, seconds: float, scrape: float
    ) -> Run:
        """Start an exporter, feed it, and see what has arrived."""
        with ExporterProcess(command) as exporter, Senders(exporter.endpoint, engines) as senders:
            ahead = CLIENT_AHEAD if command == CLIENT else AHEAD
            self._feed(senders, rate, WARM_UP, ahead)
            before = observations(exporter.totals)
            known, dropped = sum(senders.added), senders.dropped
            cpu, started = exporter.cpu_seconds, time.monotonic()
            with scraping(f"{exporter.url}/metrics", scrape) as scrapes:
                self._feed(senders, rate, seconds, ahead)
            cpu = exporter.cpu_seconds - cpu
            took = time.monotonic() - started
            expected = sum(
                count * self.observed[index % POOL]
                for added in senders.added
                for index, count in _spread(added)
            )
            lost = senders.dropped
            observed = observations(exporter.totals)
            if not lost and observed != expected:
                raise SystemExit(f"{expected} observations were sent, {observed} are on the page")
        steps = sum(senders.added) - known - (lost - dropped)
        return Run(cpu, took, steps, observed - before, lost, senders.reconnects, list(scrapes))

    def _feed(self, senders: Senders, rate: float, seconds: float, ahead: int) -> None:
        """Feed for ``seconds``, then wait until all of it is applied."""
        started = time.monotonic()
        done = 0
        while (now := time.monotonic()) < started + seconds:
            if rate:
                due = int((now - started) * rate)
                for number in range(done, due):
                    self._add(senders, number % len(senders.all), 1)
                done = due
                senders.pump()
                time.sleep(PAUSE)
            else:
                for number, sender in enumerate(senders.all):
                    while sender.held_bytes < ahead // len(senders.all):
                        self._add(senders, number, 32)
                if not senders.pump():
                    time.sleep(0.002)
        senders.drain()

    def _add(self, senders: Senders, number: int, count: int) -> None:
        start = senders.added[number]
        items = [self.items[index % POOL] for index in range(start, start + count)]
        senders.all[number].add(items)
        senders.added[number] = start + count


def _spread(added: int) -> Iterator[tuple[int, int]]:
    """How often each item of the pool was sent by a sender that sent ``added``."""
    for index in range(POOL):
        yield index, added // POOL + (index < added % POOL)


def _observations(step: VllmStep) -> int:
    """Values of ``step`` that some histogram counts."""
    iteration, scheduler = step.iteration, step.scheduler
    if iteration is None or scheduler is None:
        raise ValueError("a step of the feed has both")
    lists: tuple[list[Any], ...] = (
        iteration.inter_token_latencies_iter,
        iteration.time_to_first_tokens_iter,
        iteration.max_num_generation_tokens_iter,
        iteration.n_params_iter,
    )
    return (
        sum(map(len, lists))
        + sum(run.count for run in iteration.inter_token_latencies_iter_runs)
        + 1  # iteration_tokens_total
        + sum(10 + bool(each.max_tokens_limit) for each in iteration.finished_requests)
        + sum(2 + len(each.reuse_gaps_seconds) for each in scheduler.kv_cache_eviction_events)
        + 5 * (scheduler.iteration_details is not None)
    )


class _Source:
    """A record under the step's field names."""

    engine, stamp, wall, mm_cache = 0, 1.0, 1.0, None

    def __init__(self, scheduler: Any, iteration: Any) -> None:
        self.scheduler, self.iteration = scheduler, iteration


@final
class Senders:
    """As many streams as engines, each with a socket of its own.

    Attributes:
        added: Steps given to each sender so far.
        reconnects: Times that an acknowledgement did not come in time.
    """

    def __init__(self, endpoint: str, count: int) -> None:
        self.all = [
            Sender(
                f"bench/{number}", number + 1, [engine_info(number)], Random(number), ItemFolder()
            )
            for number in range(count)
        ]
        self.added = [0] * count
        self.reconnects = 0
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def __enter__(self) -> Senders:
        self._sockets = [self._connect() for _ in self.all]
        while any(sender.state is not State.STREAMING for sender in self.all):
            self.pump()
            time.sleep(0.01)
        self.reconnects = 0
        return self

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, 64)
        socket.connect(self._endpoint)
        return socket

    def __exit__(self, *_: object) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    @property
    def dropped(self) -> int:
        """Steps that a full ring has cost."""
        return sum(sender.dropped for sender in self.all)

    def pump(self) -> bool:
        """Send and receive what can be; whether anything was sent."""
        moved = False
        for number, sender in enumerate(self.all):
            now = time.monotonic()
            if sender.reopen:
                self._sockets[number].close(linger=0)
                self._sockets[number] = self._connect()
                sender.reopened()
                self.reconnects += 1
            socket = self._sockets[number]
            while answer := _receive(socket):
                sender.receive(answer, now)
            while (frame := sender.next_frame(now)) is not None:
                try:
                    socket.send(frame, zmq.NOBLOCK)
                except zmq.Again:
                    break
                sender.sent(now)
                moved = True
        return moved

    def drain(self) -> None:
        """Wait until all is applied."""
        deadline = time.monotonic() + DRAIN
        while not all(sender.drained for sender in self.all):
            if time.monotonic() > deadline:
                raise SystemExit(f"not all is applied; {self.all[0].complaint or 'no answer'}")
            if not self.pump():
                time.sleep(0.005)


def _receive(socket: zmq.Socket[bytes]) -> bytes | None:
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


def serve_client(endpoint: str, address: str) -> None:
    """An exporter whose items update prometheus_client's metrics."""
    flags = {
        "ingest_endpoint": (endpoint,),
        "web_listen_address": (address,),
        "log_stats_interval": "0",
    }
    asyncio.run(_serve_client(read(flags, {})))


async def _serve_client(config: Config) -> None:
    layouts = {"vllm": compile_layout(DIALECTS["vllm"])}
    metrics = ClientMetrics(layouts["vllm"])
    exporter = Exporter(config, [metrics.registry])
    exporter.ingest.intake.applier = cast("Applier", metrics)
    # The engines that ingest registers stay out of the page: the client has their series.
    exporter.registry = Registry(layouts, {})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with exporter.running():
        await stop.wait()


if __name__ == "__main__":
    main()
