"""llama-server's API: the metrics page of each model in memory, and the paths beside it.

No request loads a model, or wakes one that sleeps. ``/slots`` would wake it and keep it awake, so it
is requested only right after a page that shows requests in slots.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import quote, urlsplit

from sidestep.config import parsing, scrape_targets
from sidestep.config.engine_targets import EngineTarget
from sidestep.errors import PollError
from sidestep.ingest.local_stream import identity
from sidestep.protocol.limits import printable
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.progress import STARTING
from sidestep.protocol.self_described import Family
from sidestep_adapters.llamacpp.answers import JSON, ROUTER, Models, Props, Slot, Slots, decode
from sidestep_adapters.llamacpp.model import DIALECT, ModelState
from sidestep_adapters.llamacpp.rows import ROWS
from sidestep_adapters.polling.api import Kind, Poll, Update
from sidestep_adapters.polling.http_client import Client
from sidestep_adapters.polling.page_reader import PageReader

TEXT = "text/plain"
PROCESS_HEADER = "Process-Start-Time-Unix"
"""Header of the page that identifies the process; despite its name, it is no Unix time."""
PROPS_SECONDS = 5.0
"""Seconds after which ``/props`` is read again, to learn whether the model sleeps."""
SLOTS_WITHIN = 0.5
"""Seconds after the request for a page within which ``/slots`` may be requested: a model does not fall
asleep before it has been idle for a second."""
MAX_SHORT_BYTES = 4 << 20
CAUSES = (
    ("http_501", "", "no_metrics"),
    ("http_503", "", "starting"),
    ("http_404", "", "wrong_path"),
)
"""Meanings, with llama-server, of causes of the HTTP client."""
ADVICE: Mapping[str, str] = {
    "no_metrics": "start llama-server with --metrics",
    "starting": "the server loads its model",
    "wrong_path": "check the URL; with --api-prefix it ends with the prefix",
    "bad_answer": "check that the URL is that of a llama-server",
    "http_400": "the server does not have the model",
}
IN_MEMORY = frozenset({"loaded", "sleeping"})
LOADING = "loading"
_NUMBER = re.compile(r"[0-9]{1,18}")
T = TypeVar("T")


class LlamaApi:
    """Implements ``polling.api.EngineApi``."""

    def __init__(self, server: EngineTarget, clock: Callable[[], float] = time.monotonic) -> None:
        given = server.known("model", "engine", "slots")
        self._client = Client(server.target, CAUSES)
        self._url = server.target.url
        self._name = server.target.name
        self._model = given.get("model", "")
        self._asks_slots = scrape_targets.parsed(
            "slots", given, default=True, parse=parsing.boolean
        )
        place = urlsplit(self._url)
        self._labels = {"engine": given.get("engine") or place.netloc + place.path}
        self._labels |= dict(server.target.labels)
        self._clock = clock
        self._reader = PageReader(ROWS)
        self._is_router: bool | None = None
        self._single: ModelState | None = None
        self._models: dict[str, ModelState] = {}
        self._props_at = -PROPS_SECONDS

    def check(self) -> EngineInfo:
        """See ``EngineApi``."""
        self._client.check()
        return self._new_model(self._model or "m").info

    async def close(self) -> None:
        """See ``EngineApi``."""
        await self._client.close()

    async def poll(self) -> Poll:
        """See ``EngineApi``."""
        try:
            if self._is_router is None:
                self._is_router = (await self._props("")).role == ROUTER
            if self._is_router:
                return await self._poll_router()
            return Poll([await self._poll_single()])
        except PollError as error:
            if error.cause == "unreachable":
                # Another server may start at this address.
                self._is_router = None
            elif error.cause == "starting" and self._single is not None:
                return Poll([self._single.starting(STARTING)], error.without_frames())
            raise

    async def _poll_single(self) -> Update:
        now = self._clock()
        model = self._single
        is_due = now - self._props_at >= PROPS_SECONDS
        if model is None or is_due or model.props.is_sleeping:
            props = await self._props("")
            self._props_at = now
            if model is None:
                model = self._single = self._new_model(self._model or props.name)
            model.props = props
        await self._read_model(model, "")
        if self._model or model.props.name == model.info.labels["model_name"]:
            return model.update(now)
        # The server has restarted with another model: its counts belong to no other name.
        self._single = None
        return await self._poll_single()

    async def _poll_router(self) -> Poll:
        now = self._clock()
        found = (await self._json("/models", Models)).data
        states = {one.id: one.status.value for one in found if self._model in ("", one.id)}
        updates: list[Update] = []
        failure: PollError | None = None
        for name in [name for name in self._models if states.get(name) not in IN_MEMORY]:
            if states.get(name) == LOADING:
                updates.append(self._models[name].starting(STARTING))
            else:
                updates.append(self._models.pop(name).gone(now))
        for name in [name for name, state in states.items() if state in IN_MEMORY]:
            query = f"?model={quote(name, safe='')}&autoload=false"
            try:
                model = self._models.get(name)
                if model is None:
                    model = self._new_model(name, name)
                    model.props = await self._props(query)
                model.props.is_sleeping = states[name] == "sleeping"
                await self._read_model(model, query)
            except PollError as error:
                failure = error.without_frames()
                continue
            self._models[name] = model
            updates.append(model.update(now))
        return Poll(updates, failure)

    async def _read_model(self, model: ModelState, query: str) -> None:
        """Read the model's page, unless it sleeps: then its counters stand still."""
        if model.props.is_sleeping and model.process:
            model.set_used(0)
            return
        if model.props.is_sleeping:
            # Before #27376 of llama.cpp a request for the page would wake it.
            return
        asked = self._clock()
        process, families = await self._page(query)
        if model.process and process != model.process:
            model.props = await self._props(query)
        model.set_page(process, families, asked)
        if self._asks_slots and model.running and self._clock() - asked < SLOTS_WITHIN:
            try:
                slots: list[Slot] = await self._json(f"/slots{query}", Slots)
            except PollError:
                # Without this path (--no-slots) the tokens of requests are not known.
                self._asks_slots = False
            else:
                model.set_used(sum(s.n_prompt_tokens for s in slots if s.is_processing))

    async def _page(self, query: str) -> tuple[int, list[Family]]:
        response = await self._client.request(f"{self._url}/metrics{query}", TEXT, (TEXT, JSON))
        body = b"".join(response.text())
        if body.startswith(b'"'):
            # Builds of November 2025 sent the page as one string in JSON.
            body = decode(body, str).encode()
        families = await self._reader.read(body)
        if not families:
            raise PollError("bad_answer", "no family of llama.cpp is on the page")
        start = response.headers.get(PROCESS_HEADER, "")
        return int(start) if _NUMBER.fullmatch(start) else 0, families

    async def _props(self, query: str) -> Props:
        return await self._json(f"/props{query}", Props)

    async def _json(self, path: str, kind: type[T]) -> T:
        url = f"{self._url}{path}"
        response = await self._client.request(url, JSON, (JSON,), MAX_SHORT_BYTES)
        return decode(b"".join(response.chunks), kind)

    def _new_model(self, name: str, *parts: str) -> ModelState:
        return ModelState(
            identity(DIALECT, self._name, *parts), {**self._labels, "model_name": printable(name)}
        )


KIND = Kind(LlamaApi, ADVICE)
