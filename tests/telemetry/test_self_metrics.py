"""Self-metrics of the exporter."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from sidestep.telemetry.rows import BY_NAME
from sidestep.telemetry.self_metrics import SelfMetrics, names, own_registry

ROOT = Path(__file__).parents[2]
READERS = {"rows.py", "diagnosis", "top", "live"}
"""Where a name says nothing of who gives it a value."""


def modules() -> Iterator[ast.Module]:
    """Yield the modules that may give self-metrics their values."""
    for part in ("exporter", "adapters"):
        for path in (ROOT / part).rglob("*.py"):
            if READERS.isdisjoint(path.parts):
                yield ast.parse(path.read_text())


def patterns(nodes: Iterable[ast.AST]) -> Iterator[re.Pattern[str]]:
    """Yield a pattern for each name that is put together, with a group for each part that varies."""
    constants = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for text in nodes:
        if not isinstance(text, ast.JoinedStr):
            continue
        found = ""
        for part in text.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            known = constants.get(inner.id, inner) if isinstance(inner, ast.Name) else inner
            found += re.escape(str(known.value)) if isinstance(known, ast.Constant) else r"(\w+)"
        if found.startswith("sidestep_"):
            yield re.compile(found)


def orphans(wanted: Iterable[str]) -> set[str]:
    """Return which of the self-metrics no module names, as a whole or in parts."""
    left = {*wanted}
    for module in modules():
        nodes = [*ast.walk(module)]
        texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        left -= texts
        for pattern in patterns(nodes):
            left = {
                name
                for name in left
                if not ((found := pattern.fullmatch(name)) and texts.issuperset(found.groups()))
            }
    return left


def test_every_metric_has_code_that_gives_it_a_value() -> None:
    """A row without any is documented, and never on a page."""
    assert orphans(BY_NAME) == set()
    injected = {"sidestep_orphan_total", "sidestep_scrape_orphan"}
    assert orphans([*BY_NAME, *injected]) == injected


def test_names_are_reserved_before_a_family_has_samples() -> None:
    """Families with labels and those of prometheus_client's collectors count as well."""
    found = names(own_registry(SelfMetrics(), []))

    assert {"sidestep_http_refused_total", "sidestep_http_refused_created"} <= found
    assert {"sidestep_engines", "python_info", "process_cpu_seconds_total"} <= found
