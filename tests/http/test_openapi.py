"""The description of the API, compared with the routes, the handlers and the answers."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from typing import Any

from exporters import Start
from pages import get
from sidestep.http import openapi
from sidestep.http.routes import Endpoints


async def described(start: Start) -> dict[str, Any]:
    """Return the description that an exporter serves."""
    async with start() as exporter:
        url = exporter.url.removesuffix("/metrics")
        found: dict[str, Any] = json.loads(await get(f"{url}/api/v1/openapi.json"))
        return found


async def test_every_route_of_the_api_is_described(start: Start) -> None:
    """With a summary and its parameters, but for the description itself."""
    paths = (await described(start))["paths"]

    assert {"/api/v1/engines", "/api/v1/live", "/api/v1/engines/{engine}/stack"} <= {*paths}
    assert set(openapi.QUERIES) | set(openapi.ANSWERS) <= {*paths}
    assert all(each["get"]["summary"].startswith("Return ") for each in paths.values())
    (name,) = paths["/api/v1/metrics"]["get"]["parameters"]
    assert (name["in"], name["schema"]["type"]) == ("query", "array")


async def test_parameters_are_those_that_handlers_read(start: Start) -> None:
    """A handler's query, and that of the function that it calls for names."""
    paths = (await described(start))["paths"]
    for path, operation in paths.items():
        handler = getattr(Endpoints, operation["get"]["operationId"])
        tree = ast.parse(textwrap.dedent(inspect.getsource(handler)))
        read = {
            call.args[0].value
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and ast.unparse(call.func) == "request.query.get"
            and isinstance(call.args[0], ast.Constant)
        }
        if "_names(request)" in ast.unparse(tree):
            read.add("name[]")
        declared = {one["name"] for one in operation["get"]["parameters"] if one["in"] == "query"}

        assert declared == read, path
