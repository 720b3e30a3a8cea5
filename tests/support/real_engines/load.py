"""Completions that bring an engine into all states that its metrics show."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import string
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Self

import aiohttp

from real_engines.tiny_model import EOS

MAIN_FLAGS = [
    "--num-gpu-blocks-override",
    "80",
    "--kv-cache-metrics",
    "--kv-cache-metrics-sample",
    "1.0",
    "--enable-logging-iteration-details",
    "--enable-mfu-metrics",
    "--max-num-seqs",
    "32",
    "--max-num-batched-tokens",
    "512",
    "--enable-prompt-tokens-details",
]
"""80 blocks of 32 tokens: few enough that ``mixed`` preempts requests and evicts blocks."""
MAIN_ENVIRON = {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}


@dataclasses.dataclass(frozen=True)
class Ask:
    """A completion request; its client leaves the stream after ``leave`` chunks unless that is 0."""

    prompt: str | list[str]
    tokens: int
    leave: int = 0
    model: str = "tiny"
    stream: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=lambda: {"ignore_eos": True})
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Answer:
    """A completion as its client saw it; times are monotonic seconds."""

    status: int = 0
    error: str = ""
    id: str = ""
    chunks: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    left: bool = False
    asked_at: float = 0.0
    ended_at: float = 0.0
    longest_gap: float = 0.0

    @property
    def refused(self) -> bool:
        """True if the request was refused, by its status or within the stream."""
        return self.status != 200 or bool(self.error)

    @property
    def seconds(self) -> float:
        """Duration of the completion."""
        return self.ended_at - self.asked_at


class Client:
    """A client of one server; ``seed`` makes its prompts reproducible."""

    def __init__(self, base: str, seed: int = 7) -> None:
        self.base = base
        self._random = random.Random(seed)
        timeout = aiohttp.ClientTimeout(total=300)
        # One connection per request: the server may close an idle one just as it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def text(self, tokens: int) -> str:
        """Return a random prompt; each character is a token."""
        return "".join(self._random.choices(string.ascii_lowercase + " ", k=tokens))

    async def ask(self, ask: Ask) -> Answer:
        """Request one completion."""
        body = {
            "model": ask.model,
            "prompt": ask.prompt,
            "max_tokens": ask.tokens,
            "temperature": 1.0,
            "stream": ask.stream,
            **({"stream_options": {"include_usage": True}} if ask.stream else {}),
            **ask.options,
        }
        answer = Answer(asked_at=time.monotonic())
        chunks, last = 0, answer.asked_at
        async with self._session.post(
            f"{self.base}/v1/completions", json=body, headers=ask.headers
        ) as response:
            answer.status = response.status
            if not ask.stream:
                self._read(await response.json(), answer)
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.monotonic()
                answer.longest_gap = max(answer.longest_gap, now - last)
                chunks, last = chunks + 1, now
                answer.chunks = chunks
                self._read(json.loads(line.removeprefix(b"data: ")), answer)
                if ask.leave and chunks >= ask.leave:
                    answer.left = True
                    break
        answer.ended_at = time.monotonic()
        return answer

    async def ask_all(self, asks: Iterable[Ask]) -> list[Answer]:
        """Request completions concurrently."""
        return list(await asyncio.gather(*map(self.ask, asks)))

    async def mixed(
        self, *, leave: bool = True, stop_strings: bool = True, streams: int = 1
    ) -> list[Answer]:
        """Request 71 completions that move every metric, and one that is refused as too long.

        Whether a request counts as finished when its client disconnects is a race;
        without ``leave`` the engine's totals equal the clients'. A request that ends by a
        stop string continues in the engine's core until the front end aborts it.
        One of ``streams`` completions is streamed, and those that a client leaves.
        """
        asks = self.mixed_asks(leave=leave, stop_strings=stop_strings, streams=streams)
        return [answer for group in asks for answer in await self.ask_all(group)]

    def mixed_asks(
        self, *, leave: bool = True, stop_strings: bool = True, streams: int = 1
    ) -> list[list[Ask]]:
        """Return the requests of ``mixed``: those of a group are asked concurrently."""
        text, plain = self.text, {"ignore_eos": True}
        shared = text(200)
        letters = list("aeio")
        groups = [
            [Ask(text(60), 24) for _ in range(6)],
            [Ask(shared + text(10), 16)],
            [Ask(shared + text(10), 16) for _ in range(8)],
            [Ask(text(30), 200, options={"logit_bias": {str(EOS): 3.5}}) for _ in range(8)],
            [
                Ask(text(30), 800, options={"stop": letters, **plain})
                for _ in range(4 if stop_strings else 0)
            ],
            [Ask(text(60), 1500, leave=1) for _ in range(5 if leave else 0)],
            [Ask(text(40), 12, options={"n": 2, **plain}) for _ in range(2)],
            [Ask(text(60), 350) for _ in range(16)],
            [Ask(text(400), 8) for _ in range(12)],
            [Ask(shared + text(10), 16) for _ in range(3)],
            [Ask(text(1500), 4) for _ in range(2)],
            [Ask(text(3000), 4)],
            [Ask(text(100), 1) for _ in range(4)],
        ]
        turns = itertools.count()
        return [
            [
                dataclasses.replace(ask, stream=not next(turns) % streams or ask.leave > 0)
                for ask in group
            ]
            for group in groups
        ]

    @staticmethod
    def _read(event: dict[str, Any], answer: Answer) -> None:
        answer.error = str(event.get("error") or answer.error)
        answer.id = str(event.get("id") or answer.id)
        for choice in event.get("choices", ()):
            if choice.get("finish_reason"):
                answer.reasons.append(choice["finish_reason"])
        usage = event.get("usage")
        if usage:
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.tokens = usage["completion_tokens"]


def reasons(answers: Iterable[Answer]) -> Counter[str]:
    """Count completions by finish reason, parallel samples one by one."""
    return Counter(reason for answer in answers for reason in answer.reasons)


def generated(answers: Iterable[Answer]) -> int:
    """Return the generated tokens that the server reported to its clients."""
    return sum(answer.tokens for answer in answers)
