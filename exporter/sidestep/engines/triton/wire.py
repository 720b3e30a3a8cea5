"""What Triton's statistics extension says of one version of a model, since it was loaded.

Names are the extension's, times its nanoseconds. The numbers are not deltas: an exporter that
was away goes on with the next one. See ``sidestep.engines.triton.statistics``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.catalog.dialect import Polled
from sidestep.protocol.limits import Count, Seconds, Text

Whole = Annotated[int, Meta(ge=0)]
"""Up to 64 bits, as Triton counts."""
MAX_SIZES = 4096
"""Batch sizes of one version."""
MAX_MEMORIES = 256


class Timed(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """How often, and the nanoseconds that it took in all."""

    count: Whole = 0
    ns: Whole = 0


class Batch(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Executions of one batch size, and their nanoseconds."""

    batch_size: Whole
    count: Whole = 0
    compute_input_ns: Whole = 0
    compute_infer_ns: Whole = 0
    compute_output_ns: Whole = 0

    @property
    def ns(self) -> int:
        """Of a whole execution."""
        return self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns


class Memory(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Bytes that the backend said it took, when the model was loaded."""

    type: Text
    id: Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] = 0
    byte_size: Whole = 0


class Responses(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """``response_stats``, the first response of a request apart from all others.

    Attributes:
        first: Good first responses, from the begin of their request's computation.
        next: Good later responses, from the response before.
        fail: Error responses.
        empty_response: Such that only end the request.
        cancel: Such whose request was cancelled.
    """

    first: Timed = Timed()
    next: Timed = Timed()
    fail: Timed = Timed()
    empty_response: Timed = Timed()
    cancel: Timed = Timed()


class InferenceStats(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """``inference_stats``: requests and where their time went.

    Attributes:
        cache_hit: None where the model has no response cache.
    """

    success: Timed = Timed()
    fail: Timed = Timed()
    queue: Timed = Timed()
    compute_input: Timed = Timed()
    compute_infer: Timed = Timed()
    compute_output: Timed = Timed()
    cache_hit: Timed | None = None
    cache_miss: Timed | None = None


class ModelStats(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The statistics of one version of a model.

    Attributes:
        last_inference: Milliseconds since the epoch; 0: none since it was loaded.
        responses: None where the backend does not tell of single responses.
    """

    last_inference: Whole = 0
    inference_count: Whole = 0
    execution_count: Whole = 0
    inference_stats: InferenceStats = InferenceStats()
    batch_stats: Annotated[tuple[Batch, ...], Meta(max_length=MAX_SIZES)] = ()
    response_stats: Responses | None = None
    memory_usage: Annotated[tuple[Memory, ...], Meta(max_length=MAX_MEMORIES)] = ()

    @property
    def busy_ns(self) -> int:
        """Nanoseconds of all executions."""
        return sum(batch.ns for batch in self.batch_stats)


class TritonStats(Polled, array_like=True, gc=False, tag="ts"):
    """One look at a version of a model.

    Attributes:
        wall: Unix time of it.
        stats: None: the server does not have it ready any more.
        instances: How many executions can run at once; 0 where that is not known.
    """

    engine: Count
    stamp: Seconds
    wall: Seconds
    stats: ModelStats | None = None
    instances: Count = 0

    @property
    def absent(self) -> bool:
        """Whether the server does not have this version of the model any more."""
        return self.stats is None
