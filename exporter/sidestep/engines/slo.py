"""Resolution of objectives to families of the dialects, which must be latency histograms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from sidestep.catalog.row import Alias
from sidestep.catalog.slo import LATENCIES, Objective
from sidestep.engines.dialect import Dialect
from sidestep.errors import ConfigError


def resolve(
    objectives: Iterable[Objective], dialects: Mapping[str, Dialect], *, common: bool
) -> tuple[Objective, ...]:
    """Return ``objectives`` with each dialect's family in place of a predefined latency.

    Families with the same names for all engines can be meant only where they are exposed (``common``).
    """
    measured = [dialect for dialect in dialects.values() if dialect.latencies]
    resolved: list[Objective] = []
    for objective in objectives:
        families: list[str] = []
        for family in objective.families:
            known = [one.latencies[family] for one in measured if family in one.latencies]
            if known:
                families += known
            elif problem := _problem(family, measured, common=common):
                raise ConfigError(f"slo: {objective.name}: {problem}")
            else:
                families.append(family)
        resolved.append(dataclasses.replace(objective, families=tuple(families)))
    return tuple(resolved)


def _problem(family: str, measured: Iterable[Dialect], *, common: bool) -> str:
    """Return why ``family`` cannot be used, and what to do; empty if it can."""
    rows = {row.name: row for one in measured for row in one.rows_for(legacy=True, common=True)}
    row = rows.get(family)
    if row is None or row.kind != "histogram" or not family.endswith("_seconds"):
        return (
            f"{family!r} is no histogram of seconds of {' or '.join(one.title for one in measured)};"
            f" see docs/metrics.md, or use one of {', '.join(LATENCIES)}, which work for all of them"
        )
    if isinstance(row.source, Alias):
        return f"{family} is an old name of {row.source.name}; use that instead"
    if not common and any(row in one.common_rows for one in measured):
        return f"{family} needs --metrics.common"
    return ""
