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
"""Of engines; of several with equal labels, a timeline shows the state that is last here."""
SERVERS: Mapping[str, str] = {
    "up": STATES["ok"],
    "stale": STATES["slow"],
    "down": STATES["unreachable"],
}
"""Of servers that are polled, in the colors of engines in a like state."""
LIMITS: Mapping[str, str] = {
    "none": "#c7d0d9",
    "slots": "#3274d9",
    "tokens": "#a352cc",
    "kv_blocks": RED,
    "lora": "#ff9830",
    "grammar": "#e0b400",
    "kv_transfer": "#1f9e9e",
    "encoder": "#ff9ecb",
    "deferred": "#7c6f00",
    "paused": "#5c626a",
}
PARTS: Mapping[str, str] = {
    "front_end_in": "#8ab8ff",
    "queue": "#f2495c",
    **{f"queue.{limit}": color for limit, color in LIMITS.items()},
    "queue.unknown": GREY,
    "prefill": GREEN,
    "prefill_gap": "#96d98d",
    "decode": "#37872d",
    "interference": "#c15c17",
    "preempted": "#c4162a",
    "recompute": "#8f3bb8",
    "stalled": "#8e1020",
    "front_end_out": "#5794f2",
}
