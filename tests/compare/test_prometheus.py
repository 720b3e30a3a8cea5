"""`sidestep compare` of time ranges of a real Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from aiohttp import web

from command_line import one_line, sidestep
from intakes import Fed
from prometheus_server import BINARIES, Prometheus, prometheus
from promtool import PROMTOOLS
from promtool import run as promtool
from rendered import render
from request_runs import BEGIN, run
from sidestep.catalog.engine_pages import PAGES
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.wire import CacheStats, SchedulerStats, VllmStep
from sidestep.protocol.iteration_stats import (
    FINISH_REASONS,
    FinishedRequestStats,
    IterationStats,
    PromptTokenStats,
)
from sidestep.protocol.messages import FRONT_END, EngineInfo
from sidestep.requests.record import RequestRecord
from web_servers import server as web_server

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
    for head in {head: None for one in runs for head in one.pages}:
        yield head
        for one in runs:
            yield from one.pages[head]


HOUR = 3600
RUNS: dict[str, dict[str, Any]] = {
    "before": {},
    "after": {},
    "slower": {"slower": 1.5},
    "longer": {"longer": 2.0},
}
LENGTH = 300
"""Seconds of a run, at ten requests a second."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run a Prometheus that has scraped one run an hour, of an engine of another pod each time."""
    if BINARIES["3"] is None:
        pytest.skip("there is no Prometheus 3 (make tools)")
    folder = tmp_path_factory.mktemp("prometheus")
    played = [
        Played(run(number, 10 * LENGTH, **more), BEGIN.timestamp() + number * HOUR, pod=name)
        for number, (name, more) in enumerate(RUNS.items())
    ]
    (folder / "pages.txt").write_text(
        "\n".join([*openmetrics(played), *own_families(), "# EOF", ""])
    )
    made = promtool(
        "tsdb", "create-blocks-from", "openmetrics", folder / "pages.txt", folder / "tsdb",
        binary=PROMTOOLS["3"],
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    with prometheus(BINARIES["3"], folder, {}) as found:
        yield found


def own_families() -> Iterator[str]:
    """Yield the exporter's families of parts and limits: blocks of the cache are short in one run."""
    per_second = {
        "sidestep_request_part_seconds": {
            'part="prefill",limit=""': dict.fromkeys(RUNS, 1.0),
            'part="queue",limit="kv_blocks"': {"slower": 2.0},
        },
        "sidestep_step_limit_seconds": {
            'limit="none"': {"before": 1.0, "slower": 0.25},
            'limit="kv_blocks"': {"slower": 0.75},
        },
    }
    for family, children in per_second.items():
        yield f"# TYPE {family} counter"
        for labels, rates in children.items():
            for name, rate in rates.items():
                for second in range(0, LENGTH + 10, int(INTERVAL)):
                    time = BEGIN.timestamp() + [*RUNS].index(name) * HOUR + second
                    yield f'{family}_total{{{labels},pod="{name}"}} {rate * second} {time}'


def at(server: Prometheus, name: str, labels: str = "") -> str:
    """Return the source of a run's time range, which begins with the first scrape."""
    start = int(BEGIN.timestamp()) + [*RUNS].index(name) * HOUR + INTERVAL
    return f"{server.url}{labels}@{start}/{start + LENGTH}"


def compare(*arguments: object) -> CompletedProcess[str]:
    """Run the command."""
    return sidestep("compare", *arguments)


@pytest.mark.parametrize(
    ("other", "code", "verdict"),
    [
        ("before", 0, "no difference seen"),
        ("after", 0, "no difference seen"),
        ("slower", 1, "worse"),
        ("longer", 3, "not comparable"),
    ],
)
def test_two_ranges(server: Prometheus, other: str, code: int, verdict: str) -> None:
    """Means are exact, so that they show what lies within a bucket."""
    done = compare(at(server, "before"), at(server, other), "--json")

    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert (found["verdict"], done.returncode) == (verdict, code), found["reason"]
    rows = {row["quantity"]: row for row in found["rows"]}
    records = run(0, 10 * LENGTH)
    means: dict[str, list[float]] = {
        "prompt tokens, mean": [one.prompt_tokens for one in records],
        "output tokens, mean": [one.output_tokens for one in records],
        "TTFT, mean": [one.ttft_seconds or 0.0 for one in records],
        "e2e, mean": [one.e2e_seconds or 0.0 for one in records],
    }
    for name, values in means.items():
        assert rows[name]["a"][0] == pytest.approx(sum(values) / len(values), rel=0.02)
    assert rows["requests/s"]["a"][0] == pytest.approx(10, rel=0.1)
    if other == "slower":
        _, low, high = rows["TTFT, mean"]["change"]
        assert low < 0.5 < high


def test_records_and_a_range(server: Prometheus, tmp_path: Path) -> None:
    """Quantities that the log and the histograms both have are compared."""
    from request_runs import write  # noqa: PLC0415

    log = write(tmp_path / "log.jsonl", run(0, 10 * LENGTH))
    done = compare(log, at(server, "before"))

    assert done.returncode == 0, done.stdout
    assert "TTFT p95" in done.stdout
    assert "ITL" not in done.stdout


def test_parts_and_limits(server: Prometheus) -> None:
    """Seconds of a request, and shares of the busy time; what one run never had is 0."""
    done = compare(at(server, "before"), at(server, "slower"), "--json")

    rows = {(row["section"], row["quantity"]): row for row in json.loads(done.stdout)["rows"]}
    part, limit = "seconds of a request", "share of the busy time"
    assert rows[part, "prefill"]["b"][0] == pytest.approx(0.1, rel=0.1)
    assert rows[part, "queue.kv_blocks"]["change"][0] == pytest.approx(0.2, rel=0.1)
    assert rows[limit, "kv_blocks"]["change"][0] == pytest.approx(0.75)
    assert rows[limit, "none"]["change"][0] == pytest.approx(-0.75)


def test_errors_are_one_line(server: Prometheus) -> None:
    """No data, no such series, too short, and a selector that Prometheus refuses."""
    before = at(server, "before")
    one_line(compare(f"{server.url}@-2h/-1h", before), 2, "no data of vLLM, SGLang")
    one_line(compare(at(server, "before", "{pod=x}"), before), 2, "no data of vLLM")
    short = f"{server.url}@{BEGIN.timestamp() + 20:.0f}/{BEGIN.timestamp() + 25:.0f}"
    one_line(compare(short, before), 2, "fewer than 4 scrapes")
    one_line(compare(server.url, before), 2, "of a Prometheus give a time range")
    one_line(compare(f"{server.url}/none@-1h/now", before), 2, "HTTP 404")


async def test_an_answer_of_another_kind_is_one_line() -> None:
    """Numbers that are none, and labels that are no bounds."""
    values = [[BEGIN.timestamp() + 60, "x"]]

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"data": {"result": [{"metric": {}, "values": values}]}})

    async with web_server(answer, "/api/v1/query_range") as url:
        source = f"{url}@{BEGIN.timestamp():.0f}/{BEGIN.timestamp() + 60:.0f}"
        done = await asyncio.to_thread(compare, source, source)
    one_line(done, 2, "could not convert string to float: 'x'")


def test_the_lengths_are_families_of_the_engines() -> None:
    """The table of pages names histograms that the dialects have."""
    for page in PAGES:
        if page.lengths:
            names = {row.name for row in DIALECTS[page.dialect].rows if row.kind == "histogram"}
            assert {*page.lengths.values()} <= names
