"""trtllm-serve's API: its page, and what is taken away by reading only where that is asked for.

``/metrics`` is not the page: it has iteration statistics in JSON, and each reader takes them
from all others. ``/health`` is never asked, since it may end a server with a fatal error.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sidestep.config.engine_targets import EngineTarget
from sidestep.engines.polled_page import PolledPage
from sidestep.engines.streams.rows import KV_EVENTS
from sidestep.engines.trtllm.page_rows import (
    ERRORS,
    PREFIX,
    ROWS,
    RUNNING,
    SHARED,
    SUCCESS,
    UNPREFIXED,
    WAITING,
)
from sidestep.errors import PollError
from sidestep.ingest.local_stream import DIALECT as STREAM
from sidestep.protocol.limits import COUNT_LIMIT, printable
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.progress import Progress
from sidestep.protocol.self_described import Family, Sample, Samples
from sidestep_adapters.polling.api import Kind, Poll, Update, flag, identity
from sidestep_adapters.polling.page_reader import PageReader
from sidestep_adapters.scrape.http_client import Client
from sidestep_adapters.trtllm.iterations import IterationReader, decode
from sidestep_adapters.trtllm.kv_events import Event, EventReader
from sidestep_adapters.trtllm.kv_events import decode as decode_events

log = logging.getLogger("sidestep.engine")

DIALECT = "trtllm"
PAGE, ITERATIONS, EVENTS = "/prometheus/metrics", "/metrics", "/kv_cache_events"
MODELS = "/v1/models"
TEXT, JSON = "text/plain", "application/json"
UNDEFINED = frozenset({"", "undefined"})
"""Values of labels that a release before #12545 of TensorRT-LLM did not know."""
MAX_SHORT_BYTES = 1 << 20
MAX_ITERATION_BYTES = MAX_EVENT_BYTES = 8 << 20
MAX_RANKS = 64
CAUSES: Mapping[str, str] = {"http_404": "no_metrics", "http_503": "starting"}
ADVICE: Mapping[str, str] = {
    "no_metrics": "start trtllm-serve with return_perf_metrics: true in its configuration",
    "starting": "the server starts, or has failed",
    "bad_answer": "check that the URL is that of trtllm-serve, by default port 8000",
}


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class TrtllmApi:
    """Implements ``polling.api.EngineApi``.

    Args:
        server: The server's base URL, its files and headers.
        clock: Monotonic time.

    Raises:
        ValueError: An option is invalid.
    """

    def __init__(self, server: EngineTarget, clock: Callable[[], float] = time.monotonic) -> None:
        given = server.known("model", "iterations", "kv-events")
        # With several front ends, each connection may reach another one, whose counts differ.
        target = dataclasses.replace(server.target, keepalive=True)
        self._client = Client(target)
        self._url = target.url
        self._name = target.name
        self._labels = dict(target.labels)
        self._model = given.get("model", "")
        self._clock = clock
        self._reader = PageReader(
            ROWS,
            SHARED,
            ("pid",),
            {name: f"{PREFIX}{name}" for name in UNPREFIXED},
        )
        self._iterations = IterationReader() if flag("iterations", given, default=False) else None
        self._takes_events = flag("kv-events", given, default=False)
        self._events: dict[int, EventReader] = {}
        """Readers of KV cache events, by rank."""
        self._bounds: dict[str, list[float]] = {}
        self._info: EngineInfo | None = None

    def check(self) -> EngineInfo:
        """See ``EngineApi``."""
        self._client.check()
        for taken, name, what in (
            (
                self._iterations is not None,
                "iterations=true",
                f"iteration statistics of {ITERATIONS}",
            ),
            (self._takes_events, "kv-events=true", f"events of {EVENTS}"),
        ):
            if taken:
                log.warning(
                    "trtllm=%s: %s takes the %s away from all other readers of this server",
                    self._name,
                    name,
                    what,
                )
        return self._engine({"model_name": self._model or "m", "engine_type": ""})

    async def close(self) -> None:
        """See ``EngineApi``."""
        await self._client.close()

    async def poll(self) -> Poll:
        """See ``EngineApi``."""
        now = self._clock()
        failure: PollError | None = None
        families: list[Family] = []
        labels = dict.fromkeys(SHARED, "")
        try:
            labels, families = await self._page()
        except PollError as error:
            if self._iterations is None or error.cause != "no_metrics":
                raise
            failure = error
        added = await self._read_iterations()
        if self._iterations is not None:
            families = _with_gauges(families, self._iterations.gauges())
        self._note_bounds(families)
        info = self._info = self._engine(await self._mended(labels))
        items = [PolledPage(0, now, families=tuple(families))]
        more = [Samples(0, now, added)] if added else []
        updates = [Update(info, [*items, *more], _progress(families))]
        updates += await self._read_events(info, now)
        return Poll(updates, failure)

    async def _page(self) -> tuple[dict[str, str], list[Family]]:
        """Return the page's labels and families; of a page without requests yet, none."""
        body = await self._get(PAGE, TEXT, (TEXT,), MAX_SHORT_BYTES)
        if not body.strip():
            return dict.fromkeys(SHARED, ""), []
        found = await self._reader.read(body)
        if len(found) > 1:
            # One server has one model: files of an earlier one are left in its directory.
            raise PollError(
                "bad_answer",
                "several models on one page: empty the server's PROMETHEUS_MULTIPROC_DIR",
            )
        for values, families in found.items():
            return dict(zip(SHARED, values, strict=True)), families
        return dict.fromkeys(SHARED, ""), []

    async def _read_iterations(self) -> list[Family]:
        """Take the iteration statistics; none unless they were asked for."""
        if self._iterations is None:
            return []
        body = await self._get(ITERATIONS, JSON, (JSON,), MAX_ITERATION_BYTES)
        return self._iterations.families(decode(body))

    async def _read_events(self, info: EngineInfo, now: float) -> list[Update]:
        """Take the KV cache events, if they were asked for; each rank's are an engine of its own."""
        if not self._takes_events:
            return []
        body = await self._get(EVENTS, JSON, (JSON,), MAX_EVENT_BYTES, "POST")
        by_rank: dict[int, list[Event]] = {}
        for event in decode_events(body):
            by_rank.setdefault(event.attention_dp_rank, []).append(event)
        if len(self._events.keys() | by_rank.keys()) > MAX_RANKS:
            raise PollError("bad_answer", f"events of more than {MAX_RANKS} ranks")
        updates = []
        for rank, events in by_rank.items():
            items = self._events.setdefault(rank, EventReader()).items(events, now)
            labels = {**self._labels, "engine": str(rank), "model_name": info.labels["model_name"]}
            name = identity(STREAM, self._name, str(rank))
            engine = EngineInfo(name, STREAM, labels, features=[KV_EVENTS])
            updates.append(Update(engine, items))
        return updates

    async def _mended(self, labels: dict[str, str]) -> dict[str, str]:
        """Return the labels; an undefined model has the name that the server serves."""
        found = {name: "" if text in UNDEFINED else text for name, text in labels.items()}
        if self._model:
            return {**found, "model_name": self._model}
        if not found["model_name"]:
            known = self._info
            found["model_name"] = (
                known.labels["model_name"] if known is not None else await self._served()
            )
        return found

    async def _served(self) -> str:
        body = await self._get(MODELS, JSON, (JSON,), MAX_SHORT_BYTES)
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise PollError("bad_answer", f"{MODELS}: {error}") from None
        return printable(models[0].id) if models else ""

    async def _get(
        self, path: str, accept: str, kinds: Sequence[str], max_bytes: int, method: str = "GET"
    ) -> bytes:
        try:
            chunks = await self._client.fetch(f"{self._url}{path}", accept, kinds, method)
        except PollError as error:
            cause = CAUSES.get(error.cause)
            raise PollError(cause, str(error)) if cause else error from None
        if sum(map(len, chunks)) > max_bytes:
            raise PollError("bad_answer", f"more than {max_bytes >> 20} MiB")
        return b"".join(chunks)

    def _note_bounds(self, families: Sequence[Family]) -> None:
        """Note the bounds of the page's histograms, which its server may have been given."""
        self._bounds |= {each.name: each.bounds for each in families if each.bounds}

    def _engine(self, labels: Mapping[str, str]) -> EngineInfo:
        name = identity(DIALECT, self._name)
        return EngineInfo(name, DIALECT, {**self._labels, **labels}, bounds=dict(self._bounds))


def _with_gauges(families: list[Family], gauges: Mapping[str, float]) -> list[Family]:
    """Return ``families`` and those gauges that they do not have."""
    known = {family.name for family in families}
    return families + [
        Family(name, "gauge", [], [Sample([], value)])
        for name, value in gauges.items()
        if name not in known
    ]


def _progress(families: Sequence[Family]) -> Progress:
    """Return what is known of progress: requests that have ended.

    The gauges stand still until one ends, so no age of a request can be derived from them.
    """
    totals = dict.fromkeys((SUCCESS, ERRORS, RUNNING, WAITING), 0.0)
    for family in families:
        if family.name in totals:
            totals[family.name] = math.fsum(sample.value for sample in family.samples)
    ended, unfinished = (
        min(int(totals[one] + totals[other]), COUNT_LIMIT)
        for one, other in ((SUCCESS, ERRORS), (RUNNING, WAITING))
    )
    return Progress(0, ended, unfinished)


KIND = Kind(TrtllmApi, ADVICE)
