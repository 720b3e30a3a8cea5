"""Messages of Triton's gRPC service, as far as they are used here, and their decoding.

The names are Triton's, and ``tritonclient`` may have registered its own messages under them in
the same process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from sidestep.errors import PollError, WireError
from sidestep.protocol.limits import MAX_LABEL_CHARS
from sidestep_adapters.triton.model_config import Group, ModelConfig, make_config
from sidestep_adapters.triton.statistics import FIRST, ModelVersion, total, translate
from sidestep_adapters.triton.wire import MAX_MEMORIES, MAX_SIZES, ModelStats, Responses, Timed

Table = Mapping[str, Mapping[int, tuple[str, str]]]
"""By message and field number: the field's name, and its type, behind ``repeated`` if it is.
A type that is not a scalar names a message of the table.
"""

_REPEATED = "repeated "
_Field = descriptor_pb2.FieldDescriptorProto


def messages(package: str, table: Table, *, syntax: str) -> dict[str, Any]:
    """Return the message classes of ``table`` by name.

    They have a pool of their own: other libraries in the process may have messages with these
    names.

    Args:
        package: The messages' package.
        table: The messages and their fields.
        syntax: ``proto2`` or ``proto3``.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"sidestep/{package}.proto", package=package, syntax=syntax
    )
    for message, fields in table.items():
        described = file.message_type.add(name=message)
        for number, (name, form) in fields.items():
            kind = form.removeprefix(_REPEATED)
            field = described.field.add(name=name, number=number)
            field.label = _Field.LABEL_OPTIONAL if kind == form else _Field.LABEL_REPEATED
            if kind in table:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{package}.{name}") for name in table)
    return {each.name: message_factory.GetMessageClass(each) for each in found}


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
    # Most of the last three are empty; as bytes they need no message of their own.
    "InferResponseStatistics": {
        1: ("compute_infer", "StatisticDuration"),
        2: ("compute_output", "StatisticDuration"),
        3: ("success", "StatisticDuration"),
        4: ("fail", "bytes"),
        5: ("empty_response", "bytes"),
        6: ("cancel", "bytes"),
    },
    "ServerMetadataRequest": {},
    "ServerMetadataResponse": {3: ("extensions", "repeated string")},
    "ModelConfigRequest": {1: ("name", "string")},
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
    "RepositoryIndexRequest": {2: ("ready", "bool")},
    "RepositoryIndexResponse": {1: ("models", "repeated ModelIndex")},
    "ModelIndex": {1: ("name", "string"), 3: ("state", "string")},
}
MESSAGES = messages(PACKAGE, TABLE, syntax="proto3")

_version = MESSAGES["ModelVersion"].FromString
_model = MESSAGES["ModelStatistics"].FromString
_duration = MESSAGES["StatisticDuration"].FromString


def version_of(raw: bytes) -> ModelVersion:
    """Return the model and version of ``raw``.

    Raises:
        PollError: ``raw`` does not have them.
    """
    try:
        found = _version(raw)
    except DecodeError as error:
        raise PollError("bad_answer", str(error)) from None
    return ModelVersion(found.name, found.version)


def read(raw: bytes, *, has_cache: bool) -> ModelStats:
    """Decode the statistics of one version; see ``translate`` for ``has_cache``.

    Raises:
        WireError: ``raw`` is invalid; over HTTP the field types have the same limits.
    """
    try:
        found = _model(raw)
        responses = _responses(found.response_stats) if found.response_stats else None
    except DecodeError as error:
        raise WireError("bad_item", str(error)) from None
    if not 0 < len(found.name) <= MAX_LABEL_CHARS or len(found.version) > MAX_LABEL_CHARS:
        raise WireError("bad_item", "a model's name or version is missing or too long")
    if len(found.batch_stats) > MAX_SIZES or len(found.memory_usage) > MAX_MEMORIES:
        raise WireError("bad_item", f"{found.name}: too many batch sizes or memories")
    for memory in found.memory_usage:
        if len(memory.type) > MAX_LABEL_CHARS or not -(1 << 62) <= memory.id <= 1 << 62:
            raise WireError("bad_item", "a memory type or number that is not a valid label")
    return translate(found, responses, has_cache=has_cache)


def translate_config(found: Any) -> ModelConfig:
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
    return make_config(found.platform, groups, tags, has_cache=found.response_cache.enable)


def _responses(entries: Any) -> Responses:
    """Combine the responses: there may be thousands, so little of each is decoded."""
    first = MESSAGES["InferResponseStatistics"]()
    later = []
    values = []
    for entry in entries:
        value = entry.value
        values.append(value)
        if entry.key == FIRST:
            first = value
        else:
            later.append(value)
    return Responses(
        _timed(first.success),
        total(value.success for value in later),
        total(_duration(value.fail) for value in values if value.fail),
        total(_duration(value.empty_response) for value in values if value.empty_response),
        total(_duration(value.cancel) for value in values if value.cancel),
        _timed(first.compute_infer),
        _timed(first.compute_output),
        total(value.compute_infer for value in later),
        total(value.compute_output for value in later),
    )


def _timed(found: Any) -> Timed:
    return Timed(found.count, found.ns)
