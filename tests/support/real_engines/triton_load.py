"""Requests that bring Triton's metrics into all states."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp

from real_engines.triton_server import Place

CALLS = Path(__file__).with_name("triton_calls.py")
UNBATCHED = ("raising", "refusing", "slow", "late")
"""Models whose tensors have no dimension for the batch."""
NEWEST = {"cached": "3"}
"""Version that answers requests without a version, if it is not 1."""
STREAMS = (3, 1, 0, 5, -1)
"""Responses that ``mixed`` requests of the decoupled model; a negative number is an error."""


@dataclasses.dataclass(frozen=True)
class Ask:
    """An inference request; each of ``values`` is the first number of a row of its batch."""

    model: str
    values: Sequence[float] = (1.0,)
    version: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a request; ``status`` is 0 if there was none."""

    ask: Ask
    status: int
    error: str

    @property
    def of(self) -> tuple[str, str]:
        """Model and version that answered."""
        return self.ask.model, self.ask.version or NEWEST.get(self.ask.model, "1")


class Client:
    """A client of the server at ``place``, across its restarts."""

    def __init__(self, place: Place) -> None:
        self.place = place
        # One connection per request: an idle one would delay Triton's shutdown.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=60)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, ask: Ask) -> Answer:
        """Send one request."""
        rows = [[value, 0.0] for value in ask.values]
        batched = ask.model not in UNBATCHED
        tensor = {
            "name": "FROM" if ask.model == "chain" else "IN",
            "shape": [len(rows), 2] if batched else [2],
            "datatype": "FP32",
            "data": rows if batched else rows[0],
        }
        version = f"/versions/{ask.version}" if ask.version else ""
        url = f"/v2/models/{ask.model}{version}/infer"
        try:
            status, answer = await self._post(url, {"inputs": [tensor]})
        except aiohttp.ClientConnectionError as error:
            return Answer(ask, 0, str(error) or type(error).__name__)
        return Answer(ask, status, answer.get("error", ""))

    async def ask_all(self, asks: Iterable[Ask]) -> list[Answer]:
        """Send requests concurrently."""
        return list(await asyncio.gather(*map(self.ask, asks)))

    async def ask_in_turn(self, asks: Iterable[Ask]) -> list[Answer]:
        """Send requests one after the other."""
        return [await self.ask(ask) for ask in asks]

    async def load(self, model: str) -> None:
        """Load or reload a model; a thread of Triton's HTTP port is blocked until then."""
        await self._repository(model, "load")

    async def unload(self, model: str) -> None:
        """Unload a model, and wait until it is gone."""
        await self._repository(model, "unload")

    async def states(self) -> dict[str, str]:
        """Return the state of each model whose versions have one, as the repository API reports it."""
        _, found = await self._post("/v2/repository/index", {})
        return {model["name"]: model["state"] for model in found if "state" in model}

    async def call(self, *calls: Sequence[Any]) -> list[Any]:
        """Return the outcomes of calls over gRPC: see ``triton_calls``."""
        command = [str(self.place.python), str(CALLS), f"127.0.0.1:{self.place.grpc}"]
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        out, err = await child.communicate(json.dumps(calls).encode())
        assert child.returncode == 0, err.decode()
        outcomes: list[Any] = json.loads(out)
        return outcomes

    async def mixed(self) -> list[Answer]:
        """Send requests to every model except the slow ones; results differ between runs."""
        answers = await asyncio.gather(
            self.ask_in_turn(Ask("batched", [1.0] * size) for size in (1, 3, 8)),
            self.ask_all(Ask("batched", [2.0] * (1 + turn % 3)) for turn in range(30)),
            # In turn: concurrent requests would all miss the cache.
            self.ask_in_turn(Ask("cached", [4.0], "1") for _ in range(5)),
            self.ask_in_turn(Ask("cached", [turn % 4, 1.0]) for turn in range(7)),
            self.ask_in_turn(Ask("refusing", [value]) for value in (1, -1, 2, -2, 3)),
            self.ask_in_turn(Ask("raising", [value]) for value in (1, -1, -2, 2)),
            self.ask_all(Ask("queued", [1.0] * (1 + turn % 2)) for turn in range(16)),
            self.ask_in_turn(Ask("chain") for _ in range(4)),
            self.ask_all(Ask("chain") for _ in range(8)),
            self.ask_in_turn(
                [Ask("nobody"), Ask("batched", [1.0] * 9), Ask("cached", version="2")]
            ),
            self._streams(),
        )
        # Under load, all requests of these models may have been rejected.
        alone = await self.ask_in_turn(Ask(model) for model in ("queued", "chain", "chain"))
        return [*(answer for some in answers for answer in some), *alone]

    async def _streams(self) -> list[Answer]:
        (streamed,) = await self.call(["stream", "streaming", STREAMS])
        assert streamed["responses"] == [max(count, 0) for count in STREAMS], streamed
        assert len(streamed["errors"]) == sum(count < 0 for count in STREAMS), streamed
        return [
            Answer(Ask("streaming", [count]), 200 if count >= 0 else 500, "") for count in STREAMS
        ]

    async def _repository(self, model: str, verb: str) -> None:
        status, answer = await self._post(f"/v2/repository/models/{model}/{verb}", {})
        assert status == 200, answer

    async def _post(self, path: str, body: object) -> tuple[int, Any]:
        async with self._session.post(self.place.base + path, json=body) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else {}


def succeeded(answers: Iterable[Answer]) -> Counter[tuple[str, str]]:
    """Count the answered requests of each model version, as their clients saw them."""
    return Counter(answer.of for answer in answers if answer.status == 200)
