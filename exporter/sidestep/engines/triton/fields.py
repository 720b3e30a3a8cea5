"""What becomes of the fields of Triton's statistics that are no row's source by themselves."""

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
"""Fields that a hook reads; the others need several looks, or the model's configuration."""
DERIVED: Mapping[str, tuple[str, ...]] = {
    "busy_ns": (
        "batch_stats[].compute_input_ns",
        "batch_stats[].compute_infer_ns",
        "batch_stats[].compute_output_ns",
    ),
}
"""Likewise, of what is no field but comes from some."""
LEFT_OUT: Mapping[str, str] = {
    "inference_stats.queue.count": "always that of `success`",
    "inference_stats.compute_input.count": "always `success` without `cache_hit`",
    "inference_stats.compute_infer.count": "always `success` without `cache_hit`",
    "inference_stats.compute_output.count": "always `success` without `cache_hit`",
}
"""Fields that no family shows, and why."""
