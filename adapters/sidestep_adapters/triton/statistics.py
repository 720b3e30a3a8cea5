"""Decoding of Triton's statistics over HTTP, and their translation into wire structs.

Fields may be missing, come in any order, or be of a later release: 24.03 added
``response_stats`` and 23.06 ``memory_usage``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

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

    compute_infer: Duration = Duration()
    compute_output: Duration = Duration()
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


T = TypeVar("T")

_answer = msgspec.json.Decoder(_Answer)
_version = msgspec.json.Decoder(ModelVersion)
_model = msgspec.json.Decoder(ModelStatistics)


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode an answer of the server.

    Raises:
        PollError: ``body`` is not such an answer.
    """
    try:
        return decoder.decode(body)
    except DECODE_ERRORS as error:
        raise PollError("bad_answer", str(error)) from None


def split(body: bytes) -> list[bytes]:
    """Return one undecoded JSON object for each version of a model.

    Raises:
        PollError: ``body`` is not an answer of the extension.
    """
    return [bytes(raw) for raw in decode(_answer, body).model_stats]


def version_of(raw: bytes) -> ModelVersion:
    """Return the model and version of ``raw``.

    Raises:
        PollError: ``raw`` does not have them.
    """
    return decode(_version, raw)


def read(raw: bytes, *, has_cache: bool) -> ModelStats:
    """Decode the statistics of one version; see ``translate`` for ``has_cache``.

    Raises:
        WireError: A number is negative, no integer or beyond 64 bits, a batch size occurs twice,
            or the name is not printable.
    """
    try:
        found = _model.decode(raw)
    except DECODE_ERRORS as error:
        raise WireError("bad_item", str(error)) from None
    responses = _responses(found.response_stats) if found.response_stats else None
    return translate(found, responses, has_cache=has_cache)


def translate(found: Any, responses: Responses | None, *, has_cache: bool) -> ModelStats:
    """Translate statistics into wire structs.

    Args:
        found: ``ModelStatistics``, or a message with the same fields.
        responses: The statistics of its responses.
        has_cache: Whether there are cache counters without any cache hit or miss.

    Raises:
        WireError: A number is beyond 64 bits, a batch size occurs twice, or the name is not
            printable.
    """
    if not is_printable(found.name + found.version):
        raise WireError("bad_label", f"{found.name!r} is not printable")
    batches = tuple(map(_batch, found.batch_stats))
    if len({batch.batch_size for batch in batches}) < len(batches):
        raise WireError("bad_item", f"{found.name}: a batch size occurs twice")
    return ModelStats(
        _checked(found.last_inference),
        _checked(found.inference_count),
        _checked(found.execution_count),
        _inferences(found.inference_stats, has_cache=has_cache),
        batches,
        responses,
        tuple(Memory(m.type, m.id, _checked(m.byte_size)) for m in found.memory_usage),
    )


def total(durations: Iterable[Any]) -> Timed:
    """Return the sum of ``durations``.

    Raises:
        WireError: It is beyond 64 bits.
    """
    count = ns = 0
    for each in durations:
        count += each.count
        ns += each.ns
    return Timed(_checked(count), _checked(ns))


def _checked(number: int) -> int:
    if number > LARGEST:
        raise WireError("bad_item", f"{number} is beyond 64 bits")
    return number


def _timed(found: Any) -> Timed:
    count, ns = found.count, found.ns
    if count > LARGEST or ns > LARGEST:
        raise WireError("bad_item", f"{max(count, ns)} is beyond 64 bits")
    return Timed(count, ns)


def _inferences(found: Any, *, has_cache: bool) -> InferenceStats:
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


def _batch(found: Any) -> Batch:
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
    later = [each for index, each in found.items() if index != FIRST]
    return Responses(
        _timed(first.success),
        total(each.success for each in later),
        total(each.fail for each in found.values()),
        total(each.empty_response for each in found.values()),
        total(each.cancel for each in found.values()),
        _timed(first.compute_infer),
        _timed(first.compute_output),
        total(each.compute_infer for each in later),
        total(each.compute_output for each in later),
    )
