"""Hooks of mkdocs, which makes a site of the documents (``make site``).

The navigation comes from the index by task, docs/README.md. The documents also link to files and folders outside of
``docs/``, for readers of a clone; on the site only the path is shown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[((?:[^]`]|`[^`]*`)+)\]\(((?:\.\./)*[\w./-]+)(#[\w-]+)?\)")


def pages(index: str) -> dict[str, list[str]]:
    """Return the pages of each group of the index."""
    groups: dict[str, list[str]] = {}
    for line in index.splitlines():
        if group := re.match(r"\| \*\*(.+)\*\* \|", line):
            groups[group[1]] = []
        elif line.startswith("| ") and groups:
            named = re.findall(r"\]\(([\w/-]+\.md)\)", line)
            groups[[*groups][-1]] += named
    return groups


def on_config(config: Any) -> Any:
    """Set the navigation: each page by its heading."""
    docs = Path(config.docs_dir)
    groups = pages((docs / "README.md").read_text(encoding="utf-8"))
    config.nav = ["README.md"]
    for group, named in groups.items():
        config.nav.append({group: [{heading(docs / name): name} for name in named]})
    return config


def heading(page: Path) -> str:
    """Return the first heading of a page, without the marks of code."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, page
    return found[1].replace("`", "")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that lead out of the site by their text and the path in the repository."""
    source = Path(page.file.abs_src_path)
    docs = source.parents[page.file.src_uri.count("/")]

    def replaced(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        if target.is_relative_to(docs) and not target.is_dir():
            return link[0]
        path = f"`{target.relative_to(docs.parent)}`"
        return path if link[1].strip("`") in path else f"{link[1]} ({path})"

    return LINK.sub(replaced, markdown)
