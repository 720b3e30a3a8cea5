"""The recent steps and ended requests of an engine, within a fixed amount of memory."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sidestep.metrics.engine_state import Part
from sidestep.protocol.request_events import LIMITS
from sidestep.tracking.requests.outcomes import EndedRequest, IterationShape

SECONDS = 600.0
"""Seconds for which a step or a request is kept."""
MAX_STEPS = 1 << 19
"""Most steps of all engines together. A step has 29 bytes, so that all have 15 MiB."""
MAX_REQUESTS = 1 << 14
"""Most requests of all engines together. One has about 1.5 KiB, so that all have 24 MiB."""
LIMITS_INTERVAL = 10.0
"""Seconds between two times of limits."""
UNKNOWN_LIMIT = -1
_MOST = (1 << 32) - 1
"""Largest number of tokens in a column."""


class StepColumns(NamedTuple):
    """Steps in the order of their arrival, a column for each number.

    Attributes:
        received: Monotonic time at which the exporter received it, in whole seconds.
        end: Unix time of its output, by the engine's clock.
        limit: Index into ``LIMITS``, or ``UNKNOWN_LIMIT``.
    """

    received: array[int]
    end: array[float]
    seconds: array[float]
    prefill_requests: array[int]
    prefill_tokens: array[int]
    decode_requests: array[int]
    decode_tokens: array[int]
    limit: array[int]


class KeptRequest(NamedTuple):
    """A request that ended.

    Attributes:
        received: Monotonic time at which the exporter learned of its end.
    """

    received: float
    ended: EndedRequest


class LimitTimes(NamedTuple):
    """Seconds for which each limit had held until the monotonic time ``received``."""

    received: float
    seconds: Mapping[str, float]


class Timeline(Part):
    """The steps and requests of one engine of the last ``SECONDS``, fewer if there are too many.

    Attributes:
        limits: Times of limits at some moments, of an engine that counts them without steps.
    """

    def __init__(self) -> None:
        self.limits: deque[LimitTimes] = deque()
        self.steps = StepColumns._make(array(code) for code in "IdfHIHIb")
        self.requests: deque[KeptRequest] = deque()

    def add_steps(self, steps: Iterable[IterationShape], now: float) -> None:
        """Add steps that the exporter received at the monotonic time ``now``."""
        received, end, seconds, *counts, limits = self.steps
        prefills, prefill_tokens, decodes, decode_tokens = counts
        at = int(now)
        for step in steps:
            received.append(at)
            end.append(step.wall)
            seconds.append(math.nan if step.duration is None else step.duration)
            prefills.append(step.prefill_requests)
            prefill_tokens.append(min(step.prefill_tokens, _MOST))
            decodes.append(step.decode_requests)
            decode_tokens.append(min(step.decode_tokens, _MOST))
            limit = UNKNOWN_LIMIT if step.limit is None else step.limit
            limits.append(limit if limit < len(LIMITS) else UNKNOWN_LIMIT)
        if len(end) > MAX_STEPS:
            # Room for many, since all columns move.
            self._drop_steps(len(end) - MAX_STEPS * 7 // 8)

    def add_request(self, ended: EndedRequest, now: float) -> None:
        """Add a request that ended, of which the exporter learned at the monotonic time ``now``."""
        self.requests.append(KeptRequest(now, ended))
        if len(self.requests) > MAX_REQUESTS:
            self.requests.popleft()

    def add_limits(self, seconds: Mapping[str, float], now: float) -> None:
        """Add the times of limits, unless steps have the limits or the last times are recent."""
        if not self.steps.end and (
            not self.limits or now >= self.limits[-1].received + LIMITS_INTERVAL
        ):
            self.limits.append(LimitTimes(now, seconds))

    def trim(self, since: float, share: int) -> None:
        """Remove what was received before ``since``, and what exceeds the share of one of ``share`` engines."""
        received, requests = self.steps.received, self.requests
        old = max(len(received) - MAX_STEPS // share, 0)
        while old < len(received) and received[old] < since:
            old += 1
        self._drop_steps(old)
        while requests and (requests[0].received < since or len(requests) > MAX_REQUESTS // share):
            requests.popleft()
        while self.limits and self.limits[0].received < since:
            self.limits.popleft()

    def _drop_steps(self, count: int) -> None:
        if count:
            for column in self.steps:
                del column[:count]
