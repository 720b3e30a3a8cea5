"""Settings of request tracking."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSettings:
    """Settings that an operator can choose.

    Attributes:
        scheduled: The SCHEDULED event, of several before the first output, that ends the queue time.
        latency: With ``output``, the gap before an output is one latency, as in vLLM. With ``token``,
            the gap is divided by the output's tokens, and each of them is a latency.
        capacity: Requests tracked at once, per engine.
        max_age: Seconds after which an unfinished request is no longer tracked.
    """

    scheduled: Literal["first", "last"] = "first"
    latency: Literal["output", "token"] = "output"
    capacity: int = 100_000
    max_age: float = 86_400.0
