"""All dialects: vLLM's and SGLang's, and those that installed packages register by entry points."""

from __future__ import annotations

from importlib.metadata import entry_points

from sidestep.engines.dialect import Dialect, Dialects
from sidestep.engines.sglang.dialect import DIALECT as SGLANG
from sidestep.engines.vllm.dialect import DIALECT as VLLM
from sidestep.errors import CatalogueError

GROUP = "sidestep.dialects"
"""Entry point group of dialects, each a ``Dialect``."""


def installed() -> list[Dialect]:
    """Return the dialects that installed packages register under ``sidestep.dialects``.

    An engine's process loads them too, so their modules import no I/O.
    """
    found: list[Dialect] = []
    # A package that is installed twice registers the same entry point twice.
    points = {point.value: point for point in sorted(entry_points(group=GROUP))}
    for point in points.values():
        try:
            found.append(point.load())
        except Exception as error:
            raise CatalogueError(f"dialect {point.name} ({point.value}): {error!r}") from error
    return found


DIALECTS = Dialects(VLLM, SGLANG, *installed())
