"""The table of docs/triton-fields.md."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "triton-fields.md"


def documented_fields() -> dict[str, str]:
    """Return what the document says of each field: its families, or where the field is instead."""
    rows = re.findall(r"^\| `(\S+)` \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    return dict(rows)
