"""The landing page at the root: links for people."""

from __future__ import annotations

import html
from collections.abc import Iterable

from sidestep import __version__


def landing_page(path: str, pod: str, count: int, endpoints: Iterable[str]) -> str:
    """Return the page as HTML.

    Args:
        path: Path of the metrics page.
        pod: Path of the pod's metrics page.
        count: Number of engines.
        endpoints: Endpoints that engines connect to.
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
