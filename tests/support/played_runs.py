"""Simulated runs as an exporter counts them: its page over time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from intakes import Fed
from request_runs import BEGIN
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats, VllmStep
from sidestep.exposition.text_page import render
from sidestep.protocol.iteration_stats import (
    FINISH_REASONS,
    FinishedRequestStats,
    IterationStats,
    PromptTokenStats,
)
from sidestep.protocol.messages import FRONT_END, EngineInfo
from sidestep.requests.record import RequestRecord

INTERVAL = 5.0
_SAMPLE = re.compile(r"^(vllm:\S+?_(?:total|bucket|count|sum)\{.*?\}) (\S+)$")


class Played(Fed):
    """An exporter that counts the requests of a run as they end, every five seconds.

    Args:
        begin: Unix time at which the run begins.
        labels: Labels of its engine.
    """

    def __init__(
        self, records: Sequence[RequestRecord], begin: float = BEGIN.timestamp(), **labels: str
    ) -> None:
        super().__init__()
        self._begin = begin
        self.pages: dict[str, list[str]] = defaultdict(list)
        """Lines of the page in OpenMetrics with their times, by the head of their family."""
        info = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m", **labels}, role=FRONT_END)
        self.send_hello("s", [info])
        steps: dict[int, list[RequestRecord]] = defaultdict(list)
        for record in records:
            steps[int((record.time - BEGIN).total_seconds() // INTERVAL)].append(record)
        for number in range(-1, max(steps) + 1):
            self.now += INTERVAL
            # An item holds a few thousand observations.
            ended = [steps[number][at : at + 10] for at in range(0, len(steps[number]), 10)]
            self.items("s", [encode_item(self._step(few)) for few in ended or [[]]])
            self._read()

    def _step(self, ended: Sequence[RequestRecord]) -> VllmStep:
        cached, prompts = (
            sum(getattr(one, f"{kind}_tokens") for one in ended) for kind in ("cached", "prompt")
        )
        iteration = IterationStats(
            num_generation_tokens=sum(one.output_tokens for one in ended),
            num_prompt_tokens=prompts,
            prompt_token_stats=PromptTokenStats(prompts - cached, cached, 0, cached, prompts),
            time_to_first_tokens_iter=[one.ttft_seconds or 0.0 for one in ended],
            inter_token_latencies_iter=[
                one.mean_itl_seconds or 0.0 for one in ended for _ in range(one.output_tokens - 1)
            ],
            finished_requests=[
                FinishedRequestStats(
                    finish_reason=FINISH_REASONS.index(one.reason),
                    e2e_latency=one.e2e_seconds,
                    num_prompt_tokens=one.prompt_tokens,
                    num_generation_tokens=one.output_tokens,
                )
                for one in ended
            ],
        )
        stats = SchedulerStats(
            num_running_reqs=len(ended),
            prefix_cache_stats=CacheStats(queries=prompts, hits=cached),
        )
        return VllmStep(0, self.now, 1.0, stats, iteration)

    def _read(self) -> None:
        head = ""
        for line in render(self.intake.registry, openmetrics=True).decode().splitlines():
            if line.startswith("# TYPE"):
                head = line
            elif sample := _SAMPLE.match(line):
                time = self._begin + self.now
                self.pages[head].append(f"{sample[1]} {sample[2]} {time:.3f}")


def openmetrics(runs: Sequence[Played]) -> Iterator[str]:
    """Yield the lines of the pages of several exporters over time, as promtool reads them."""
    for head in {head: None for run in runs for head in run.pages}:
        yield head
        for run in runs:
            yield from run.pages[head]
