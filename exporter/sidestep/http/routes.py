"""HTTP routes: metrics pages, health, landing page, JSON."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from sidestep.exposition import json_format
from sidestep.exposition.cardinality import count_series
from sidestep.exposition.compression import pack
from sidestep.exposition.negotiation import CONTENT_TYPES, negotiate
from sidestep.exposition.page_cache import Pages
from sidestep.http.chunked_response import response
from sidestep.http.landing_page import landing_page
from sidestep.metrics.engine import Engine
from sidestep.telemetry.cooperative import collect_in_slices

POD_PATH = "/pod"
"""Suffix of the metrics page's path for the pod view, which aggregates all engines."""
JSON = "application/json"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(
    pages: Pages, path: str, ready: Callable[[], bool], view: str = "engine"
) -> web.Application:
    """Return the application; the metrics page at ``path`` has ``view`` by default."""

    async def metrics(request: web.Request) -> web.StreamResponse:
        chosen_view = request.query.get("view", view)
        if chosen_view not in pages.views:
            known = " and ".join(pages.views)
            return web.Response(text=f"no such view; known are {known}\n", status=400)
        return await _page(pages, chosen_view, request)

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
        parts = await collect_in_slices(
            json_format.pieces(pages.registry, names, pages.passthrough)
        )
        await pages.settled()
        packed = _takes_gzip(request)
        if packed:
            parts = await pack(parts)
        return _make_response(parts, JSON, packed=packed)

    pod_path = path.rstrip("/") + POD_PATH
    app = web.Application()
    app.add_routes(
        [
            web.get("/", landing),
            web.get(path, metrics),
            # Some clients can be configured with a path but not with a query.
            web.get(pod_path, functools.partial(_page, pages, "pod")),
            web.get("/-/healthy", healthy),
            web.get("/-/ready", is_ready),
            web.get("/api/v1/engines", engines),
            web.get("/api/v1/metrics", typed),
            web.get("/api/v1/cardinality", _cardinality(pages)),
        ]
    )
    return app


async def _page(pages: Pages, view: str, request: web.Request) -> web.StreamResponse:
    """Answer with the metrics page of ``view``, in the format that the request prefers."""
    has_protobuf = pages.has_protobuf and view == "engine"
    form = negotiate(request.headers.get("Accept", ""), protobuf=has_protobuf)
    names = frozenset(request.query.getall("name[]", []))
    packed = _takes_gzip(request)
    parts = await pages.page(view, form, names, packed=packed)
    return _make_response(parts, CONTENT_TYPES[form], packed=packed)


def _make_response(parts: Sequence[bytes], kind: str, *, packed: bool) -> web.StreamResponse:
    """Return a response with this body, gzipped if ``packed``."""
    # A cache in between must not return one format to a client that asked for another.
    headers = {"Content-Type": kind, "Vary": "Accept, Accept-Encoding"}
    if packed:
        headers["Content-Encoding"] = "gzip"
    return response(parts, headers)


def _takes_gzip(request: web.Request) -> bool:
    accepted = request.headers.get("Accept-Encoding", "").replace(" ", "").split(",")
    return not {"gzip", "gzip;q=1", "gzip;q=1.0"}.isdisjoint(accepted)


def _cardinality(pages: Pages) -> Handler:
    """Return the handler of the cardinality report."""

    async def cardinality(_: web.Request) -> web.StreamResponse:
        *_rest, report = await collect_in_slices(
            count_series(pages.registry, pages.passthrough, pages.views)
        )
        return _json(report.json())

    return cardinality


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
