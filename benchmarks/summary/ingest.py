"""Throughput of the exporter: values per second of one core.

The peer is the same exporter, with the same socket, decoding and session, whose items update
prometheus_client's children; if statsd_exporter is installed, it is a second peer. Each
engine has a sender with the plugin's own session code: handshake, 64 KiB batches, window,
acknowledgements, heartbeats. An item is one engine step. The measurement fails unless every
value that was sent is on the page.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, final

import zmq

from benchmarks.client import ClientMetrics
from benchmarks.process import SERVE, ExporterProcess, observations
from benchmarks.scraper import scraping
from benchmarks.steps import Steps, engine_info
from benchmarks.summary import statsd
from benchmarks.summary.rows import Figure, Row, Topic
from sidestep.app.exporter import Exporter
from sidestep.app.run import running
from sidestep.catalog.layout_builder import compile_layout
from sidestep.config.settings import Config, read
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import VllmStep, run_of
from sidestep.exposition.pages import CACHE_SECONDS
from sidestep.metrics.engine import Engine
from sidestep.metrics.registry import Registry
from sidestep.protocol.sender import Sender, State
from sidestep_adapters.publisher.translate import to_wire

CLIENT = ("-m", "benchmarks.summary.ingest")
PEERS = {"client inside": CLIENT, "sidestep": SERVE}
PAUSE = 0.005
"""Seconds between two sends at a fixed rate; a plugin sends every 50 to 250 ms."""
WARM_UP = 0.5
DRAIN = 300.0
POOL = 64
AHEAD = 6 << 20
"""Bytes that all senders together keep ready at full load."""
CLIENT_AHEAD = 256 << 10
"""The same for prometheus_client: with more, its acknowledgements come so late that senders repeat items."""
ENGINES = 16
VALUES = 256
INSIDE = "prometheus_client in the exporter"
SPREADS = {
    "recorded": "latencies as recorded",
    "alike": "one latency in ten unlike",
    "mixed": "all latencies unlike",
}
TARGETS = {"recorded": 14, "mixed": 5}
STATSD = f"{ENGINES} engines, latencies as recorded, against {statsd.NAME}"


def rows() -> Iterator[Row]:
    """Yield a row for each kind of step, and one against statsd_exporter."""
    for spread in SPREADS:
        yield Row(named(spread), "M values/s", INSIDE, TARGETS.get(spread), more=True)
    yield Row(STATSD, "M values/s", statsd.NAME, 20, more=True)


def named(spread: str) -> str:
    """Return the name of a row."""
    return f"{ENGINES} engines, {VALUES} values a step, {SPREADS[spread]}"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return million values per second of the exporter's CPU time, medians of the rounds."""
    found: dict[str, Figure] = {}
    for spread in SPREADS:
        feed = Feed(VALUES, 1, spread)
        per_core: dict[str, list[float]] = {peer: [] for peer in PEERS}
        for _ in range(1 if quick else 3):
            for peer, command in PEERS.items():
                run = feed.run(command, ENGINES, 0.0, 1.0 if quick else 3.0, 0.0)
                per_core[peer].append(run.per_core / 1e6)
        theirs, ours = (statistics.median(per_core[peer]) for peer in PEERS)
        found[named(spread)] = Figure(ours, theirs)
    recorded = found[named("recorded")].ours
    binary = statsd.binary()
    found[STATSD] = (
        Figure(recorded, why=statsd.ABSENT)
        if binary is None
        else Figure(recorded, statsd.per_core(binary, 200_000 if quick else 1_000_000) / 1e6)
    )
    return found


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of one exporter."""

    cpu: float
    steps: int
    observed: int
    dropped: int
    scrapes: list[float]

    @property
    def per_core(self) -> float:
        """Observations per second of CPU time."""
        return self.observed / self.cpu


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
        """Start an exporter, feed it, and check what has arrived."""
        with ExporterProcess(command) as exporter, Senders(exporter.endpoint, engines) as senders:
            ahead = CLIENT_AHEAD if command == CLIENT else AHEAD
            self._feed(senders, rate, WARM_UP, ahead)
            before = observations(exporter.totals)
            known, dropped = sum(senders.added), senders.dropped
            cpu = exporter.cpu_seconds
            with scraping(f"{exporter.url}/metrics", scrape) as scrapes:
                self._feed(senders, rate, seconds, ahead)
            cpu = exporter.cpu_seconds - cpu
            expected = sum(
                count * self.observed[index % POOL]
                for added in senders.added
                for index, count in _spread(added)
            )
            lost = senders.dropped
            observed = observations(exporter.totals)
            # The page may be a cached one.
            until = time.monotonic() + CACHE_SECONDS
            while observed != expected and time.monotonic() < until:
                time.sleep(0.1)
                observed = observations(exporter.totals)
            if not lost and observed != expected:
                raise SystemExit(f"{expected} observations were sent, {observed} are on the page")
        steps = sum(senders.added) - known - (lost - dropped)
        return Run(cpu, steps, observed - before, lost, list(scrapes))

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
    """Yield how often a sender that sent ``added`` items sent each item of the pool."""
    for index in range(POOL):
        yield index, added // POOL + (index < added % POOL)


def _observations(step: VllmStep) -> int:
    """Return the number of values of ``step`` that a histogram observes."""
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
    """One stream per engine, each with a socket of its own.

    Attributes:
        added: Steps passed to each sender so far.
    """

    def __init__(self, endpoint: str, count: int) -> None:
        self.all = [
            Sender(
                f"bench/{number}", number + 1, [engine_info(number)], Random(number), ItemFolder()
            )
            for number in range(count)
        ]
        self.added = [0] * count
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def __enter__(self) -> Senders:
        self._sockets = [self._connect() for _ in self.all]
        while any(sender.state is not State.STREAMING for sender in self.all):
            self.pump()
            time.sleep(0.01)
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
        """Steps dropped because a ring was full."""
        return sum(sender.dropped for sender in self.all)

    def pump(self) -> bool:
        """Send and receive what is possible; return whether anything was sent."""
        moved = False
        for number, sender in enumerate(self.all):
            now = time.monotonic()
            if sender.reopen:
                self._sockets[number].close(linger=0)
                self._sockets[number] = self._connect()
                sender.reopened()
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


def main() -> None:
    """Run the peer: an exporter whose items update prometheus_client's metrics."""
    words = iter(sys.argv[1:])
    flags = {flag.removeprefix("--"): value for flag, value in zip(words, words, strict=True)}
    given = {
        "ingest_endpoint": (flags["ingest.endpoint"],),
        "web_listen_address": (flags["web.listen-address"],),
        "log_stats_interval": "0",
    }
    asyncio.run(_serve_client(read(given, {})))


class ClientApplier(Applier):
    """An applier that updates prometheus_client's metrics, one item at a time."""

    def __init__(self, registry: Registry, metrics: ClientMetrics) -> None:
        super().__init__(registry)
        self.metrics = metrics

    def apply(self, engine: Engine, item: Any) -> None:
        """Add ``item`` to the metrics of ``engine``."""
        self.metrics.apply(engine, item)


async def _serve_client(config: Config) -> None:
    layouts = {"vllm": compile_layout(DIALECTS["vllm"])}
    metrics = ClientMetrics(layouts["vllm"])
    exporter = Exporter(config, [metrics.registry])
    exporter.intake.applier = ClientApplier(exporter.registry, metrics)
    # The page has the client's series in place of those of the registry.
    exporter.registry = Registry(layouts)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with running(exporter):
        await stop.wait()


INGEST = Topic("The exporter: values a second of one core", tuple(rows()), measure)

if __name__ == "__main__":
    main()
