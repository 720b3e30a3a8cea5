"""Decoding of Triton's statistics, and their translation into wire structs.

Fields may be missing, come in any order, or be of a later release: 24.03 added
``response_stats`` and 23.06 ``memory_usage``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from sidestep.errors import PollError, WireError
from sidestep.protocol.limits import Identifier, Text, is_printable
from sidestep.protocol.messages import DECODE_ERRORS
from sidestep_adapters.triton.wire import (
    MAX_MEMORIES,
    MAX_SIZES,
    Batch,
    InferenceStats,
    Memory,
    ModelStats,
    Responses,
    Timed,
    Whole,
)

FIRST = "0"
"""Index of a request's first response; all later ones are combined."""
T = TypeVar("T")


class Duration(Timed, array_like=False, gc=False, frozen=True):
    """Count and total nanoseconds of one kind of event."""


class Inferences(msgspec.Struct, gc=False, frozen=True):
    """Triton's ``inference_stats``."""

    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


class BatchStatistics(msgspec.Struct, gc=False, frozen=True):
    """One entry of ``batch_stats``."""

    batch_size: Whole = 0
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()


class ResponseStatistics(msgspec.Struct, gc=False, frozen=True):
    """One entry of ``response_stats``."""

    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    success: Duration = Duration()
    fail: Duration = Duration()
    empty_response: Duration = Duration()
    cancel: Duration = Duration()


class MemoryUsage(Memory, array_like=False, gc=False, frozen=True):
    """One entry of ``memory_usage``."""

    type: Text = ""


class ModelVersion(msgspec.Struct, gc=False, frozen=True):
    """A model and its version; servers without versions omit the latter."""

    name: str
    version: str = ""


class ModelStatistics(ModelVersion, gc=False, frozen=True):
    """One entry of ``model_stats``, whose name and version are valid labels."""

    name: Identifier
    version: Text = ""
    last_inference: Whole = 0
    inference_count: Whole = 0
    execution_count: Whole = 0
    inference_stats: Inferences = Inferences()
    response_stats: Mapping[str, ResponseStatistics] = {}
    batch_stats: Annotated[tuple[BatchStatistics, ...], Meta(max_length=MAX_SIZES)] = ()
    memory_usage: Annotated[tuple[MemoryUsage, ...], Meta(max_length=MAX_MEMORIES)] = ()


class _Answer(msgspec.Struct):
    model_stats: list[msgspec.Raw]


_answer = msgspec.json.Decoder(_Answer)
_version = msgspec.json.Decoder(ModelVersion)
_model = msgspec.json.Decoder(ModelStatistics)
_encode = msgspec.msgpack.Encoder().encode


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode an answer of the server."""
    try:
        return decoder.decode(body)
    except DECODE_ERRORS as error:
        raise PollError("bad_answer", str(error)) from None


def split(body: bytes) -> list[bytes]:
    """Return one undecoded JSON object for each version of a model."""
    return [bytes(raw) for raw in decode(_answer, body).model_stats]


def version_of(raw: bytes) -> ModelVersion:
    """Return the model and version of ``raw``."""
    return decode(_version, raw)


def read(raw: bytes, *, has_cache: bool) -> ModelStats:
    """Decode the statistics of one version.

    Args:
        raw: One of those that ``split`` returns.
        has_cache: Whether there are cache counters without any cache hit or miss.

    Raises:
        WireError: A number is negative, no integer or beyond 64 bits, a batch size occurs twice,
            or the name is not printable.
    """
    try:
        found = _model.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError("bad_item", str(error)) from None
    if not is_printable(found.name + found.version):
        raise WireError("bad_label", f"{found.name!r} is not printable")
    if len({batch.batch_size for batch in found.batch_stats}) < len(found.batch_stats):
        raise WireError("bad_item", f"{found.name}: a batch size occurs twice")
    made = ModelStats(
        found.last_inference,
        found.inference_count,
        found.execution_count,
        _inferences(found.inference_stats, has_cache=has_cache),
        tuple(map(_batch, found.batch_stats)),
        _responses(found.response_stats) if found.response_stats else None,
        tuple(Memory(m.type, m.id, m.byte_size) for m in found.memory_usage),
    )
    try:
        _encode(made)
    except OverflowError:
        raise WireError("bad_item", f"{found.name}: a number is beyond 64 bits") from None
    return made


def _inferences(found: Inferences, *, has_cache: bool) -> InferenceStats:
    made = msgspec.convert(found, InferenceStats, from_attributes=True)
    if has_cache or found.cache_hit.count or found.cache_miss.count:
        return made
    return msgspec.structs.replace(made, cache_hit=None, cache_miss=None)


def _batch(found: BatchStatistics) -> Batch:
    # Triton writes the same count into all three.
    return Batch(
        found.batch_size,
        found.compute_infer.count,
        found.compute_input.ns,
        found.compute_infer.ns,
        found.compute_output.ns,
    )


def _responses(found: Mapping[str, ResponseStatistics]) -> Responses:
    """Combine the responses: a request has one index for each response, without a limit."""
    first = found.get(FIRST, ResponseStatistics())
    later = [each for index, each in found.items() if index != FIRST]
    return Responses(
        _sum([first.success]),
        _sum(each.success for each in later),
        _sum(each.fail for each in found.values()),
        _sum(each.empty_response for each in found.values()),
        _sum(each.cancel for each in found.values()),
        _sum([first.compute_infer]),
        _sum([first.compute_output]),
        _sum(each.compute_infer for each in later),
        _sum(each.compute_output for each in later),
    )


def _sum(durations: Iterable[Duration]) -> Timed:
    count = ns = 0
    for each in durations:
        count += each.count
        ns += each.ns
    return Timed(count, ns)
