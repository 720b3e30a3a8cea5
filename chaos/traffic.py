"""The stream of an engine process: items by number, and the sums of the first ones.

Both follow from the seed alone. The number of items that arrived from each process determines
the whole page, even if the process was killed.
"""

from __future__ import annotations

import dataclasses
from random import Random

from chaos import requests, steps
from chaos.tally import BOUNDS, Tally
from sidestep.engines.items import Item
from sidestep.protocol.messages import EngineInfo

MODEL = "chaos"
PATTERN = ("step",) * 11 + ("requests",) * 4 + ("samples",)
ENGINES = ("0", "1")
"""Label ``engine`` by index in the Hello."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Number of items of each kind."""

    step: int
    requests: int
    samples: int

    @property
    def all(self) -> int:
        """Return the number of all items."""
        return self.step + self.requests + self.samples


class Traffic:
    """The items of one process.

    Args:
        source: Number of the process, which the core's events contain.
    """

    def __init__(self, seed: int, source: int) -> None:
        self.source = source
        random = Random(seed)
        self._pattern = random.sample(PATTERN, len(PATTERN))
        self._ranks = [
            self._pattern[:place].count(kind) for place, kind in enumerate(self._pattern)
        ]
        self._steps = [steps.step(random) for _ in range(steps.STEPS)]
        self._samples = [steps.samples(random) for _ in range(steps.SAMPLES)]
        self._variants = [requests.variant(random) for _ in range(requests.VARIANTS)]

    def item(self, number: int) -> tuple[Item, int]:
        """Return item ``number``, from 0, and its number of inter-token latencies."""
        turn, place = divmod(number, len(PATTERN))
        kind = self._pattern[place]
        ordinal = turn * PATTERN.count(kind) + self._ranks[place]
        if kind == "requests":
            cycle, step = divmod(ordinal, requests.LENGTH)
            chosen = self._variants[cycle % len(self._variants)]
            return requests.item(chosen, cycle, step, self.source), 0
        pool = self._steps if kind == "step" else self._samples
        template = pool[ordinal % len(pool)]
        return steps.stamped(template, number), template.latencies

    def counts(self, items: int) -> Counts:
        """Return how many of the first ``items`` are of each kind."""
        turns, rest = divmod(items, len(PATTERN))
        return Counts(
            *(
                turns * PATTERN.count(kind) + self._pattern[:rest].count(kind)
                for kind in ("step", "requests", "samples")
            )
        )

    def tallies(self, items: int, *, died: bool = False) -> tuple[Tally, Tally]:
        """Return the counts that the first ``items`` add to each engine.

        ``died``: the process was killed after them and another continued, so requests in
        progress have no end.
        """
        counts = self.counts(items)
        front, core = Tally(), Tally()
        for pool, count in ((self._steps, counts.step), (self._samples, counts.samples)):
            turns, rest = divmod(count, len(pool))
            for index, template in enumerate(pool):
                front.add(template.adds, turns + (index < rest))
        cycles, rest = divmod(counts.requests, requests.LENGTH)
        for cycle, times in self._cycles(cycles):
            for place in range(requests.LENGTH):
                core.add(self._adds(cycle, place), times)
        for place in range(rest):
            core.add(self._adds(cycles, place))
        if died:
            core.add(requests.cut_off(rest))
        return front, core

    def _cycles(self, cycles: int) -> list[tuple[int, int]]:
        """Return representative cycles and how many cycles each represents; the first differs from all others."""
        size = len(self._variants)
        alike = [(cycle, len(range(cycle, cycles, size))) for cycle in range(1, 1 + size)]
        return [(0, min(cycles, 1)), *alike]

    def _adds(self, cycle: int, place: int) -> Tally:
        size = len(self._variants)
        before = self._variants[(cycle - 1) % size] if cycle else None
        return requests.adds(self._variants[cycle % size], place, before)


def infos() -> list[EngineInfo]:
    """Return both engines, as the stream announces them."""
    bounds = {
        "request_tokens": list(BOUNDS["request_tokens"]),
        "held_tokens": list(BOUNDS["held_tokens"]),
    }
    features = (["spec_decode"], ["engine_core"])
    return [
        EngineInfo(
            id=f"{MODEL}/{label}",
            dialect="vllm",
            labels={"engine": label, "model_name": MODEL},
            bounds=bounds,
            features=options,
        )
        for label, options in zip(ENGINES, features, strict=True)
    ]
