"""Quantiles of classic histograms: properties, and equality with PromQL's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prometheus_server import VERSIONS
from promtool import PROMTOOLS, run
from sidestep.exposition.live.history import histogram_quantile

QUANTILES = (0.001, 0.05, 0.5, 0.9, 0.95, 0.99, 1.0)
BOUNDS = st.lists(
    st.floats(0.001, 1000, allow_nan=False), min_size=1, max_size=12, unique=True
).map(sorted)


@st.composite
def histograms(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Return bounds, and counts per bucket."""
    bounds = draw(BOUNDS)
    size = len(bounds) + 1
    counts = draw(st.lists(st.integers(0, 10**6), min_size=size, max_size=size))
    return bounds, counts


@given(histograms())
def test_a_quantile_is_in_the_bucket_of_its_rank(found: tuple[list[float], list[int]]) -> None:
    """Above the highest bound it is that bound; without observations there is none."""
    bounds, counts = found
    upto = [*accumulate(counts)]
    for quantile in QUANTILES:
        value = histogram_quantile(quantile, bounds, counts)
        if not upto[-1]:
            assert value is None
            continue
        assert value is not None
        bucket = next(n for n, count in enumerate(upto) if count >= quantile * upto[-1])
        low = 0.0 if bucket == 0 else bounds[bucket - 1]
        assert low <= value <= bounds[min(bucket, len(bounds) - 1)] * (1 + 1e-12)


OLD = 10**6
"""Observations before, so many that PromQL extrapolates all buckets by the same factor."""
CASES: Sequence[tuple[list[float], list[int]]] = (
    ([0.1, 0.5, 1.0], [1, 2, 3, 4]),
    ([0.1, 0.5, 1.0], [10, 0, 0, 0]),
    ([0.1, 0.5, 1.0], [0, 0, 7, 0]),
    ([0.1, 0.5, 1.0], [0, 0, 0, 7]),
    ([0.1, 0.5, 1.0], [3, 0, 0, 3]),
    ([2.0], [5, 0]),
    ([0.0, 5.0, 20.0], [4, 1, 9, 0]),
    ([0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08], [17, 901, 3301, 29, 3, 0, 1, 2]),
)


@pytest.mark.parametrize("version", VERSIONS)
def test_quantiles_equal_promql(tmp_path: Path, version: str) -> None:
    """To 1e-9, for empty buckets, one bucket, a bound of 0 and observations above all bounds."""
    binary = PROMTOOLS[version]
    if binary is None:
        pytest.skip(f"there is no promtool {version} (make tools)")
    tests = []
    for bounds, counts in CASES:
        edges = [*map(str, bounds), "+Inf"]
        series = [
            {"series": f'x_bucket{{le="{edge}"}}', "values": f"{OLD} {OLD + count}"}
            for edge, count in zip(edges, accumulate(counts), strict=True)
        ]
        looks = []
        for quantile in QUANTILES:
            wanted = histogram_quantile(quantile, bounds, counts)
            expr = f"histogram_quantile({quantile}, increase(x_bucket[90s])) - {wanted!r}"
            sample = {"labels": "{}", "value": 1}
            looks.append(
                {
                    "expr": f"abs({expr}) < bool 1e-9",
                    "eval_time": "1m",
                    "exp_samples": [sample],
                }
            )
        tests.append({"interval": "1m", "input_series": series, "promql_expr_test": looks})
    file = tmp_path / "test.json"
    file.write_text(json.dumps({"tests": tests}))

    done = run("test", "rules", file, binary=binary)
    assert done.returncode == 0, done.stdout + done.stderr
