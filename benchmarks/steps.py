"""Engine steps of a chosen size, made from the recorded run that ships with the package.

Scheduler states are the recorded ones. Inter-token latencies, times to first
token and finished requests are drawn at random from the recorded values.

Most latencies of a step are equal: in four recorded runs (3,061 steps of four or more
latencies) 99.7 % of the steps have one value only, in the worst run 98.9 %. Latencies
have three spreads. "recorded": 98.9 % of the steps have one value, in the others one in
five differs. "alike": one in ten differs in every step. "mixed": each is drawn
separately, a worst case that no engine produces.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec

from benchmarks.stat_logger_calls import DATA, calls, to_objects
from sidestep.catalog.buckets import one_two_five
from sidestep.engines.vllm import wire
from sidestep.protocol import iteration_stats
from sidestep.protocol.messages import EngineInfo

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
MAX_MODEL_LEN = 8192
FEATURES = ("kv_cache_metrics", "iteration_details")
"""Options that were on when the run was recorded."""
EVEN_STEPS = 0.989
ODD_SHARE: Mapping[str, float] = {"recorded": 0.2, "alike": 0.1, "mixed": 1.0}
"""Share of the latencies of an uneven step that differ."""
TOKENS_A_REQUEST = 128
"""Steps of a request: in a steady state, one in this many requests ends and starts with a step."""

Drawn = TypeVar("Drawn")
Make = Callable[[dict[str, Any], str], Any]
"""Makes an object of vLLM from its recorded members and its type name."""

_WIRE: Mapping[str, type[msgspec.Struct]] = {
    "PrefixCacheStats": wire.CacheStats,
    "MultiModalCacheStats": wire.CacheStats,
    "SchedulerStats": wire.SchedulerStats,
    "SchedulerIterationDetails": wire.SchedulerIterationDetails,
    "KVCacheEvictionEvent": iteration_stats.KVCacheEvictionEvent,
    "SpecDecodingStats": wire.SpecDecodingStats,
    "CUDAGraphStat": wire.CUDAGraphStat,
    "PerfStats": wire.PerfStats,
    "PromptTokenStats": iteration_stats.PromptTokenStats,
    "FinishedRequestStats": iteration_stats.FinishedRequestStats,
    "IterationStats": iteration_stats.IterationStats,
}
_VLLM_MODULES = (
    "vllm.v1.metrics.stats",
    "vllm.v1.metrics.perf",
    "vllm.v1.spec_decode.metrics",
    "vllm.compilation.cuda_graph",
)


class Steps:
    """A source of steps; each step owns its numbers, like a step of a real engine."""

    def __init__(self, *, real: bool = False, spread: str = "recorded") -> None:
        make = _real() if real else _stand_in()
        found = calls(DATA / "iterations_main.jsonl.gz")
        records = [call.fields for call in found if call.name == "record"]
        self.schedulers = [_build(record["scheduler_stats"], make) for record in records]
        steps = [_build(r["iteration_stats"], make) for r in records if r["iteration_stats"]]
        self._random = Random(1)
        self._step = steps[0]
        self._finished = [request for step in steps for request in step.finished_requests]
        self._latencies = self._endless("inter_token_latencies_iter", steps)
        # The length differs from that of the latencies, so that both do not repeat together.
        share = ODD_SHARE[spread]
        odd = [self._random.random() < share for _ in range((1 << 16) - 15)]
        self._odd = itertools.cycle(odd)
        self._even_steps = EVEN_STEPS if spread == "recorded" else 0.0
        self._first_tokens = self._endless("time_to_first_tokens_iter", steps)

    def _endless(self, name: str, steps: list[Any]) -> Iterator[float]:
        known = [value for step in steps for value in getattr(step, name)]
        return itertools.cycle(self._random.choices(known, k=1 << 16))

    def _drawn_latencies(self, count: int) -> list[float]:
        common = next(self._latencies)
        if self._random.random() < self._even_steps:
            return [common + 0.0 for _ in range(count)]
        drawn = zip(_some(self._latencies, count), _some(self._odd, count), strict=True)
        # Every latency of an engine is an object of its own, not one of a shared pool.
        return [(value if odd else common) + 0.0 for value, odd in drawn]

    def iteration(self, latencies: int, turnover: int) -> Any:
        """Return an IterationStats of ``latencies``; ``turnover`` requests end and as many start."""
        step = copy.copy(self._step)
        prompt = copy.copy(step.prompt_token_stats)
        prompt.computed = prompt.total = 300 * turnover
        step.prompt_token_stats = prompt
        step.num_generation_tokens = latencies + turnover
        step.inter_token_latencies_iter = self._drawn_latencies(latencies)
        step.time_to_first_tokens_iter = list(_some(self._first_tokens, turnover))
        step.finished_requests = [
            copy.copy(request) for request in self._random.choices(self._finished, k=turnover)
        ]
        step.max_num_generation_tokens_iter = [
            request.num_generation_tokens for request in step.finished_requests
        ]
        step.n_params_iter = [1] * turnover
        return step


def engine_info(number: int) -> EngineInfo:
    """Return the description of one engine of a fleet that serves one model."""
    return EngineInfo(
        id=f"bench/{MODEL}/{number}",
        dialect="vllm",
        labels={"engine": str(number), "model_name": MODEL},
        bounds={"request_tokens": list(one_two_five(MAX_MODEL_LEN))},
        features=list(FEATURES),
    )


def _some(source: Iterator[Drawn], count: int) -> Iterator[Drawn]:
    return itertools.islice(source, count)


def _build(value: Any, make: Make) -> Any:
    if isinstance(value, list):
        return [_build(element, make) for element in value]
    if not isinstance(value, dict):
        return value
    members = {key: _build(member, make) for key, member in value.items() if key != "__type__"}
    return make(members, value["__type__"]) if "__type__" in value else members


def _stand_in() -> Make:
    """Return a maker of plain objects with vLLM's attributes and the wire structs' properties."""
    kinds = {
        name: type(
            name,
            (SimpleNamespace,),
            {key: value for key, value in vars(struct).items() if isinstance(value, property)},
        )
        for name, struct in _WIRE.items()
    }

    def make(members: dict[str, Any], name: str) -> Any:
        if name not in kinds:
            return SimpleNamespace(**members)
        known = to_objects({**members, "__type__": name})
        absent = {
            key: value
            for key, value in msgspec.structs.asdict(_WIRE[name]()).items()
            if not hasattr(known, key)
        }
        return kinds[name](**absent, **vars(known))

    return make


def _real() -> Make:
    """Return a maker of objects of vLLM's own classes."""
    modules = [importlib.import_module(name) for name in _VLLM_MODULES if _exists(name)]
    reasons = importlib.import_module("vllm.v1.engine").FinishReason

    def make(members: dict[str, Any], name: str) -> Any:
        kind = next(getattr(module, name) for module in modules if hasattr(module, name))
        found = object.__new__(kind)
        if isinstance(members.get("finish_reason"), str):
            members["finish_reason"] = reasons[members["finish_reason"].upper()]
        for key, member in members.items():
            setattr(found, key, member)
        return found

    return make


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
