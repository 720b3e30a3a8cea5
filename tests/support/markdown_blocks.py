"""Code in documents: fenced blocks, and commands between backticks."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a document."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(path, text[: found.start(3)].count("\n") + 1, found[2], textwrap.dedent(found[3]))
        for found in FENCE.finditer(text)
    ]


def inline_code(path: Path) -> list[str]:
    """Return what a document has between backticks outside of blocks."""
    prose = FENCE.sub("", path.read_text(encoding="utf-8"))
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose)]
