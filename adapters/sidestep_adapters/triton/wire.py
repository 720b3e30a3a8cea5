"""Wire structs of Triton's statistics extension: one version of a model since it was loaded.

Names are the extension's, and times are in nanoseconds. The numbers are cumulative, so an exporter
that missed some items continues with the next one; see ``differences.py``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.catalog.dialect import Polled
from sidestep.protocol.limits import Count, Seconds, Text

Whole = Annotated[int, Meta(ge=0)]
"""A count of up to 64 bits, as in Triton."""
MAX_SIZES = 4096
"""Maximum batch sizes of one version."""
MAX_MEMORIES = 256


class Timed(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A count of events and their total nanoseconds."""

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
    def stage_ns(self) -> tuple[int, int, int]:
        """Nanoseconds of the executions by stage: input, inference and output."""
        return self.compute_input_ns, self.compute_infer_ns, self.compute_output_ns

    @property
    def ns(self) -> int:
        """Nanoseconds of the executions."""
        return sum(self.stage_ns)


class Memory(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Bytes that the backend reported to use when it loaded the model."""

    type: Text
    id: Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] = 0
    byte_size: Whole = 0


class Responses(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """``response_stats``, with the first response of a request separate from the others.

    Attributes:
        first: Good first responses, timed from the start of their request's computation.
        next: Good later responses, timed from the previous response.
        fail: Error responses.
        empty_response: Empty responses, which only end the request.
        cancel: Responses whose request was cancelled.
        first_compute_infer: Computations of first responses, whatever their outcome, as in the
            fields below.
        first_compute_output: Extractions of their outputs.
        next_compute_infer: Computations of later responses.
        next_compute_output: Extractions of their outputs.
    """

    first: Timed = Timed()
    next: Timed = Timed()
    fail: Timed = Timed()
    empty_response: Timed = Timed()
    cancel: Timed = Timed()
    first_compute_infer: Timed = Timed()
    first_compute_output: Timed = Timed()
    next_compute_infer: Timed = Timed()
    next_compute_output: Timed = Timed()


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
        last_inference: Milliseconds since the epoch; 0: no inference since the model was loaded.
        response_stats: None where the backend does not report single responses.
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
    """The result of one poll for a version of a model.

    Attributes:
        stats: The statistics; None: the version is no longer ready.
        instances: Number of executions that can run at once; 0 where it is unknown.
    """

    engine: Count
    stamp: Seconds
    wall: Seconds
    stats: ModelStats | None = None
    instances: Count = 0

    @property
    def absent(self) -> bool:
        """True if the server no longer has this version of the model."""
        return self.stats is None
