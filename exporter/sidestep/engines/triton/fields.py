"""The fields of Triton's statistics that are no row's source, and where they go instead."""

from __future__ import annotations

from collections.abc import Mapping

READS: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("batch_stats[].batch_size", "batch_stats[].count"),
    "batch_executions": ("batch_stats[].batch_size", "batch_stats[].count"),
    "batch_duration": (
        "batch_stats[].batch_size",
        "batch_stats[].compute_input_ns",
        "batch_stats[].compute_infer_ns",
        "batch_stats[].compute_output_ns",
    ),
    "memory": ("memory_usage[].type", "memory_usage[].id", "memory_usage[].byte_size"),
    "idle": ("last_inference",),
}
"""Fields by the handler row that reads them. The other handler rows need several polls, or the
model's configuration."""
DERIVED: Mapping[str, tuple[str, ...]] = {
    "busy_ns": (
        "batch_stats[].compute_input_ns",
        "batch_stats[].compute_infer_ns",
        "batch_stats[].compute_output_ns",
    ),
}
"""Fields by the property that is computed from them."""
LEFT_OUT: Mapping[str, str] = {
    "inference_stats.queue.count": "always that of `success`",
    "inference_stats.compute_input.count": "always `success` without `cache_hit`",
    "inference_stats.compute_infer.count": "always `success` without `cache_hit`",
    "inference_stats.compute_output.count": "always `success` without `cache_hit`",
}
"""Fields that no family exposes, and why."""
