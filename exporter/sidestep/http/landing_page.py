"""The page at the root, for people: what there is, and where."""

from __future__ import annotations

import html
from collections.abc import Iterable

from sidestep import __version__


def landing_page(path: str, pod: str, count: int, endpoints: Iterable[str]) -> str:
    """The page as HTML.

    Args:
        path: Where the metrics page is.
        pod: Where the pod's page is.
        count: How many engines there are.
        endpoints: Where engines connect.
    """
    links = [
        (path, "Metrics"),
        (pod, "Metrics of all engines as one"),
        ("/api/v1/engines", "Engines (JSON)"),
        ("/api/v1/metrics", "Metrics (JSON)"),
        ("/api/v1/cardinality", "Number of series (JSON)"),
        ("/-/healthy", "Health"),
        ("/-/ready", "Readiness"),
    ]
    items = "".join(f'<li><a href="{html.escape(to)}">{name}</a></li>' for to, name in links)
    engines = f"{count} engine{'' if count == 1 else 's'}"
    where = html.escape(", ".join(endpoints))
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>sidestep</title>"
        "<style>body{font:16px/1.5 sans-serif;margin:2em;max-width:40em}</style>"
        f"<h1>sidestep {__version__}</h1>"
        f"<p>Metrics of LLM inference engines. {engines}; engines connect to {where}.</p>"
        f"<ul>{items}</ul></html>"
    )
