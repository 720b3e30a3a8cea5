"""HTTP routes: metrics pages, health, landing page, JSON."""

from __future__ import annotations

import asyncio
import functools
import html
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from sidestep import __version__
from sidestep.diagnosis.finding import own_report
from sidestep.diagnosis.own_checks import OwnChecks
from sidestep.exposition import json_format
from sidestep.exposition.cardinality import cardinality_report
from sidestep.exposition.hit_ratio_curve import engine_curve
from sidestep.exposition.live.view import LiveView
from sidestep.exposition.negotiation import CONTENT_TYPES, negotiate
from sidestep.exposition.pages import Pages
from sidestep.exposition.renders import Body
from sidestep.exposition.timeline import MAX_MINUTES, Timelines
from sidestep.http.debug_page import PATH as DEBUG_PATH
from sidestep.http.debug_page import debug_page
from sidestep.http.openapi import openapi
from sidestep.http.request_guard import Handler
from sidestep.http.responses import PartsResponse
from sidestep.http.static_files import LivePage
from sidestep.ingest.health import ALARMING, NOT_READY, HealthMonitor
from sidestep.metrics.engine import Engine, distinct_names
from sidestep.metrics.trackers import Trackers
from sidestep.tracking.health.states import Health

POD_PATH = "/pod"
"""Suffix of the metrics page's path for the pod view, which aggregates all engines."""
JSON = "application/json"
MAX_SLOWEST = 20
"""Most requests that ``/api/v1/timeline?slowest=`` returns of an engine."""
SCRAPE_TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"
"""Header of scrapes by Prometheus, its agent, OpenTelemetry's collector and VictoriaMetrics."""


def application(endpoints: Endpoints, path: str) -> web.Application:
    """Return the application, with the metrics page at ``path``."""
    # Path, handler, and text of the link on the landing page; one of a single engine has no link.
    routes: list[tuple[str, Handler, str]] = [
        (path, endpoints.metrics, "Metrics"),
        # Some clients can be configured with a path but not with a query.
        (
            path.rstrip("/") + POD_PATH,
            functools.partial(endpoints.metrics, view="pod"),
            "Metrics of all engines as one",
        ),
        ("/api/v1/engines", endpoints.engines, "Engines (JSON)"),
        ("/api/v1/metrics", endpoints.metrics_json, "Metrics (JSON)"),
        ("/api/v1/cardinality", endpoints.cardinality, "Number of series (JSON)"),
        ("/api/v1/kv/curve", endpoints.hit_ratio_curve, "Hit-ratio curves of prefix caches (JSON)"),
        ("/api/v1/doctor", endpoints.doctor, "What is wrong (JSON)"),
        ("/-/healthy", endpoints.healthy, "Health"),
        ("/-/ready", endpoints.ready, "Readiness"),
        (DEBUG_PATH, endpoints.debug, ""),
        ("/-/engines", endpoints.engines_health, "Health of the engines (JSON)"),
        # The identity of an engine can contain slashes.
        ("/-/engines/{engine:.+}", endpoints.engine_health, ""),
        ("/api/v1/engines/{engine:.+}/stack", endpoints.stack, ""),
    ]
    if endpoints.timelines is not None:
        routes.append(("/api/v1/timeline", endpoints.timeline, "Recent steps and requests (JSON)"))
    if endpoints.live_view is not None:
        routes += [
            ("/api/v1/live", endpoints.live, "Live numbers (JSON)"),
            ("/api/v1/live/history", endpoints.live_history, "Last ten minutes (JSON)"),
        ]
    described = openapi(routes)

    async def description(_: web.Request) -> web.StreamResponse:
        return _json(described)

    routes.append(("/api/v1/openapi.json", description, "Description of the API (OpenAPI)"))
    links = [(target, text) for target, _, text in routes if text]

    items = "".join(f'<li><a href="{html.escape(to)}">{text}</a></li>' for to, text in links)

    async def landing(_: web.Request) -> web.StreamResponse:
        count = len(endpoints.pages.registry.engines)
        text = (
            "<!doctype html><html lang=en><meta charset=utf-8><title>sidestep</title>"
            "<style>body{font:16px/1.5 sans-serif;margin:2em;max-width:40em}</style>"
            f"<h1>sidestep {__version__}</h1><p>Metrics of LLM inference engines."
            f" {count} engine{'' if count == 1 else 's'}.</p><ul>{items}</ul></html>"
        )
        return web.Response(text=text, content_type="text/html")

    app = web.Application()
    app.add_routes(web.get(to, handler) for to, handler, _ in routes)
    if endpoints.live_view is None:
        app.add_routes([web.get("/", landing)])
    else:
        page = LivePage(links)
        app.add_routes([web.get("/", page.page), web.get("/ui/{name}", page.file)])
    return app


