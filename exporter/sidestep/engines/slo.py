"""Validation of objectives: the families that they name must be latency histograms."""

from __future__ import annotations

from collections.abc import Iterable

from sidestep.catalog.model import Alias
from sidestep.catalog.slo import FAMILIES, Objective
from sidestep.engines.dialects import DIALECTS
from sidestep.errors import ConfigError


def check(objectives: Iterable[Objective], *, common: bool) -> None:
    """Check that every family of ``objectives`` is a histogram of seconds.

    Args:
        objectives: The objectives of all ``--slo`` flags.
        common: Whether families with the same names for all engines are exposed.

    Raises:
        ConfigError: A family is unknown or no histogram of seconds.
    """
    for one in objectives:
        for family in one.families:
            if problem := _problem(family, common=common):
                raise ConfigError(f"slo: {one.name}: {problem}")


def _problem(family: str, *, common: bool) -> str:
    """Return why ``family`` cannot be used, and what to do; empty if it can."""
    with_latencies = [dialect for dialect in DIALECTS.values() if dialect.common_rows]
    rows = {
        row.name: row for one in with_latencies for row in one.rows_for(legacy=True, common=True)
    }
    row = rows.get(family)
    if row is None or row.kind != "histogram" or not family.endswith("_seconds"):
        return (
            f"{family!r} is no histogram of seconds of vLLM or SGLang; see docs/metrics.md, or use"
            f" one of {', '.join(FAMILIES)}, which work for both"
        )
    if isinstance(row.source, Alias):
        return f"{family} is an old name of {row.source.name}; use that instead"
    if not common and any(row in one.common_rows for one in with_latencies):
        return f"{family} needs --metrics.common"
    return ""
