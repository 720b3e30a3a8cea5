"""An intake without sockets, and recorded runs to feed it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from exporters import recorded_run
from rendered import render
from sidestep.catalog.slo import Objective, Objectives
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.folding import ItemFolder
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import Engine
from sidestep.metrics.engine_state import SeriesSettings
from sidestep.metrics.exposed_engines import TOTALS_EXPIRE_SECONDS
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import Registry, Tracking
from sidestep.protocol.claims import SILENT_AFTER
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import (
    Aggregate,
    Batch,
    EngineInfo,
    FromSender,
    Heartbeat,
    Hello,
    Settings,
    encode,
)
from sidestep.protocol.receiver import Receiver
from sidestep.snapshot.capture import Capture, restore
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.kv_blocks.tracker import Sampling
from sidestep_adapters.recording.format import Items, StreamStart, read

CORE_RUNS = ("core", "core_aborts", "core_lora", "core_dp")
Step = tuple[str, list[EngineInfo], bytes | None]
"""Stream, its engines, and an item, or None for a hello."""


def steps(run: str) -> Iterator[Step]:
    """Yield the steps of a recording made through the tap."""
    engines: dict[str, list[EngineInfo]] = {}
    for record in read(recorded_run(run)):
        if isinstance(record, StreamStart):
            engines[record.stream] = record.engines
            yield record.stream, record.engines, None
        elif isinstance(record, Items):
            for raw in record.items:
                yield record.stream, engines[record.stream], bytes(raw)


class Fed:
    """An intake and the streams that feed it."""

    def __init__(
        self,
        *,
        rate: float = 0.0,
        boot: int = 1,
        native: NativeSettings | None = None,
        legacy: bool = False,
        common: bool = False,
        wall: float = 1.0,
        now: float = 0.0,
        slo: Iterable[Objective] = (),
    ) -> None:
        self.now = now
        layouts = DIALECTS.layouts(legacy=legacy, common=common)
        series = SeriesSettings(native=native, objectives=Objectives(slo))
        registry = Registry(layouts, series, Tracking(sampling=Sampling(rate)))
        self.intake = Intake(
            Applier(registry),
            Receiver(boot),
            SelfMetrics(),
            clock=lambda: self.now,
            wall=lambda: wall + self.now - now,
        )
        self.processes: dict[str, int] = {}
        self.seqs: dict[str, int] = {}
        self.engines: dict[str, list[EngineInfo]] = {}
        self.replaced: set[str] = set()
        """Streams whose new process has not sent a hello yet."""

    def incarnation(self, stream: str) -> int:
        """Return the incarnation of a stream's process."""
        return self.processes.setdefault(stream, 1 + len(self.processes))

    def restart(self, stream: str) -> None:
        """Replace the process of a stream by one that has not sent a hello yet."""
        self.processes[stream] = 1000 + self.incarnation(stream)
        self.seqs[stream] = 0
        self.replaced.add(stream)

    def send_hello(self, stream: str, engines: list[EngineInfo]) -> None:
        """Send the hello of a stream that holds nothing, and its first heartbeat.

        A new process repeats its hello until the one before is silent.
        """
        self.engines[stream] = engines
        head, incarnation = self.seqs.setdefault(stream, 0), self.incarnation(stream)
        hello = Hello(VERSION, stream, incarnation, 1, head + 1, engines)
        self.send(stream, hello)
        known = self.intake.receiver.streams.get(stream)
        if stream in self.replaced and known is not None and known.incarnation != incarnation:
            self.advance(SILENT_AFTER)
            self.send(stream, hello)
        self.replaced.discard(stream)
        self.send(stream, Heartbeat(incarnation, head, 0))

    def send(self, stream: str, message: FromSender) -> None:
        """Take a frame in, and apply it."""
        self.intake.accept(stream.encode(), [encode(message)], self.now)
        while self.intake.busy:
            self.intake.work()

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass without frames; the intake runs what is due every second."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            self.intake.health.update(self.now)
            self.intake.expire(self.now)
            while self.intake.busy:
                self.intake.work()

    def items(self, stream: str, items: Sequence[bytes]) -> None:
        """Send encoded items."""
        first = self.seqs[stream] + 1
        self.seqs[stream] += len(items)
        raws = [msgspec.Raw(item) for item in items]
        self.send(stream, Batch(self.incarnation(stream), first, raws))

    def aggregate(self, stream: str, count: int, frames: Iterable[Sequence[bytes]]) -> None:
        """Send the records into which ``count`` items were folded."""
        for records in frames:
            first = self.seqs[stream] + 1
            self.seqs[stream] += count
            raws = [msgspec.Raw(record) for record in records]
            message = Aggregate(self.incarnation(stream), first, self.seqs[stream], raws)
            self.send(stream, message)

    def fold(
        self,
        stream: str,
        items: Iterable[bytes],
        rate: float | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Fold items, with KV blocks sampled at ``rate``, and send the result."""
        folder = ItemFolder()
        folder.kv_sample_rate = rate
        folder.settings = settings or Settings()
        for item in items:
            assert folder.fold(item, self.engines[stream])
        folded = folder.seal()
        self.aggregate(stream, folded.items, folded.frames)

    def feed(self, some: Iterable[Step]) -> None:
        """Send steps of a recording."""
        for (stream, hello), group in groupby(some, key=lambda step: (step[0], step[2] is None)):
            found = list(group)
            if hello:
                self.send_hello(stream, found[-1][1])
                continue
            items = [item for _, _, item in found if item is not None]
            for at in range(0, len(items), 100):
                self.items(stream, items[at : at + 100])

    def snapshot(self) -> list[bytes]:
        """Return the pieces of a snapshot."""
        return list(Capture(self.intake).pieces())

    def restarted(
        self, pieces: Iterable[bytes], *, slo: Iterable[Objective] = (), into: Fed | None = None
    ) -> Fed:
        """Return another process that restored a snapshot, with all streams opened again."""
        other = into or Fed(boot=2, native=self.intake.registry.series.native, slo=slo)
        restore(other.intake, pieces, 0.0)
        other.seqs, other.processes = dict(self.seqs), dict(self.processes)
        other.replaced = set(self.replaced)
        for stream, engines in self.engines.items():
            other.send_hello(stream, engines)
        return other

    @property
    def page(self) -> str:
        """Text page of the engines' families."""
        return render(self.intake.registry).decode()

    @property
    def rejected(self) -> dict[tuple[str, ...], float]:
        """Refusals by reason."""
        found = self.intake.metrics.counters()
        return {labels: n for name, labels, n in found if name == "sidestep_rejected_total"}


def lines(page: str, *without: str) -> list[str]:
    """Return the sample lines of a page, except those that begin with one of ``without``."""
    return [
        line
        for line in page.splitlines()
        if not line.startswith("#") and not line.startswith(without)
    ]


def samples(page: str) -> dict[str, float]:
    """Return values by series, as the page writes it."""
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines(page))}


def discard(registry: Registry, engine: Engine) -> None:
    """Delete ``engine``, as after a day of silence."""
    registry.retire(engine)
    engine.feeds.seen_at = -TOTALS_EXPIRE_SECONDS
    registry.expire(0.0)
