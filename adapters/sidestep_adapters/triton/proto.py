"""Messages of Triton's gRPC service, as far as they are used here, and their decoding.

The names are Triton's, and ``tritonclient`` may have registered its own messages under them in
the same process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError

from sidestep.engines.triton.wire import MAX_MEMORIES, MAX_SIZES
from sidestep.errors import WireError
from sidestep.protocol.limits import MAX_LABEL_CHARS, is_printable
from sidestep_adapters.triton.model_config import Group, ModelConfig, known
from sidestep_adapters.triton.proto_table import Table, messages
from sidestep_adapters.triton.statistics import (
    FIRST,
    BatchStatistics,
    Duration,
    Inferences,
    MemoryUsage,
    ModelStatistics,
    ModelVersion,
    ResponseStatistics,
)

PACKAGE = "inference"
KIND_GPU = 1
"""Value of ``ModelInstanceGroup.Kind``."""

# Field numbers are those of grpc_service.proto and model_config.proto. Omitted fields are
# skipped by the parser.
TABLE: Table = {
    "ModelStatisticsRequest": {1: ("name", "string"), 2: ("version", "string")},
    # As bytes, so that an unchanged entry is not decoded again.
    "ModelStatisticsResponse": {1: ("model_stats", "repeated bytes")},
    "ModelStatistics": {
        1: ("name", "string"),
        2: ("version", "string"),
        3: ("last_inference", "uint64"),
        4: ("inference_count", "uint64"),
        5: ("execution_count", "uint64"),
        6: ("inference_stats", "InferStatistics"),
        7: ("batch_stats", "repeated InferBatchStatistics"),
        8: ("memory_usage", "repeated MemoryUsage"),
        9: ("response_stats", "repeated ResponseEntry"),
    },
    # The beginning of ModelStatistics, to read no more than that.
    "ModelVersion": {1: ("name", "string"), 2: ("version", "string")},
    "StatisticDuration": {1: ("count", "uint64"), 2: ("ns", "uint64")},
    "InferStatistics": {
        1: ("success", "StatisticDuration"),
        2: ("fail", "StatisticDuration"),
        3: ("queue", "StatisticDuration"),
        4: ("compute_input", "StatisticDuration"),
        5: ("compute_infer", "StatisticDuration"),
        6: ("compute_output", "StatisticDuration"),
        7: ("cache_hit", "StatisticDuration"),
        8: ("cache_miss", "StatisticDuration"),
    },
    "InferBatchStatistics": {
        1: ("batch_size", "uint64"),
        2: ("compute_input", "StatisticDuration"),
        3: ("compute_infer", "StatisticDuration"),
        4: ("compute_output", "StatisticDuration"),
    },
    "MemoryUsage": {1: ("type", "string"), 2: ("id", "int64"), 3: ("byte_size", "uint64")},
    # A map entry; the key is the index of the response in its request.
    "ResponseEntry": {1: ("key", "string"), 2: ("value", "InferResponseStatistics")},
    # Most are empty; as bytes they need no message of their own.
    "InferResponseStatistics": {
        3: ("success", "StatisticDuration"),
        4: ("fail", "bytes"),
        5: ("empty_response", "bytes"),
        6: ("cancel", "bytes"),
    },
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {
        1: ("name", "string"),
        2: ("version", "string"),
        3: ("extensions", "repeated string"),
    },
    "ModelConfigRequest": {1: ("name", "string"), 2: ("version", "string")},
    "ModelConfigResponse": {1: ("config", "ModelConfig")},
    "ModelConfig": {
        2: ("platform", "string"),
        7: ("instance_group", "repeated ModelInstanceGroup"),
        10: ("metric_tags", "repeated MetricTag"),
        24: ("response_cache", "ModelResponseCache"),
    },
    "ModelInstanceGroup": {
        2: ("count", "int32"),
        3: ("gpus", "repeated int32"),
        4: ("kind", "int32"),
        7: ("passive", "bool"),
    },
    "MetricTag": {1: ("key", "string"), 2: ("value", "string")},
    "ModelResponseCache": {1: ("enable", "bool")},
    "RepositoryIndexRequest": {1: ("repository_name", "string"), 2: ("ready", "bool")},
    "RepositoryIndexResponse": {1: ("models", "repeated ModelIndex")},
    "ModelIndex": {
        1: ("name", "string"),
        2: ("version", "string"),
        3: ("state", "string"),
        4: ("reason", "string"),
    },
}
MESSAGES = messages(PACKAGE, TABLE, syntax="proto3")

_decode_version, _model = (
    MESSAGES["ModelVersion"].FromString,
    MESSAGES["ModelStatistics"].FromString,
)
_duration = MESSAGES["StatisticDuration"].FromString
_NONE = Duration()


def version_of(raw: bytes) -> ModelVersion:
    """Return the model and version of ``raw``.

    Raises:
        WireError: ``raw`` does not have them.
    """
    try:
        found = _decode_version(raw)
    except DecodeError as error:
        raise WireError("bad_answer", str(error)) from None
    return ModelVersion(found.name, found.version)


def read(raw: bytes) -> ModelStatistics:
    """Decode the statistics of one version, with its first responses and all others combined.

    Raises:
        WireError: ``raw`` is invalid, or a batch size occurs twice.
    """
    try:
        found = _model(raw)
        responses = _responses(found.response_stats)
    except DecodeError as error:
        raise WireError("bad_item", str(error)) from None
    if not 0 < len(found.name) <= MAX_LABEL_CHARS or len(found.version) > MAX_LABEL_CHARS:
        raise WireError("bad_item", "a model's name or version is missing or too long")
    if not is_printable(found.name + found.version):
        raise WireError("bad_label", f"{found.name!r} is not printable")
    batches = tuple(map(_batch, found.batch_stats))
    memories = tuple(map(_memory, found.memory_usage))
    if len(batches) > MAX_SIZES or len(memories) > MAX_MEMORIES:
        raise WireError("bad_item", f"{found.name}: too many batch sizes or memories")
    if len({batch.batch_size for batch in batches}) < len(batches):
        raise WireError("bad_item", f"{found.name}: a batch size occurs twice")
    return ModelStatistics(
        found.name,
        found.version,
        found.last_inference,
        found.inference_count,
        found.execution_count,
        _inferences(found.inference_stats),
        responses,
        batches,
        memories,
    )


def config(found: Any) -> ModelConfig:
    """Translate the message of a model's configuration."""
    groups = (
        # A negative count is invalid and must not reduce the sum.
        Group(
            "KIND_GPU" if group.kind == KIND_GPU else "",
            max(group.count, 0),
            group.gpus,
            group.passive,
        )
        for group in found.instance_group
    )
    tags = {tag.key: tag.value for tag in found.metric_tags}
    return known(found.platform, groups, tags, has_cache=found.response_cache.enable)


