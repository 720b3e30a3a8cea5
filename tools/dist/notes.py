"""Release notes, cut from CHANGELOG.md."""

from __future__ import annotations

import re
from pathlib import Path

HEADING = re.compile(r"^## \[?([\w.]+)\]?.*\n", re.MULTILINE)


def sections(changelog: Path) -> dict[str, str]:
    """Return the text below each version's heading, the newest first."""
    _, *found = HEADING.split(changelog.read_text())
    return dict(zip(found[::2], map(str.strip, found[1::2]), strict=True))


def release_notes(changelog: Path, version: str) -> str:
    """Return what the changelog says of a version, or of the newest one if it lacks this one."""
    found = sections(changelog)
    newest = next(iter(found))
    if version in found:
        return f"# sidestep {version}\n\n{found[version]}\n"
    return f"# sidestep {version}, before {newest}\n\n{found[newest]}\n"
