"""What Triton's statistics extension answers over HTTP, and what it says in the wire's words.

Fields may be missing, come in any order, or be of a later release: 24.03 brought
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
"""Triton counts in 64 bits; a bound of msgspec is one bit short of it."""
FIRST = "0"
"""Index of a request's first response; each other is told together with all others."""


class Duration(msgspec.Struct, gc=False, frozen=True):
    """Of one kind of event: how often, and the nanoseconds in all."""

    count: Whole = 0
    ns: Whole = 0


class Inferences(msgspec.Struct, gc=False, frozen=True):
    """``inference_stats``."""

    success: Duration = Duration()
    fail: Duration = Duration()
    queue: Duration = Duration()
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
    cache_hit: Duration = Duration()
    cache_miss: Duration = Duration()


class BatchStatistics(msgspec.Struct, gc=False, frozen=True):
    """One of ``batch_stats``."""

    batch_size: Whole = 0
    compute_input: Duration = Duration()
    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()


class ResponseStatistics(msgspec.Struct, gc=False, frozen=True):
    """One of ``response_stats``."""

    success: Duration = Duration()
    fail: Duration = Duration()
    empty_response: Duration = Duration()
    cancel: Duration = Duration()


class MemoryUsage(msgspec.Struct, gc=False, frozen=True):
    """One of ``memory_usage``."""

    type: Text = ""
    id: Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] = 0
    byte_size: Whole = 0


class ModelVersion(msgspec.Struct, gc=False, frozen=True):
    """Which version of which model; servers without versions leave the latter away."""

    name: str
    version: str = ""


class ModelStatistics(ModelVersion, gc=False, frozen=True):
    """One of ``model_stats``, whose name and version can be labels."""

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
    """One JSON object for each version of a model, unread.

    Raises:
        WireError: ``body`` is no answer of the extension.
    """
    try:
        return [bytes(raw) for raw in _answer.decode(body).model_stats]
    except DECODE_ERRORS as error:
        raise WireError("bad_answer", str(error)) from None


def version_of(raw: bytes) -> ModelVersion:
    """Whose statistics ``raw`` is.

    Raises:
        WireError: It does not say.
    """
    try:
        return _decode_version.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError("bad_answer", str(error)) from None


def read(raw: bytes) -> ModelStatistics:
    """The statistics of one version.

    Raises:
        WireError: They are none: a number is negative, no integer or beyond 64 bits, or a batch
            size is there twice, or its name cannot be shown.
    """
    try:
        found = _model.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError("bad_item", str(error)) from None
    if not is_printable(found.name + found.version):
        raise WireError("bad_label", f"{found.name!r} cannot be shown")
    if len({batch.batch_size for batch in found.batch_stats}) < len(found.batch_stats):
        raise WireError("bad_item", f"{found.name}: a batch size is there twice")
    return found


def translate(found: ModelStatistics, *, has_cache: bool) -> ModelStats:
    """What ``found`` says; where nothing was ever cached, ``has_cache`` tells whether it could be.

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
    """A request has one index for each of its responses, without end: they cannot be told apart."""
    first = found.get(FIRST, ResponseStatistics())
    return Responses(
        _timed(first.success),
        _sum(each.success for index, each in found.items() if index != FIRST),
        _sum(each.fail for each in found.values()),
        _sum(each.empty_response for each in found.values()),
        _sum(each.cancel for each in found.values()),
    )
