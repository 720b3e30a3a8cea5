"""The HTTP routes: metrics page, health, landing page, typed JSON."""

from __future__ import annotations

import asyncio
import functools
import math
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from sidestep.cardinality import counted
from sidestep.choice import Choice
from sidestep.engine import Engine
from sidestep.formats import CONTENT_TYPES, Format, chosen
from sidestep.histogram import Histogram
from sidestep.landing import landing_page
from sidestep.pod_pages import PodPages
from sidestep.registry import Registry
from sidestep.render import passed, protobuf, protobuf_samples
from sidestep.render.merged import Merged
from sidestep.render.text import Texts
from sidestep.selfmetrics import SelfMetrics
from sidestep.snapshots import Snapshots
from sidestep.turns import collected
from sidestep.view import children, combined, families, is_shared, labels_of

CHEAP = 0.005
"""Seconds that a page may take to be made anew for each who asks."""
SLICE = 0.002
"""Seconds of rendering after which the loop gets a turn."""
REUSED = 0.1
"""Seconds for which a page may answer more than those who asked for it."""
POD_PATH = "/pod"
"""Behind the metrics page's path: the page on which all engines are one."""
_GZIP_BITS = 16 + zlib.MAX_WBITS

WRITERS: Mapping[Format, Callable[[Any], bytes]] = {
    "text": generate_latest,
    "openmetrics": generate_openmetrics,
    "protobuf": protobuf_samples.generate,
}
"""Of the exporter's own families."""

State = tuple[int, int]
"""Another one when the page is another."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    """Renders pages, each state of the registry once, for all who ask at one time.

    Args:
        snapshots: Where given, nobody sees a page before what it shows is safe: a counter
            that was seen never goes back when this process dies.
        choice: What of the engines' series pages show.
    """

    def __init__(
        self,
        registry: Registry,
        own: CollectorRegistry,
        metrics: SelfMetrics,
        endpoints: list[str],
        snapshots: Snapshots | None = None,
        *,
        choice: Choice | None = None,
    ) -> None:
        shown = choice or Choice()
        self.registry = registry
        self.own = own
        self.metrics = metrics
        self.endpoints = endpoints
        self._snapshots = snapshots
        self.views = {"engine": Merged(registry, shown), "pod": Merged(registry, shown.of_pod)}
        self._texts: Callable[..., Iterator[list[bytes]]] = self.views["engine"].pieces
        # What labels and bounds are left away is text's alone.
        self.has_protobuf = shown.is_plain and registry.native is not None
        if shown.is_plain:
            self._texts = Texts(registry).pieces
        self.pod = PodPages(registry, self.views["pod"], self._own_text, self.settled)
        self._cache: dict[Format, tuple[State, bytes]] = {}
        self._answers: dict[Format, tuple[float, asyncio.Task[bytes]]] = {}

    async def page(self, form: Format, names: frozenset[str]) -> bytes:
        """The whole page: the engines' families, those passed on, then the exporter's own.

        One page is in the making at a time and answers all who ask meanwhile, and for
        a little longer where it was dear: however many ask, there is time for engines.
        """
        if names:
            return await self._made(form, names)
        until, task = self._answers.get(form, (0.0, None))
        if task is None or time.monotonic() >= until:
            task = asyncio.create_task(self._made(form, names))
            self._answers[form] = math.inf, task
            task.add_done_callback(functools.partial(self._expire, form, time.monotonic()))
        # One who hangs up must not take the others' page along.
        return await asyncio.shield(task)

    def _expire(self, form: Format, started: float, task: asyncio.Task[bytes]) -> None:
        now = time.monotonic()
        took = now - started
        kept = min(9 * took, REUSED) if took > CHEAP else 0.0
        self._answers[form] = now + kept, task

    async def _made(self, form: Format, names: frozenset[str]) -> bytes:
        started = time.perf_counter()
        body = await (self._rendered(form, names) if names else self._engines(form))
        page = body + self._own(form, names)
        await self.settled()
        self.metrics.set("sidestep_scrape_duration_seconds", time.perf_counter() - started)
        return page

    def _own(self, form: Format, names: frozenset[str]) -> bytes:
        """The exporter's own families."""
        own = self.own.restricted_registry(names) if names else self.own
        return WRITERS[form](own)

    def _own_text(self, openmetrics: bool, names: frozenset[str]) -> bytes:
        return self._own("openmetrics" if openmetrics else "text", names)

    async def settled(self) -> None:
        """Return when what was rendered before the call may be seen."""
        if self._snapshots is not None:
            await self._snapshots.settled()

    async def _engines(self, form: Format) -> bytes:
        state, body = self._cache.get(form, ((-1, -1), b""))
        if state != self._state:
            state = self._state
            body = await self._rendered(form)
            self._cache[form] = (state, body)
        return body

    @property
    def _state(self) -> State:
        return self.registry.version, self.registry.passed.version

    async def _rendered(self, form: Format, names: Collection[str] = ()) -> bytes:
        """The engines' families and those passed on; between two of them the loop gets its turn when it is due.

        Each family is of one moment. What comes meanwhile is in the later ones, and the
        snapshot that a page waits for is made afterwards.
        """
        lines: list[bytes] = []
        since = time.perf_counter()
        for family in self._pieces(form, names):
            lines += family
            if time.perf_counter() - since > SLICE:
                await asyncio.sleep(0)
                since = time.perf_counter()
        return b"".join(lines)

    def _pieces(self, form: Format, names: Collection[str]) -> Iterator[list[bytes]]:
        if form == "protobuf":
            others = protobuf_samples.passed_pieces(self.registry.passed, names)
            return chain(protobuf.pieces(self.registry, names), others)
        openmetrics = form == "openmetrics"
        others = passed.pieces(self.registry.passed, openmetrics=openmetrics, names=names)
        return chain(self._texts(openmetrics=openmetrics, names=names), others)


