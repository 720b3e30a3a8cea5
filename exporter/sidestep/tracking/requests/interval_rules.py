"""Settings for the interpretation of request events."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Rules:
    """Settings that an operator can choose.

    Attributes:
        scheduled: The SCHEDULED event before the first output that separates queue from prefill.
        latency: ``output``: the gap before an output counts once, however many tokens the output
            has, as in vLLM; ``token``: the gap is divided by the tokens and counts once for each.
        capacity: Requests tracked at once, per engine.
        max_age: Seconds after which an unfinished request is no longer tracked.
    """

    scheduled: Literal["first", "last"] = "first"
    latency: Literal["output", "token"] = "output"
    capacity: int = 100_000
    max_age: float = 86_400.0


UNTRACKED = ("capacity", "age", "restart", "unknown", "folded", "samples")
"""Reasons why not all intervals of a request are known, or how many parallel samples it had."""
