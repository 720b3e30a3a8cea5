"""The dashboard of tenants and cost: what no shown tenant used, and costs of all engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.boards.__main__ import GRAFANA

from boards import filled, queries
from promtool import assert_query, needs_promtool

VLLM = 'job="j",instance="i:9857",model_name="a",engine="0"'
SGLANG = 'job="j",instance="i:9857",model_name="b",engine_type="unified"'
SERIES = {
    # Of 10 requests a minute, shown tenants had 7; those of SGLang count a request with two samples as three.
    f'sidestep_service_requests_total{{{VLLM},reason="stop"}}': 4,
    f'sidestep_service_requests_total{{{VLLM},reason="abort"}}': 1,
    f'vllm:request_success_total{{{VLLM},finished_reason="stop"}}': 8,
    f'sidestep_service_requests_total{{{SGLANG},reason="stop"}}': 3,
    f'sglang:num_requests_total{{{SGLANG},is_streaming="true"}}': 5,
    f'sidestep_tenant_requests_total{{{VLLM},tenant="x"}}': 3,
    f'sidestep_tenant_requests_total{{{VLLM},tenant="__other__"}}': 2,
    f'sidestep_tenant_requests_total{{{SGLANG},tenant="x"}}': 4,
    f'sidestep_tenant_requests_total{{{SGLANG},tenant="__other__"}}': 1,
    # An engine without a tenant that is not shown.
    f'sidestep_tenant_failed_requests_total{{{VLLM},tenant="__other__"}}': 1,
    f"sglang:num_aborted_requests_total{{{SGLANG}}}": 2,
    f'sidestep_tenant_failed_requests_total{{{SGLANG},tenant="x"}}': 2,
    # What came from another engine is in no tenant's cached tokens.
    f'vllm:prompt_tokens_by_source_total{{{VLLM},source="local_cache_hit"}}': 30,
    f'vllm:prompt_tokens_by_source_total{{{VLLM},source="external_kv_transfer"}}': 90,
    f'sidestep_service_prompt_tokens_total{{{VLLM},source="cached"}}': 30,
    f'sidestep_service_prompt_tokens_total{{{SGLANG},source="cached"}}': 20,
    f'sidestep_tenant_cached_prompt_tokens_total{{{VLLM},tenant="x"}}': 10,
    f'sidestep_tenant_cached_prompt_tokens_total{{{SGLANG},tenant="x"}}': 20,
    f"sidestep_service_generation_tokens_total{{{VLLM}}}": 70,
    f"sidestep_service_generation_tokens_total{{{SGLANG}}}": 80,
    f"sidestep_cost_total{{{VLLM}}}": 1,
    f"sidestep_cost_total{{{SGLANG}}}": 2,
}
"""Increases of counters in a minute."""


@needs_promtool
@pytest.mark.parametrize(
    ("panel", "number", "wanted"),
    [
        ("Requests by tenant", 1, {"{}": 3}),
        ("Failed requests by tenant", 1, {"{}": 1}),
        ("Cached prompt tokens by tenant", 1, {"{}": 20}),
        (
            "Cost per 1,000 tokens by model",
            0,
            {'{model_name="a"}': 10 * 60, '{model_name="b"}': 20 * 60},
        ),
    ],
)
def test_all_engines_count_once(
    tmp_path: Path, panel: str, number: int, wanted: dict[str, float]
) -> None:
    """Others have what no shown tenant has, of vLLM and SGLang; a cost has the tokens of its service."""
    path = GRAFANA / "tenants.json"
    expr = [filled(asked.expr) for asked in queries(path) if asked.panel == panel][number]
    series = {name: f"0+{count}x10" for name, count in SERIES.items()}

    asked = f"60 * ({expr.replace('[1m]', '[5m]')})"
    assert_query(tmp_path, series, asked, wanted, interval="1m", at="10m")
