"""Real runs of SGLang recorded through its plugin, against the pages that it served after them."""

from __future__ import annotations

import pytest

from exporters import Start, page_of_engine
from pages import get, parse
from replays import replay
from sglang_pages import differences

TOLERANCE = 1e-9
"""Relative. Sums of floats are added per batch here, one by one in the engine."""
RUNS = {
    "sglang": ("sglang:num_retracted_requests", "engine_type", {"unified"}),
    "sglang_dp": ("sglang:realtime_tokens", "dp_rank", {"0", "1"}),
    "sglang_labels": ("sglang:num_requests", "team", {"", "red", "blue"}),
}
"""By name: a family, a label of it and its values that the run is there for."""


def different(run: str, page: str) -> list[tuple[str, str]]:
    """Return how ``page`` differs from the engine's after ``run``, beyond what is allowed."""
    engines = parse(page_of_engine(f"page_{run}"))
    return list(differences(engines, parse(page), engines, TOLERANCE))


@pytest.mark.parametrize("run", RUNS)
async def test_page_equals_the_engines(run: str, start: Start) -> None:
    """Every family, label set, bucket and value of SGLang's page is on ours, and no more."""
    async with start() as exporter:
        await replay(exporter, run, "golden")
        page = await get(exporter.url)

    family, label, values = RUNS[run]
    ours = parse(page)
    assert [] == different(run, page)
    assert values == {dict(labels).get(label, "") for _, labels in ours[family].samples}
    assert all(ours[family].samples.values())
    assert len([name for name in ours if name.startswith("sglang:")]) > 80
