"""How requests ended, as the objective ``availability`` counts it: from what engines tell anyway."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

from sidestep.catalog.layout import Layout
from sidestep.engines.slo_rows import AVAILABILITY, JUDGED, RESULTS
from sidestep.metrics.engine import Engine, Number
from sidestep.metrics.histogram import Histogram

Counters = Callable[[Sequence[Number | None]], Sequence[Number | None]]
Ended = tuple[Number, Number]
"""Requests that were served, and those that were not."""
KEYS = tuple((result, AVAILABILITY) for result in RESULTS)
FAILED = ("abort", "error")
"""Of vLLM's reasons for an end."""


def settle(engine: Engine) -> None:
    """Bring the objective's counters up to what the engine's own say by now.

    SGLang counts an abort when it is asked for and the request when it ends: what was served cannot
    be taken back meanwhile, since a counter that falls is a new one to Prometheus.
    """
    if engine.objectives is None or not engine.objectives.availability:
        return
    ended = ENDS[engine.layout.dialect](engine) if engine.layout.dialect in ENDS else None
    if ended is None:
        return
    children = engine.keyed[engine.layout.hooks[JUDGED[0]].slots[0]]
    for key, count in zip(KEYS, ended, strict=True):
        if count >= children.get(key, 0):
            children[key] = count


@functools.cache
def _counters(layout: Layout) -> tuple[Counters, Counters]:
    """Of what vLLM's engines have: counts of requests that were served, and of those that were not."""
    ends, rejections = map(
        layout.find, ("vllm:request_success_total", "vllm:admission_rejections_total")
    )
    failed = [ends.slots[ends.row.closed.index(reason)] for reason in FAILED]
    served = [slot for slot in ends.slots if slot not in failed]
    return itemgetter(*served), itemgetter(*failed, *rejections.slots)


def _vllm(engine: Engine) -> Ended:
    # Of a thousand engines between two turns of the loop, so without a step of Python's for each.
    served, failed = _counters(engine.layout)
    values = engine.values
    return sum(filter(None, served(values))), sum(filter(None, failed(values)))


def _sglang(engine: Engine) -> Ended | None:
    """Of a tokenizer: aborted requests are among those that finished."""
    finished, aborted = (
        _total(engine, f"sglang:num_{name}_total") for name in ("requests", "aborted_requests")
    )
    if finished is None and aborted is None:
        return None
    return max((finished or 0) - (aborted or 0), 0), aborted or 0


def _total(engine: Engine, name: str) -> Number | None:
    family = engine.open.get(name)
    if family is None:
        return None
    return sum(n for n in family.children.values() if not isinstance(n, Histogram))


ENDS: Mapping[str, Callable[[Engine], Ended | None]] = {"vllm": _vllm, "sglang": _sglang}
"""By dialect; None where the engine tells of no requests."""
