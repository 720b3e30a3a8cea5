"""Decoding of Triton's statistics over HTTP, and translation into wire structs.

Fields may be missing, come in any order, or be of a later release: 24.03 added
``response_stats`` and 23.06 ``memory_usage``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from sidestep.engines.triton.wire import (
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
from sidestep.errors import WireError
from sidestep.protocol.limits import Identifier, Text, is_printable
from sidestep.protocol.messages import DECODE_ERRORS

LARGEST = 2**64 - 1
"""Maximum of Triton's 64-bit counters; the largest bound of msgspec is one bit shorter."""
FIRST = "0"
"""Index of a request's first response; all later ones are combined."""


class Duration(msgspec.Struct, gc=False, frozen=True):
    """Count and total nanoseconds of one kind of event."""

    count: Whole = 0
    ns: Whole = 0


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

    success: Duration = Duration()
    fail: Duration = Duration()
    empty_response: Duration = Duration()
    cancel: Duration = Duration()


class MemoryUsage(msgspec.Struct, gc=False, frozen=True):
    """One entry of ``memory_usage``."""

    type: Text = ""
    id: Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] = 0
    byte_size: Whole = 0


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
_decode_version = msgspec.json.Decoder(ModelVersion)
_model = msgspec.json.Decoder(ModelStatistics)


def split(body: bytes) -> list[bytes]:
    """Return one undecoded JSON object for each version of a model.

    Raises:
        WireError: ``body`` is not an answer of the extension.
    """
    try:
        return [bytes(raw) for raw in _answer.decode(body).model_stats]
    except DECODE_ERRORS as error:
        raise WireError("bad_answer", str(error)) from None


def version_of(raw: bytes) -> ModelVersion:
    """Return the model and version of ``raw``.

    Raises:
        WireError: ``raw`` does not have them.
    """
    try:
        return _decode_version.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError("bad_answer", str(error)) from None


def read(raw: bytes) -> ModelStatistics:
    """Decode the statistics of one version.

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
    return found


def translate(found: ModelStatistics, *, has_cache: bool) -> ModelStats:
    """Translate ``found`` into wire structs.

    Without any cache hit or miss, ``has_cache`` decides whether there are cache counters.

    Raises:
        WireError: A number is beyond 64 bits.
    """
    return ModelStats(
        _checked(found.last_inference),
        _checked(found.inference_count),
        _checked(found.execution_count),
        _inferences(found.inference_stats, has_cache=has_cache),
        tuple(map(_batch, found.batch_stats)),
        _responses(found.response_stats) if found.response_stats else None,
        tuple(Memory(m.type, m.id, _checked(m.byte_size)) for m in found.memory_usage),
    )


def _checked(number: int) -> int:
    if number > LARGEST:
        raise WireError("bad_item", f"{number} is beyond 64 bits")
    return number


def _timed(found: Duration) -> Timed:
    if found.count > LARGEST or found.ns > LARGEST:
        raise WireError("bad_item", f"{max(found.count, found.ns)} is beyond 64 bits")
    return Timed(found.count, found.ns)


def _sum(found: Iterable[Duration]) -> Timed:
    each = [_timed(duration) for duration in found]
    return Timed(
        _checked(sum(timed.count for timed in each)), _checked(sum(timed.ns for timed in each))
    )


def _inferences(found: Inferences, *, has_cache: bool) -> InferenceStats:
    hit, miss = _timed(found.cache_hit), _timed(found.cache_miss)
    has_cache = has_cache or bool(hit.count or miss.count)
    return InferenceStats(
        _timed(found.success),
        _timed(found.fail),
        _timed(found.queue),
        _timed(found.compute_input),
        _timed(found.compute_infer),
        _timed(found.compute_output),
        hit if has_cache else None,
        miss if has_cache else None,
    )


def _batch(found: BatchStatistics) -> Batch:
    # Triton writes the same count into all three.
    infer = _timed(found.compute_infer)
    return Batch(
        _checked(found.batch_size),
        infer.count,
        _timed(found.compute_input).ns,
        infer.ns,
        _timed(found.compute_output).ns,
    )


def _responses(found: Mapping[str, ResponseStatistics]) -> Responses:
    """Combine the responses: a request has one index for each response, without a limit."""
    first = found.get(FIRST, ResponseStatistics())
    return Responses(
        _timed(first.success),
        _sum(each.success for index, each in found.items() if index != FIRST),
        _sum(each.fail for each in found.values()),
        _sum(each.empty_response for each in found.values()),
        _sum(each.cancel for each in found.values()),
    )
