"""Colors that mean the same on every dashboard: of states, of limits, and of parts of requests."""

from __future__ import annotations

from collections.abc import Mapping

GREEN, GREY, RED = "#56a64b", "#9aa3ad", "#e02f44"
STATES: Mapping[str, str] = {
    "ok": GREEN,
    "idle": GREY,
    "asleep": "#3274d9",
    "starting": "#8ab8ff",
    "stopped": "#5c626a",
    "slow": "#ff9830",
    "unreachable": "#8e1020",
    "stalled": RED,
}
"""Of engines, in the order of their numbers in a timeline."""
SERVERS: Mapping[str, str] = {
    "up": STATES["ok"],
    "stale": STATES["slow"],
    "down": STATES["unreachable"],
}
"""Of servers that are polled, in the colors of engines in a like state."""
LIMITS: Mapping[str, str] = {
    "none": "#d3d8e0",
    "slots": "#3b7dd8",
    "tokens": "#0f9f9a",
    "kv_blocks": "#e08214",
    "lora": "#8e44ad",
    "grammar": "#d6569c",
    "kv_transfer": "#8c6239",
    "encoder": "#7f8c1f",
    "deferred": "#5f6b7a",
    "paused": "#2f3640",
}
"""As on the live page."""
PARTS: Mapping[str, str] = {
    "front_end_in": "#c9b37a",
    "queue": "#f2b56b",
    **{f"queue.{limit}": color for limit, color in LIMITS.items()},
    "queue.unknown": "#a3acb8",
    "queue.stalled": "#4f0a11",
    "transfer": "#8a5a2b",
    "prefill_remote": "#1f6f43",
    "prefill": "#2e9e5b",
    "prefill_gap": "#96d9ae",
    "decode": "#9cc3f2",
    "interference": "#c93c7c",
    "preempted": "#b3180f",
    "recompute": "#e0675f",
    "stalled": "#7a0f1a",
    "front_end_out": "#a08c50",
}
