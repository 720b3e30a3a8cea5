"""The landing page at the root: links for people."""

from __future__ import annotations

import html
from collections.abc import Iterable

from sidestep import __version__


def landing_page(links: Iterable[tuple[str, str]], count: int) -> str:
    """Return the page as HTML.

    Args:
        links: Path and text of each link.
        count: Number of engines.
    """
    items = "".join(f'<li><a href="{html.escape(to)}">{text}</a></li>' for to, text in links)
    engines = f"{count} engine{'' if count == 1 else 's'}"
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>sidestep</title>"
        "<style>body{font:16px/1.5 sans-serif;margin:2em;max-width:40em}</style>"
        f"<h1>sidestep {__version__}</h1>"
        f"<p>Metrics of LLM inference engines. {engines}.</p>"
        f"<ul>{items}</ul></html>"
    )
