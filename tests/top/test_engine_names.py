"""Names of engines in code that must work with any engine."""

from __future__ import annotations

import re
from pathlib import Path

from sidestep.catalog.engine_pages import PAGES

TOOLS = Path(__file__).parents[2] / "exporter" / "sidestep_tools"
NAMES = re.compile(
    "|".join({re.escape(name) for page in PAGES for name in (page.dialect, page.title)}),
    re.IGNORECASE,
)


def test_the_commands_name_no_engine() -> None:
    """``top`` and ``whatif`` know engines by the exporter's API and the table of pages alone."""
    named = {
        f"{path.relative_to(TOOLS)}: {found[0]}"
        for command in ("top", "whatif")
        for path in (TOOLS / command).glob("*.py")
        if (found := NAMES.search(path.read_text()))
    }

    assert NAMES.search((TOOLS.parent / "sidestep" / "catalog" / "engine_pages.py").read_text())
    assert not named
