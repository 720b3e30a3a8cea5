"""The fields of Triton's statistics extension, the wire fields that they fill, and who reads those.

The extension's names are those below ``model_stats``; ``[]`` stands for each element.
"""

from __future__ import annotations

from collections.abc import Mapping

_PARTS = ("count", "ns")
_STAGES = ("compute_input", "compute_infer", "compute_output")


def _durations(parent: str, *names: str) -> tuple[str, ...]:
    """Return the fields of durations, each of which is a count and nanoseconds."""
    return tuple(f"{parent}.{name}.{part}" for name in names for part in _PARTS)


EXTENSION: tuple[str, ...] = (
    "name",
    "version",
    "last_inference",
    "inference_count",
    "execution_count",
    *_durations("inference_stats", "success", "fail", "queue"),
    *_durations("inference_stats", *_STAGES, "cache_hit", "cache_miss"),
    "response_stats[].key",
    *_durations("response_stats[]", "compute_infer", "compute_output"),
    *_durations("response_stats[]", "success", "fail", "empty_response", "cancel"),
    "batch_stats[].batch_size",
    *_durations("batch_stats[]", *_STAGES),
    "memory_usage[].type",
    "memory_usage[].id",
    "memory_usage[].byte_size",
)
"""Every field of the extension, whether it is exposed or not."""

WIRE: Mapping[str, tuple[str, ...]] = {
    **{
        f"response_stats[].{name}.{part}": tuple(
            f"response_stats.{position}{suffix}.{part}" for position in ("first", "next")
        )
        for name, suffix in (
            ("success", ""),
            ("compute_infer", "_compute_infer"),
            ("compute_output", "_compute_output"),
        )
        for part in _PARTS
    },
    **{
        f"response_stats[].{name}.{part}": (f"response_stats.{name}.{part}",)
        for name in ("fail", "empty_response", "cancel")
        for part in _PARTS
    },
    "batch_stats[].compute_infer.count": ("batch_stats[].count",),
    **{f"batch_stats[].{stage}.ns": (f"batch_stats[].{stage}_ns",) for stage in _STAGES},
}
"""Wire fields of those fields of the extension that have another name there."""

LEFT_OUT: Mapping[str, str] = {
    "name": "label `model` of all families",
    "version": "label `version` of all families",
    "inference_stats.queue.count": "none: always that of `success`",
    "inference_stats.compute_input.count": "none: always `success` without `cache_hit`",
    "inference_stats.compute_infer.count": "none: always `success` without `cache_hit`",
    "inference_stats.compute_output.count": "none: always `success` without `cache_hit`",
    "response_stats[].key": "label `response`: index 0 is `first`, all others are `next`",
    "batch_stats[].compute_input.count": "none: always that of `compute_infer`",
    "batch_stats[].compute_output.count": "none: always that of `compute_infer`",
}
"""Fields of the extension that feed no family, and where they are instead, or why not."""

_BATCH_NS = tuple(f"batch_stats[].{stage}_ns" for stage in _STAGES)
_RESPONSE_STAGES = tuple(
    f"response_stats.{position}_{stage}"
    for position in ("first", "next")
    for stage in ("compute_infer", "compute_output")
)
READS: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("batch_stats[].batch_size", "batch_stats[].count"),
    "batch_executions": ("batch_stats[].batch_size", "batch_stats[].count"),
    "batch_duration": ("batch_stats[].batch_size", *_BATCH_NS),
    "batch_stages": ("batch_stats[].batch_size", *_BATCH_NS),
    "response_stages": tuple(f"{stage}.count" for stage in _RESPONSE_STAGES),
    "response_durations": tuple(f"{stage}.ns" for stage in _RESPONSE_STAGES),
    "memory": ("memory_usage[].type", "memory_usage[].id", "memory_usage[].byte_size"),
    "idle": ("last_inference",),
}
"""Wire fields by the handler row that reads them. The other handler rows need several polls, or the
model's configuration."""
DERIVED: Mapping[str, tuple[str, ...]] = {"busy_ns": _BATCH_NS}
"""Wire fields by the property that is computed from them."""
