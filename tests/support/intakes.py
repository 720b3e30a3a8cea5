"""Recorded runs, given to an intake without sockets: as they were, cut, folded, snapshotted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from exporters import DATA
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.slo import Objective, Objectives
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition.text_page import render
from sidestep.ingest.intake import Intake
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import Registry
from sidestep.protocol.limits import VERSION
from sidestep.protocol.messages import Aggregate, Batch, EngineInfo, FromSender, Hello, encode
from sidestep.snapshot.capture import Capture, restore
from sidestep.telemetry.self_metrics import SelfMetrics
from sidestep.tracking.kv_blocks.sampling import Sampling
from sidestep.tracking.requests.rules import Rules
from sidestep_adapters.recording.format import Items, StreamStart, read

CORE_RUNS = ("core", "core_aborts", "core_lora", "core_dp")
Step = tuple[str, list[EngineInfo], bytes | None]
"""Stream, its engines, and an item; none where it greets."""


def steps(run: str) -> Iterator[Step]:
    """What a recording through the tap holds, in order."""
    engines: dict[str, list[EngineInfo]] = {}
    for record in read(DATA / f"{run}.rec.gz"):
        if isinstance(record, StreamStart):
            engines[record.stream] = record.engines
            yield record.stream, record.engines, None
        elif isinstance(record, Items):
            for raw in record.items:
                yield record.stream, engines[record.stream], bytes(raw)


class Fed:
    """An intake and the streams that feed it; ``reborn`` is the next process with its snapshot."""

    def __init__(
        self,
        *,
        rate: float = 0.0,
        boot: int = 1,
        native: NativeSettings | None = None,
        legacy: bool = False,
        wall: float = 1.0,
        now: float = 0.0,
        slo: Iterable[Objective] = (),
    ) -> None:
        self.now = now
        layouts = {
            name: compile_layout(dialect, legacy=legacy) for name, dialect in DIALECTS.items()
        }
        objectives = Objectives(slo)
        registry = Registry(layouts, {}, Rules(), Sampling(rate), native, objectives=objectives)
        self.intake = Intake(
            registry,
            SelfMetrics(),
            boot=boot,
            clock=lambda: self.now,
            wall=lambda: wall + self.now - now,
        )
        self.processes: dict[str, int] = {}
        self.seqs: dict[str, int] = {}
        self.engines: dict[str, list[EngineInfo]] = {}

    def incarnation(self, stream: str) -> int:
        """Of the stream's process."""
        return self.processes.setdefault(stream, 1 + len(self.processes))

    def restart(self, stream: str) -> None:
        """Another process of the stream, which has not greeted."""
        self.processes[stream] = 1000 + self.incarnation(stream)
        self.seqs[stream] = 0

    def greet(self, stream: str, engines: list[EngineInfo]) -> None:
        """Say hello."""
        self.engines[stream] = engines
        first = self.seqs.setdefault(stream, 0) + 1
        self.say(stream, Hello(VERSION, stream, self.incarnation(stream), 1, first, engines))

    def say(self, stream: str, message: FromSender) -> None:
        """Take a frame in, and apply it."""
        self.intake.take(stream.encode(), [encode(message)], self.now)
        while self.intake.busy:
            self.intake.work()

    def pass_time(self, seconds: float) -> None:
        """Nothing comes for so long, and the intake looks around every second."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 1.0, until)
            self.intake.expire(self.now)
            while self.intake.busy:
                self.intake.work()

    def items(self, stream: str, items: Sequence[bytes]) -> None:
        """Send items as they are."""
        first = self.seqs[stream] + 1
        self.seqs[stream] += len(items)
        raws = [msgspec.Raw(item) for item in items]
        self.say(stream, Batch(self.incarnation(stream), first, raws))

    def aggregate(self, stream: str, count: int, frames: Iterable[Sequence[bytes]]) -> None:
        """Send what so many items came to."""
        for records in frames:
            first = self.seqs[stream] + 1
            self.seqs[stream] += count
            raws = [msgspec.Raw(record) for record in records]
            message = Aggregate(self.incarnation(stream), first, self.seqs[stream], raws)
            self.say(stream, message)

    def feed(self, some: Iterable[Step]) -> None:
        """Send a part of a recording."""
        for (stream, greets), group in groupby(some, key=lambda step: (step[0], step[2] is None)):
            found = list(group)
            if greets:
                self.greet(stream, found[-1][1])
                continue
            items = [item for _, _, item in found if item is not None]
            for at in range(0, len(items), 100):
                self.items(stream, items[at : at + 100])

    def snapshot(self) -> list[bytes]:
        """The pieces of one."""
        return list(Capture(self.intake).pieces())

    def reborn(
        self, pieces: Iterable[bytes], *, rate: float = 0.0, slo: Iterable[Objective] = ()
    ) -> Fed:
        """Another process that goes on where a snapshot ends, and whom the streams greet."""
        other = Fed(rate=rate, boot=2, native=self.intake.registry.native, slo=slo)
        restore(other.intake, pieces, 0.0)
        other.seqs, other.processes = dict(self.seqs), dict(self.processes)
        for stream, engines in self.engines.items():
            other.greet(stream, engines)
        return other

    @property
    def page(self) -> str:
        """The engines' families."""
        return render(self.intake.registry).decode()

    @property
    def rejected(self) -> dict[tuple[str, ...], float]:
        """Refusals by reason."""
        found = self.intake.metrics.counters()
        return {labels: n for name, labels, n in found if name == "sidestep_rejected_total"}


def lines(page: str, *without: str) -> list[str]:
    """Samples of a page but those of some families."""
    return [
        line
        for line in page.splitlines()
        if not line.startswith("#") and not line.startswith(without)
    ]
