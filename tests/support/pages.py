"""Pages parsed by prometheus_client, and the differences between two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]

ENGINES = ("vllm:", "sglang:")
"""Prefixes of engines' own families."""
PROCESS = "pid"
"""A label that prometheus_client adds where several processes make one page."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Type and samples of a family, by sample name and labels."""

    kind: str
    samples: dict[tuple[str, Labels], float]


def parse(text: str) -> dict[str, Family]:
    """Parse a page into families by name, without ``_created`` series."""
    found: dict[str, Family] = {}
    for metric in text_string_to_metric_families(text):
        if metric.name.endswith("_created"):
            continue
        samples = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for s in metric.samples
            if not s.name.endswith("_created")
        }
        found[metric.name] = Family(metric.type, samples)
    return found


def differences(
    engine: Mapping[str, Family], ours: Mapping[str, Family], *, tolerance: float
) -> Iterator[tuple[str, str]]:
    """Yield each family of the engine that differs, and how."""
    for name in ours.keys() - engine.keys():
        if name.startswith(ENGINES):
            yield name, "extra"
    for name, family in engine.items():
        if not name.startswith(ENGINES):
            continue
        mine = ours.get(name)
        if mine is None:
            yield name, "missing"
            continue
        if mine.kind != family.kind:
            yield name, f"type {mine.kind}, not {family.kind}"
        their_samples, our_samples = comparable(family), comparable(mine)
        for key in their_samples.keys() ^ our_samples.keys():
            yield name, f"{'extra' if key in our_samples else 'missing'} sample {key}"
        for key in their_samples.keys() & our_samples.keys():
            theirs, value = their_samples[key], our_samples[key]
            if not math.isclose(theirs, value, rel_tol=tolerance, abs_tol=0.0):
                yield name, f"{key} is {value}, not {theirs}"


def comparable(family: Family) -> dict[tuple[str, Labels], float]:
    """Return a family's samples without labels that carry nothing: empty ones, and ``pid``."""
    found = {
        (name, tuple(pair for pair in labels if pair[1] and pair[0] != PROCESS)): value
        for (name, labels), value in family.samples.items()
    }
    assert len(found) == len(family.samples), family
    return found


async def get(url: str, **headers: str) -> str:
    """Fetch the body at ``url``."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        answer.raise_for_status()
        return await answer.text()
