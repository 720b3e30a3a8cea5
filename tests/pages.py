"""Pages as values, read by prometheus_client's own parser, and what differs between two."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """TYPE and samples of a family, by sample name and labels."""

    kind: str
    samples: dict[tuple[str, Labels], float]


def parse(text: str) -> dict[str, Family]:
    """Families by name, ``_created`` ones left out."""
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
    engine: dict[str, Family], ours: dict[str, Family], *, tolerance: float
) -> Iterator[tuple[str, str]]:
    """Family and what is different, for every family that either page has of the engine's."""
    for name in ours.keys() - engine.keys():
        if name.startswith("vllm:"):
            yield name, "extra"
    for name, family in engine.items():
        if not name.startswith("vllm:"):
            continue
        mine = ours.get(name)
        if mine is None:
            yield name, "missing"
            continue
        if mine.kind != family.kind:
            yield name, f"type {mine.kind}, not {family.kind}"
        for key in family.samples.keys() ^ mine.samples.keys():
            yield name, f"{'extra' if key in mine.samples else 'missing'} sample {key}"
        for key in family.samples.keys() & mine.samples.keys():
            theirs, value = family.samples[key], mine.samples[key]
            if not math.isclose(theirs, value, rel_tol=tolerance, abs_tol=0.0):
                yield name, f"{key} is {value}, not {theirs}"


async def get(url: str, **headers: str) -> str:
    """The body at ``url``."""
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        assert answer.status == 200
        return await answer.text()
