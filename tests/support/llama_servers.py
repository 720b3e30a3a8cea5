"""A llama-server without a model: its answers are those of recordings, or set by a test."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import polled
from exporters import DATA
from polled import Polled

JSON = "application/json; charset=utf-8"
PROCESS = "Process-Start-Time-Unix"
DOCUMENT = Path(__file__).parents[2] / "docs" / "llamacpp.md"
STATUS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found"}


def recording(name: str) -> dict[str, Any]:
    """Read a recording of ``tests/data/llamacpp``."""
    body = gzip.decompress((DATA / "llamacpp" / f"{name}.json.gz").read_bytes())
    found: dict[str, Any] = json.loads(body)
    return found


def pages(name: str, path: str = "/metrics", status: int = 200) -> list[dict[str, Any]]:
    """Return the recorded answers to ``path`` with this status."""
    found = recording(name)["pages"]
    return [each for each in found if (each["path"], each["status"]) == (path, status)]


def response(body: str | bytes, status: int = 200, kind: str = JSON, process: str = "") -> bytes:
    """Return a whole response."""
    raw = body.encode() if isinstance(body, str) else body
    more = f"{PROCESS}: {process}\r\n" if process else ""
    head = polled.head(len(raw), f"{status} {STATUS.get(status, 'Error')}", kind, more)
    return head + raw


def recorded(page: dict[str, Any]) -> bytes:
    """Return the response of a recorded answer."""
    return response(page["body"], page["status"], page["type"], page["start"])


def failure(status: int, text: str) -> bytes:
    """Return a response with llama-server's error body."""
    return response(json.dumps({"error": {"code": status, "message": text}}), status)


def props(**fields: Any) -> bytes:
    """Return ``/props`` of a server with four slots of 2048 tokens."""
    found = {
        "total_slots": 4,
        "model_alias": "tiny",
        "model_path": "/models/tiny.gguf",
        "is_sleeping": False,
        "default_generation_settings": {"n_ctx": 2048, "params": {"seed": 1}},
        **fields,
    }
    return response(json.dumps(found))


def page(process: int = 1, **values: float) -> bytes:
    """Return a page with these families."""
    lines = [f"llamacpp:{name} {value:g}\n" for name, value in values.items()]
    return response("".join(lines), kind="text/plain; version=0.0.4", process=str(process))


class LlamaServer:
    """A server whose answers a test sets."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {"/props": props()}
        self.http = Polled(self._says)

    async def _says(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = self.http.heads[-1].split(" ")[1]
        writer.write(self.answers.get(path, failure(404, "File Not Found")))

    @property
    def url(self) -> str:
        """URL of the server."""
        return self.http.url

    @property
    def asked(self) -> list[str]:
        """Paths of all requests so far."""
        return [head.split(" ")[1] for head in self.http.heads]

    def forget(self) -> None:
        """Forget the requests so far."""
        self.http.heads.clear()


@asynccontextmanager
async def llama_server(**answers: bytes) -> AsyncIterator[LlamaServer]:
    """Run a server; ``answers`` are by path, without its slash."""
    server = LlamaServer()
    server.answers |= {f"/{path}": answer for path, answer in answers.items()}
    await server.http.start()
    try:
        yield server
    finally:
        await server.http.stop()


def left_out() -> set[str]:
    """Return the families of the page that the document lists as not exposed."""
    section = DOCUMENT.read_text().partition("Not exposed, and why:\n\n")[2].partition("\n\n")[0]
    return {
        name
        for line in section.splitlines()
        for name in re.findall(r"`(llamacpp:\w+)`", line.removeprefix("| ").partition(" | ")[0])
    }
