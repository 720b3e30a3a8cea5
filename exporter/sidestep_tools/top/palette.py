"""Colours of the terminal view, by the names of textual's themes; no information is in the colour alone."""

from __future__ import annotations

from sidestep.tracking.health.states import Level

Part = str | tuple[str, str]
"""Text, or text and its style."""
COLOURS: dict[Level | None, str] = {
    "critical": "bold $text-error",
    "warning": "bold $text-warning",
    "ok": "$text-success",
    None: "",
}
MUTED = "dim"
CURVE = "$text-primary"
NAME = "$text-accent"