class Endpoints:
    """Handlers of requests, one per endpoint.

    Args:
        view: View of the metrics page if the request names none.
        live: What the live page shows; None: there is no live page.
        settings: Returns lines on settings that do not have their default.
        timelines: Recent steps and requests; None: none are kept.
    """

    def __init__(
        self,
        pages: Pages,
        ready: Callable[[], bool],
        health: HealthMonitor,
        checks: OwnChecks,
        *,
        view: str,
        settings: Callable[[], Iterable[str]],
        live: LiveView | None = None,
        timelines: Timelines | None = None,
    ) -> None:
        self.pages = pages
        self._ready = ready
        self._health = health
        self._checks = checks
        self._view = view
        self._settings = settings
        self.live_view = live
        self.timelines = timelines

    async def metrics(self, request: web.Request, view: str = "") -> web.StreamResponse:
        """Return the metrics page in ``view`` or the one that the request names.

        The format is the one that the request prefers.
        """
        view = view or request.query.get("view", self._view)
        if view not in self.pages.views:
            known = " and ".join(self.pages.views)
            return web.Response(text=f"no such view; known are {known}\n", status=400)
        has_protobuf = self.pages.has_protobuf and view == "engine"
        form = negotiate(request.headers.get("Accept", ""), protobuf=has_protobuf)
        is_prometheus = SCRAPE_TIMEOUT in request.headers
        body = await self.pages.page(view, form, _names(request), by_prometheus=is_prometheus)
        return await _response(body, request, CONTENT_TYPES[form])

    async def engines(self, _: web.Request) -> web.StreamResponse:
        """Return the engines."""
        engines = self.pages.registry.engines.values()
        return _json([_engine(engine, self._health.of(engine)) for engine in engines])

    async def engines_health(self, request: web.Request) -> web.StreamResponse:
        """Return the health of all engines, with status 503 if one of them fails the probe."""
        found = list(self._health)
        # Without engines there is nothing that could serve a request.
        is_ready = _passes(request, [health for _, health in found]) and (
            bool(found) or "ready" not in request.query
        )
        engines = [_health(engine, health) for engine, health in found]
        return _json({"engines": engines}, 200 if is_ready else 503)

    async def engine_health(self, request: web.Request) -> web.StreamResponse:
        """Return the health of one engine, with status 503 if it fails the probe."""
        engine, health = self._find(request)
        return _json(_health(engine, health), 200 if _passes(request, [health]) else 503)

    async def stack(self, request: web.Request) -> web.StreamResponse:
        """Return the stack of the thread that makes no progress, the innermost frame last."""
        engine, health = self._find(request)
        if not health.stack:
            raise web.HTTPNotFound(text=f"no stack: engine {engine.id} is {health.state.value}\n")
        return web.Response(text="".join(f"{frame}\n" for frame in health.stack))

    def _find(self, request: web.Request) -> tuple[Engine, Health]:
        engine = self.pages.registry.engines.get(request.match_info["engine"])
        health = None if engine is None else self._health.of(engine)
        if engine is None or health is None:
            raise web.HTTPNotFound(text="no such engine; /-/engines lists all\n")
        return engine, health

    async def metrics_json(self, request: web.Request) -> web.StreamResponse:
        """Return the metrics page as values."""
        names = _names(request)
        data = await self.pages.written(
            lambda values: json_format.encode(values.engines, values.passthrough, names), names
        )
        return await _response(Body([data]), request)

    async def cardinality(self, _: web.Request) -> web.StreamResponse:
        """Return the number of series by family and label."""
        views = self.pages.views
        report = await self.pages.written(
            lambda values: cardinality_report(values.engines, values.passthrough, views),
            with_gone=True,
        )
        return _json(report)

    async def hit_ratio_curve(self, request: web.Request) -> web.StreamResponse:
        """Return the hit curves of all engines that send lookups, or of the one that is named."""
        engines = self.pages.registry.engines
        name = request.query.get("engine")
        if name is not None and name not in engines:
            raise web.HTTPNotFound(text="no such engine; /api/v1/engines lists all\n")
        curves, names = [], distinct_names(engines.values())
        for engine in [*engines.values()] if name is None else [engines[name]]:
            lookups = engine.part(Trackers).lookups
            if lookups is not None:
                curves.append(engine_curve(engine, names[engine.id], lookups))
                # A curve takes a millisecond.
                await asyncio.sleep(0)
        return _json({"engines": curves})

    async def doctor(self, _: web.Request) -> web.StreamResponse:
        """Return what is wrong with the exporter, its engines and its sources."""
        return _json(own_report(await self._checks.findings()))

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Return the state of all engines now."""
        assert self.live_view is not None
        return await _response(await self.live_view.answer(), request)

    async def live_history(self, request: web.Request) -> web.StreamResponse:
        """Return the last ten minutes of the engine that the request names, or of all as one."""
        assert self.live_view is not None
        body = await self.live_view.history(request.query.get("engine"))
        if body is None:
            raise web.HTTPNotFound(text="no such engine; /api/v1/engines lists all\n")
        return await _response(body, request)

    async def timeline(self, request: web.Request) -> web.StreamResponse:
        """Return recent steps and requests of all engines, or of the one that is named."""
        assert self.timelines is not None
        minutes = request.query.get("minutes", str(MAX_MINUTES))
        if minutes not in map(str, range(1, MAX_MINUTES + 1)):
            raise web.HTTPBadRequest(text=f"minutes must be 1 to {MAX_MINUTES}\n")
        slowest = request.query.get("slowest", "0")
        if slowest not in map(str, range(MAX_SLOWEST + 1)):
            raise web.HTTPBadRequest(text=f"slowest must be 1 to {MAX_SLOWEST}\n")
        engine = request.query.get("engine")
        body = await self.timelines.answer(engine, int(minutes), int(slowest))
        if body is None:
            raise web.HTTPNotFound(text="no such engine; /api/v1/engines lists all\n")
        return await _response(body, request)

    async def debug(self, _: web.Request) -> web.StreamResponse:
        """Return the exporter's own state: settings, tasks, threads and last log lines."""
        return web.Response(text=debug_page(self._settings()))

    async def healthy(self, _: web.Request) -> web.StreamResponse:
        """Return 200: the event loop runs."""
        return web.Response(text="sidestep is healthy\n")

    async def ready(self, _: web.Request) -> web.StreamResponse:
        """Return 200 if engines can connect, else 503."""
        if self._ready():
            return web.Response(text="sidestep is ready\n")
        return web.Response(text="sidestep is not ready\n", status=503)


