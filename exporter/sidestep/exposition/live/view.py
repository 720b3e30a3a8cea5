"""The live view: samples all engines every few seconds, and renders what the live page asks for."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from sidestep import __version__
from sidestep.exposition.live.answers import (
    WINDOW,
    EngineDetail,
    ExporterHealth,
    HistoryAnswer,
    LimitHistory,
    Live,
    StreamRow,
    Warned,
)
from sidestep.exposition.live.engine_rows import Rows, ShownEngines, engine_row
from sidestep.exposition.live.history import (
    INTERVAL,
    SERIES,
    Merged,
    SampleHistory,
    TotalHistory,
    charts,
    merged_gauges,
)
from sidestep.exposition.live.samples import LATENCIES, EngineSample, Increase, increase, read
from sidestep.exposition.live.time_spent import NOTHING_KNOWN, UNKNOWN_LIMIT, totals
from sidestep.exposition.live.verdict import Evaluation, evaluate
from sidestep.exposition.renders import Body, SharedRenders
from sidestep.ingest.intake import Intake
from sidestep.metrics.engine import Engine, distinct_names
from sidestep.protocol.request_events import LIMITS
from sidestep.protocol.stream import Stream, StreamState
from sidestep.telemetry.logs import recent
from sidestep.tracking.health.states import LEVELS
from sidestep.transport.process import resident

INFO = "_info"
"""End of the names of families whose labels are the information."""


def detail(engine: Engine, intake: Intake, now: float) -> EngineDetail:
    """Return the details of ``engine`` at ``now``, in monotonic seconds."""
    health = intake.health.of(engine)
    return EngineDetail(
        id=engine.id,
        labels=engine.labels,
        features=sorted(engine.description.features),
        restarts=engine.restarts,
        info={**{name: {**labels} for name, labels in engine.info.items()}, **_current(engine)},
        streams=[
            _stream(stream, now)
            for stream in intake.receiver.streams.values()
            if any(info.id == engine.id for info in stream.engines)
        ],
        stack=[] if health is None else [*health.stack],
    )


def _current(engine: Engine) -> dict[str, dict[str, str]]:
    """Return the labels of info metrics that change while the engine runs, such as its adapters."""
    found: dict[str, dict[str, str]] = {}
    for children, row in zip(engine.keyed, engine.layout.keyed, strict=True):
        if row.kind == "gauge" and row.name.endswith(INFO) and children and engine.live:
            # The value is the time of the last step with these labels.
            latest = max(children, key=lambda key: children[key])
            name = row.name.rpartition(":")[2].removesuffix(INFO)
            found[name] = dict(zip(row.own_labels, latest, strict=True))
    return found


def _stream(stream: Stream, now: float) -> StreamRow:
    beat = stream.beat
    return StreamRow(
        id=stream.id,
        state=_state(stream),
        applied=stream.seq,
        lag=0 if beat is None else max(beat.head - stream.seq, 0),
        lost=stream.dropped,
        retransmitted=stream.duplicates,
        folded=stream.folded,
        errors=stream.errors,
        last_seen=max(now - stream.seen_at, 0.0),
    )


def _state(stream: Stream) -> str:
    if stream.state is StreamState.CLOSED:
        return "closed"
    is_silent = stream.silent or stream.unanswered or stream.state is StreamState.DETACHED
    return "silent" if is_silent else "open"


CACHE_SECONDS = 1.0
"""How long an answer is sent to further viewers."""
TICK = 1.0
"""Seconds between two searches for engines that have no sample yet."""
MIN_SECONDS = 0.5
"""Seconds over which a rate is computed at least."""
OWN = frozenset({"sidestep_streams", "sidestep_series", "sidestep_loop_lag_seconds"})
"""Self-metrics that the view shows."""


class LiveView:
    """Answers for the live page: all engines now and over the last minutes.

    Args:
        scraped_at: Returns the monotonic time of the last scrape by Prometheus; None: never.
        dashboards: Address of dashboards that the page links to; empty: none.
    """

    def __init__(
        self,
        intake: Intake,
        endpoints: Callable[[], list[str]] = list,
        scraped_at: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        *,
        dashboards: str = "",
    ) -> None:
        self.histories: dict[str, SampleHistory] = {}
        self.total = TotalHistory()
        self._intake = intake
        self._registry = intake.registry
        self._shown = ShownEngines(intake.registry)
        self._endpoints = endpoints
        self._scraped_at = scraped_at
        self._dashboards = dashboards
        self._clock = clock
        self._wall = wall
        self._started = clock()
        self._next_round = -math.inf
        self._items: list[tuple[float, int]] = []
        """Time and number of items applied, at each round of the last minute and before."""
        self._renders: SharedRenders[tuple[str | None, ...]] = SharedRenders(CACHE_SECONDS)

    async def run(self) -> None:
        """Sample engines until cancelled."""
        while True:
            await self.sample()
            await asyncio.sleep(TICK)

    async def sample(self) -> None:
        """Sample all engines if a sample is due, and in any case those that have none yet."""
        now = self._clock()
        is_due = now >= self._next_round
        self._shown.refresh()
        engines, summed = self._shown.engines, self._shown.summed
        if is_due:
            # A round that is late does not shift the next ones.
            behind = now - self._next_round
            self._next_round = now + INTERVAL - (behind if behind < INTERVAL else 0.0)
            self._note_items(now)
            known = ((engine.id, self._history(engine)) for engine in engines)
            self.histories = {name: found for name, found in known if found is not None}
        merged, samples = Merged(), []
        for engine in engines:
            history = self._history(engine)
            if history is None:
                history = self.histories[engine.id] = SampleHistory(engine)
            elif not is_due:
                continue
            before = history.samples[-1] if history.samples else None
            sample = read(engine, self._clock())
            history.append(sample)
            if is_due:
                history.time.add(totals(engine, sample.at))
            if engine in summed:
                samples.append(sample)
                if before is not None and (added := increase([before, sample])) is not None:
                    merged.add(added)
            # A sample takes a tenth of a millisecond: other tasks run in between.
            await asyncio.sleep(0)
        if is_due:
            now, gauges, added = self._clock(), merged_gauges(samples), merged.total()
            self.total.add(now, gauges, added, has_engines=bool(samples))

    def _history(self, engine: Engine) -> SampleHistory | None:
        """Return the history of ``engine``, not that of another engine with the same identity."""
        found = self.histories.get(engine.id)
        return found if found is not None and found.engine is engine else None

    def _note_items(self, now: float) -> None:
        self._items.append((now, self._intake.items))
        while len(self._items) > 1 and self._items[1][0] <= now - WINDOW:
            del self._items[0]

    async def answer(self) -> Body:
        """Return the answer of ``/api/v1/live``, rendered at most once a second."""
        return await self._renders.get((), self._answer)

    async def evaluation(self) -> Evaluation:
        """Return all engines as they are now, and the verdict on them."""
        return evaluate((await self._rows()).rows)

    async def _answer(self) -> Body:
        found = await self._rows()
        engines, verdict = evaluate(found.rows)
        live = Live(
            version=__version__,
            time=self._wall(),
            verdict=verdict,
            total=found.total(),
            engines=engines,
            exporter=self._exporter(),
            warnings=[Warned(*each) for each in reversed(recent.warnings)],
        )
        return Body([msgspec.json.encode(live)])

    async def _rows(self) -> Rows:
        found = Rows()
        self._shown.refresh()
        shown = [*self._shown.engines, *self._hidden_problems()]
        names = distinct_names(shown)
        for engine in shown:
            sample = read(engine, self._clock())
            counted = self._last_minute(engine, sample)
            health = self._intake.health.of(engine)
            history = self._history(engine)
            spent = (
                NOTHING_KNOWN if history is None else history.time.last_minute(engine, sample.at)
            )
            row = engine_row(
                engine, names[engine.id], sample, counted, health, wall=self._wall(), spent=spent
            )
            if health is not None and health.stack:
                row = msgspec.structs.replace(row, stack=[*health.stack])
            found.add(row, counted, spent, is_summed=engine in self._shown.summed)
            # A row takes a tenth of a millisecond: other tasks run in between.
            await asyncio.sleep(0)
        return found

    def _hidden_problems(self) -> list[Engine]:
        """Return engines that have no numbers to show, and need attention."""
        found = ((engine, self._intake.health.of(engine)) for engine in self._shown.hidden)
        return [e for e, health in found if health and LEVELS[health.state] not in ("ok", None)]

    def _last_minute(self, engine: Engine, sample: EngineSample) -> Increase | None:
        """Return what an engine has counted until ``sample``; None: it has just come."""
        history = self._history(engine)
        window = [] if history is None else history.window(sample.at)
        # After a backlog, rates are those since then.
        window = [each for each in window if each.caught_up_at == sample.caught_up_at]
        found = increase([*window, sample], LATENCIES)
        return None if found is None or found.seconds < MIN_SECONDS else found

    def _exporter(self) -> ExporterHealth:
        numbers = {row.name: found[0][1] for row, found in self._intake.metrics.samples(OWN)}
        now, scraped = self._clock(), self._scraped_at()
        since, items = self._items[0] if self._items else (now, 0)
        return ExporterHealth(
            endpoints=self._endpoints(),
            streams=int(numbers.get("sidestep_streams", 0)),
            series=int(numbers.get("sidestep_series", 0)),
            items_per_second=(
                (self._intake.items - items) / (now - since) if now - since >= MIN_SECONDS else None
            ),
            lost=int(self._intake.metrics.value("sidestep_lost_items_total"))
            + sum(stream.dropped for stream in self._intake.receiver.streams.values()),
            loop_lag=numbers.get("sidestep_loop_lag_seconds", 0.0),
            resident_bytes=resident(),
            uptime=now - self._started,
            last_scrape=None if scraped is None else now - scraped,
            dashboards=self._dashboards,
        )

    async def history(self, identity: str | None = None) -> Body | None:
        """Return the answer of ``/api/v1/live/history`` for an engine or all; None if there is no such engine."""
        if identity is not None and identity not in self._registry.engines:
            return None
        return await self._renders.get((identity,), lambda: self._charts(identity))

    async def _charts(self, identity: str | None) -> Body:
        engine = None if identity is None else self._registry.engines.get(identity)
        found: SampleHistory | None = self.total
        if identity is not None:
            found = None if engine is None else self._history(engine)
        samples: Sequence[EngineSample] = [] if found is None else [*found.samples]
        charted, maps = await asyncio.to_thread(charts, samples)
        offset = self._wall() - self._clock()
        columns = zip(*(point.numbers for point in charted), strict=True)
        series = dict(zip(SERIES, map(list, columns), strict=True)) if charted else {}
        answer = HistoryAnswer(
            times=[round(point.at + offset, 3) for point in charted],
            series=series or {name: [] for name in SERIES},
            heatmaps=maps,
            limit_names=LIMITS,
            limits=[
                LimitHistory(id=name, limits=[*history.time.limits])
                for name, history in self.histories.items()
                if identity in (None, name) and {*history.time.limits} - {UNKNOWN_LIMIT}
            ],
            detail=None if engine is None else detail(engine, self._intake, self._clock()),
        )
        return Body([msgspec.json.encode(answer)])
