"""The JSON API in the form of OpenAPI, from its routes and the types of their answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from sidestep import __version__
from sidestep.diagnosis.finding import OwnReport
from sidestep.exposition.hit_ratio_curve import EngineCurve
from sidestep.exposition.live.answers import HistoryAnswer, Live

API = "/api/v1/"
TEXT = "/api/v1/engines/{engine:.+}/stack"
"""The only path whose answer is no JSON."""
ENGINE = {"engine": "Identity of one engine; without it, all."}
QUERIES = {
    "/api/v1/metrics": {"name[]": "Family; repeatable. Without it, all."},
    "/api/v1/kv/curve": ENGINE,
    "/api/v1/live/history": ENGINE,
    "/api/v1/timeline": {
        **ENGINE,
        "minutes": "Number of minutes before now, 1 to 10.",
        "slowest": "Number of requests of each engine, the slowest first, without steps.",
    },
}
"""Parameters of queries by path, with their descriptions."""
ANSWERS: dict[str, Any] = {
    "/api/v1/doctor": OwnReport,
    "/api/v1/kv/curve": dict[str, list[EngineCurve]],
    "/api/v1/live": Live,
    "/api/v1/live/history": HistoryAnswer,
}
"""Types of answers by path; the others are objects and lists without a type of their own."""


def openapi(routes: Iterable[tuple[str, Callable[..., Any], str]]) -> dict[str, Any]:
    """Return the description of those routes that are of the API."""
    schemas, components = msgspec.json.schema_components(
        ANSWERS.values(), ref_template="#/components/schemas/{name}"
    )
    answers = dict(zip(ANSWERS, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "sidestep", "version": __version__},
        "paths": {
            path.replace(":.+}", "}"): {"get": _operation(path, handler, answers.get(path, {}))}
            for path, handler, _ in routes
            if path.startswith(API)
        },
        "components": {"schemas": components},
    }


def _operation(path: str, handler: Callable[..., Any], answer: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)", path)
    ]
    for name, text in QUERIES.get(path, {}).items():
        schema: dict[str, Any] = {"type": "string"}
        if name.endswith("[]"):
            schema = {"type": "array", "items": schema}
        parameters.append({"name": name, "in": "query", "description": text, "schema": schema})
    content = {"text/plain" if path == TEXT else "application/json": {"schema": answer}}
    return {
        "operationId": handler.__name__,
        "summary": (handler.__doc__ or "").partition("\n")[0],
        "parameters": parameters,
        "responses": {"200": {"description": "Success", "content": content}},
    }