def _names(request: web.Request) -> frozenset[str]:
    """Return the families that the request selects; empty for all."""
    return frozenset(request.query.getall("name[]", []))


async def _response(
    body: Body, request: web.Request, content_type: str = JSON
) -> web.StreamResponse:
    """Return a response with a shared body, gzipped if the request accepts that."""
    # A cache in between must not return one format to a client that asked for another.
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    accepted = request.headers.get("Accept-Encoding", "").replace(" ", "").split(",")
    if {"gzip", "gzip;q=1", "gzip;q=1.0"}.isdisjoint(accepted):
        return PartsResponse(body.parts, headers)
    return PartsResponse(await body.packed(), {**headers, "Content-Encoding": "gzip"})


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type=JSON, status=status)


def _passes(request: web.Request, found: Iterable[Health]) -> bool:
    """Return whether engines of this health pass the probe: of liveness, or with ``?ready`` of readiness."""
    failing = NOT_READY if "ready" in request.query else ALARMING
    return not any(health.state in failing for health in found)


def _health(engine: Engine, health: Health) -> dict[str, Any]:
    return {
        "id": engine.id,
        "state": health.state.value,
        "reason": _reason(health),
        "seconds": health.age,
        "step_age_seconds": health.step_age,
        "unfinished_requests": health.unfinished,
        "stream": health.stream or None,
    }


def _reason(health: Health | None) -> str | None:
    return None if health is None or health.reason is None else health.reason.value


def _engine(engine: Engine, health: Health | None) -> dict[str, Any]:
    return {
        "id": engine.id,
        "dialect": engine.layout.dialect,
        "labels": engine.labels,
        "up": engine.is_up,
        "state": None if health is None else health.state.value,
        "reason": _reason(health),
        "streams": len(engine.feeds.streams),
        "restarts": engine.restarts,
        "features": sorted(engine.description.features),
        "info": engine.info,
    }
