"""Queries of other projects' dashboards: those that doctor names, and those that a Prometheus cannot answer."""

from __future__ import annotations

import functools
import gzip
import time
from pathlib import Path

import pytest

import peers_boards
from growing_page import growing_page
from prometheus_server import BINARIES, prometheus
from sidestep.catalog.page_reader import samples
from sidestep_tools.doctor.queries.codes import ALWAYS_CONSTANT
from sidestep_tools.doctor.queries.files import Query, queries_of, read
from sidestep_tools.doctor.queries.problems import problems
from sidestep_tools.doctor.queries.reasons import Problem, reason

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not peers_boards.BOARDS, reason="the dashboards are not here"),
]

DATA = Path(__file__).parents[1] / "data"
SCRAPES = 6
OF_TARGETS = (
    'pod=~".*prefill.*"',
    'pod=~".*decode.*"',
    'job="gaie-optimized-baseline-epp"',
    'service=~".*vllm.*"',
)
"""Conditions that a page cannot tell, since targets have these labels."""
SUCCESSORS = {
    "vllm:time_per_output_token_seconds_bucket": "vllm:inter_token_latency_seconds_bucket",
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions": "vllm:num_preemptions_total",
    "sglang:time_to_first_token_seconds_sum": "vllm:time_to_first_token_seconds_sum",
}
"""Some of the names that are not on vLLM's page, and what is."""


def page(name: str) -> str:
    """Return the recorded page of a real engine."""
    return gzip.decompress((DATA / f"page_{name}.txt.gz").read_bytes()).decode()


def named(name: str) -> dict[str, list[Problem]]:
    """Return the queries that doctor says never have a result on a page, with the reasons."""
    why = functools.partial(reason, there=samples(page(name)))
    found = {
        # With a fallback the query has a result all the same.
        query.text: [each for each in problems(query, why) if each.code is not ALWAYS_CONSTANT]
        for query in all_queries()
    }
    return {text: each for text, each in found.items() if each}


def all_queries() -> list[Query]:
    """Return the queries of all dashboards, each once."""
    found = (
        query for path in peers_boards.BOARDS.values() for query in queries_of(read(str(path)))
    )
    return list({query.text: query for query in found}.values())


@pytest.mark.parametrize("name", ["main", "spec", "sglang", "triton"])
def test_queries_that_never_have_a_result(tmp_path: Path, name: str) -> None:
    """At least 95 % of them are named, and no other query is."""
    found, binary = named(name), BINARIES["3"] or BINARIES["2"]
    if binary is None:
        pytest.skip("there is no Prometheus (make tools)")
    with (
        growing_page(page(name)) as url,
        prometheus(binary, tmp_path, {"engine": {"one-0": url}}) as server,
    ):
        start = time.time()
        server.until("count_over_time(up[5m])", lambda counts: counts.get("one-0", 0) >= SCRAPES)
        end = time.time()
        dark = {q.text for q in all_queries() if not server.answers(q.text, start, end)}

    assert found.keys() - dark == set()
    assert len(found.keys() & dark) / len(dark) >= 0.95
    assert [text for text in dark - found.keys() if not any(c in text for c in OF_TARGETS)] == []


def test_successors() -> None:
    """Families with another name are shown with it."""
    reasons = {each.name: each.instead for some in named("main").values() for each in some}
    assert {name: reasons[name] for name in SUCCESSORS} == SUCCESSORS


def test_every_query_is_read() -> None:
    """The reader finds what the tests' own reader finds, with the same metrics."""
    for path in peers_boards.BOARDS.values():
        found = {query.text for query in queries_of(read(str(path)))}
        assert set(peers_boards.queries(path)) <= found