def application(
    pages: Pages, path: str, ready: Callable[[], bool], view: str = "engine"
) -> web.Application:
    """The routes; ``path`` is where the metrics page is, in ``view`` unless asked otherwise."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        form = chosen(request.headers.get("Accept", ""), protobuf=pages.has_protobuf)
        names = frozenset(request.query.getall("name[]", []))
        response = web.Response(body=await pages.page(form, names))
        response.headers["Content-Type"] = CONTENT_TYPES[form]
        return await _compressed(request, response)

    async def healthy(_: web.Request) -> web.StreamResponse:
        return web.Response(text="sidestep is healthy\n")

    async def is_ready(_: web.Request) -> web.StreamResponse:
        if ready():
            return web.Response(text="sidestep is ready\n")
        return web.Response(text="sidestep is not ready\n", status=503)

    async def landing(_: web.Request) -> web.StreamResponse:
        text = landing_page(path, pod_path, len(pages.registry.engines), pages.endpoints)
        return web.Response(text=text, content_type="text/html")

    async def engines(_: web.Request) -> web.StreamResponse:
        return _json([_engine(engine) for engine in pages.registry.engines.values()])

    async def typed(request: web.Request) -> web.StreamResponse:
        names = frozenset(request.query.getall("name[]", []))
        found: list[dict[str, Any]] = []
        since = time.perf_counter()
        for family in typed_families(pages.registry, names):
            found.append(family)
            if time.perf_counter() - since > SLICE:
                await asyncio.sleep(0)
                since = time.perf_counter()
        response = _json(found)
        await pages.settled()
        return await _compressed(request, response)

    pod, pod_path = _of_pod(pages), path.rstrip("/") + POD_PATH
    app = web.Application()
    app.add_routes(
        [
            web.get("/", landing),
            web.get(path, _by_view({"engine": metrics, "pod": pod}, view)),
            # Of those who poll, some can be told a path, and no query.
            web.get(pod_path, pod),
            web.get("/-/healthy", healthy),
            web.get("/-/ready", is_ready),
            web.get("/api/v1/engines", engines),
            web.get("/api/v1/metrics", typed),
            web.get("/api/v1/cardinality", _cardinality(pages)),
        ]
    )
    return app


async def _compressed(request: web.Request, response: web.Response) -> web.StreamResponse:
    """``response``, compressed off the event loop where the client takes gzip."""
    body = response.body
    if _takes_gzip(request) and isinstance(body, bytes):
        loop = asyncio.get_running_loop()
        response.body = await loop.run_in_executor(None, _gzip, body)
        response.headers["Content-Encoding"] = "gzip"
    return response


def _takes_gzip(request: web.Request) -> bool:
    accepted = request.headers.get("Accept-Encoding", "").replace(" ", "").split(",")
    return not {"gzip", "gzip;q=1", "gzip;q=1.0"}.isdisjoint(accepted)


def _by_view(handlers: Mapping[str, Handler], default: str) -> Handler:
    """The page of the view that a request names."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        view = request.query.get("view", default)
        if view not in handlers:
            known = " and ".join(handlers)
            return web.Response(text=f"no such view; known are {known}\n", status=400)
        return await handlers[view](request)

    return metrics


def _of_pod(pages: Pages) -> Handler:
    """The page on which all engines are one; in text unless OpenMetrics is preferred."""

    async def pod(request: web.Request) -> web.StreamResponse:
        form = chosen(request.headers.get("Accept", ""))
        openmetrics = form == "openmetrics"
        names = frozenset(request.query.getall("name[]", []))
        packed = _takes_gzip(request)
        body = await pages.pod.page(openmetrics=openmetrics, names=names, packed=packed)
        response = web.Response(body=body)
        response.headers["Content-Type"] = CONTENT_TYPES[form]
        if packed:
            response.headers["Content-Encoding"] = "gzip"
        return response

    return pod


def _cardinality(pages: Pages) -> Handler:
    """What makes pages long."""

    async def cardinality(_: web.Request) -> web.StreamResponse:
        *_rest, report = await collected(counted(pages.registry, pages.views))
        return _json(report.json())

    return cardinality


def _gzip(body: bytes) -> bytes:
    compressor = zlib.compressobj(1, zlib.DEFLATED, _GZIP_BITS)
    return compressor.compress(body) + compressor.flush()


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _engine(engine: Engine) -> dict[str, Any]:
    return {
        "id": engine.id,
        "dialect": engine.layout.dialect,
        "labels": engine.labels,
        "up": bool(engine.streams),
        "streams": len(engine.streams),
        "restarts": engine.restarts,
        "features": sorted(engine.features),
        "info": engine.info,
    }


def typed_families(registry: Registry, names: frozenset[str]) -> Iterable[dict[str, Any]]:
    """The page as values: for programs that would otherwise parse text."""
    for family in list(families(registry, names)):
        if is_shared(family):
            found = combined(registry, family)
        else:
            found = [
                (labels_of(engine, family, key), value)
                for engine in registry.engines.values()
                for key, value in children(engine, family)
            ]
        samples = [{"labels": labels, **_typed(value)} for labels, value in found]
        if samples:
            yield {
                "name": family.name,
                "type": family.kind,
                "help": family.help,
                "samples": samples,
            }
    yield from passed.typed(registry.passed, names)


def _typed(value: float | Histogram) -> dict[str, Any]:
    if isinstance(value, Histogram):
        counts = value.cumulative
        buckets = [[bound, count] for bound, count in zip(value.bounds, counts, strict=False)]
        return {"buckets": buckets, "count": counts[-1], "sum": value.sum}
    return {"value": value}
