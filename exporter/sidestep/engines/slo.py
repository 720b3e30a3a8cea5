"""Whether objectives can be counted: the families that they name must have latencies."""

from __future__ import annotations

from collections.abc import Iterable

from sidestep.catalog.model import Alias
from sidestep.catalog.slo import FAMILIES, Objective
from sidestep.engines.dialects import DIALECTS
from sidestep.errors import ConfigError


def check(objectives: Iterable[Objective], *, common: bool) -> None:
    """Refuse objectives of families without latencies.

    Args:
        objectives: Of all ``--slo``.
        common: Whether families are exposed that have the same name for all engines.

    Raises:
        ConfigError: A family is unknown, or not a histogram of seconds.
    """
    for one in objectives:
        for family in one.families:
            if problem := _problem(family, common=common):
                raise ConfigError(f"slo: {one.name}: {problem}")


def _problem(family: str, *, common: bool) -> str:
    """Return why ``family`` has no latencies here, and what to do; empty where it has."""
    with_latencies = [dialect for dialect in DIALECTS.values() if dialect.common_rows]
    rows = {
        row.name: row for one in with_latencies for row in one.rows_for(legacy=True, common=True)
    }
    row = rows.get(family)
    if row is None or row.kind != "histogram" or not family.endswith("_seconds"):
        return (
            f"{family!r} is no histogram of seconds of vLLM or SGLang; docs/metrics.md has those, and"
            f" {', '.join(FAMILIES)} stand for the same one of both"
        )
    if isinstance(row.source, Alias):
        return f"{family} is an old name of {row.source.name}; give that instead"
    if not common and any(row in one.common_rows for one in with_latencies):
        return f"{family} is there with --metrics.common only; give that, too"
    return ""
