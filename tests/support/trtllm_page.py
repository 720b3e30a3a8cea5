"""A page of trtllm-serve, which was constructed, since none could be recorded."""

from __future__ import annotations

import gzip
import re
from functools import cache
from typing import NamedTuple

from exporters import DATA
from pages import parse

_COUNT = re.compile(r"^(\S+_(?:total|bucket|count|sum)\{.*\}) (\S+)$", re.MULTILINE)


def made_page(times: int = 1) -> str:
    """Return the page that prometheus_client wrote of the families of a 1.4 pre-release.

    Its numbers are made up; counters have ``times`` their values.
    """
    page = gzip.decompress((DATA / "trtllm" / "page_made.txt.gz").read_bytes()).decode()
    return _COUNT.sub(lambda found: f"{found[1]} {float(found[2]) * times}", page)


class MadeFamily(NamedTuple):
    """A family of the page: its kind, its labels, and the bounds of a histogram."""

    kind: str
    labels: frozenset[str]
    bounds: tuple[float, ...]


@cache
def made_families() -> dict[str, MadeFamily]:
    """Return the families of the page by name."""
    found = {}
    for name, family in parse(made_page()).items():
        series = [dict(labels) for _, labels in family.samples]
        bounds = {float(labels["le"]) for labels in series if "le" in labels}
        names = frozenset(label for labels in series for label in labels) - {"le"}
        full = f"{name}_total" if family.kind == "counter" else name
        found[full] = MadeFamily(family.kind, names, tuple(sorted(bounds)))
    return found
