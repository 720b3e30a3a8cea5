"""How request events are read, as far as that is a choice."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """What an operator can choose.

    Attributes:
        scheduled: Which SCHEDULED before the first output divides queue from prefill.
        latency: ``output``: the gap before an output counts once, however many tokens
            it brings, as in vLLM; ``token``: divided among them, once for each.
        capacity: Requests followed at once, per engine.
        max_age: Seconds after which an unfinished request is followed no more.
    """

    scheduled: Literal["first", "last"] = "first"
    latency: Literal["output", "token"] = "output"
    capacity: int = 100_000
    max_age: float = 86_400.0


UNTRACKED = ("capacity", "age", "restart", "unknown", "folded")
"""Reasons for which a request has no intervals."""