def _timed(found: Any) -> Duration:
    return Duration(found.count, found.ns)


def _inferences(found: Any) -> Inferences:
    return Inferences(
        _timed(found.success),
        _timed(found.fail),
        _timed(found.queue),
        _timed(found.compute_input),
        _timed(found.compute_infer),
        _timed(found.compute_output),
        _timed(found.cache_hit),
        _timed(found.cache_miss),
    )


def _batch(found: Any) -> BatchStatistics:
    return BatchStatistics(
        found.batch_size,
        _timed(found.compute_input),
        _timed(found.compute_infer),
        _timed(found.compute_output),
    )


def _memory(found: Any) -> MemoryUsage:
    if len(found.type) > MAX_LABEL_CHARS or not -(1 << 62) <= found.id <= 1 << 62:
        raise WireError("bad_item", "a memory type or number that is not a valid label")
    return MemoryUsage(found.type, found.id, found.byte_size)


def _responses(entries: Any) -> dict[str, ResponseStatistics]:
    """Combine the responses: there may be thousands, so little of each is decoded."""
    if not entries:
        return {}
    first = _NONE
    values = []
    others = count = ns = 0
    for entry in entries:
        value = entry.value
        values.append(value)
        success = value.success
        if entry.key == FIRST:
            first = _timed(success)
        else:
            others += 1
            count += success.count
            ns += success.ns
    fail = _sum(value.fail for value in values if value.fail)
    empty = _sum(value.empty_response for value in values if value.empty_response)
    cancel = _sum(value.cancel for value in values if value.cancel)
    found = {FIRST: ResponseStatistics(first, fail, empty, cancel)}
    if others:
        found["others"] = ResponseStatistics(Duration(count, ns))
    return found


def _sum(raws: Iterable[bytes]) -> Duration:
    each = [_duration(raw) for raw in raws]
    return Duration(sum(one.count for one in each), sum(one.ns for one in each))
