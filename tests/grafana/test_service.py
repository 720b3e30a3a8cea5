"""The dashboard "Prefill and decode": which engines belong to which side."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.boards.__main__ import GRAFANA

from boards import filled, queries
from promtool import assert_query, needs_promtool

PLACE = 'job="j",instance="i:9857",model_name="m"'
FIRST, SECOND = f'{PLACE},engine="0"', f'{PLACE},engine="0",origin="n/m/0"'
"""Labels of two engines of vLLM at one exporter, which only the origin distinguishes."""
INFO = "sidestep_engine_info"
WAITING, PART = "vllm:num_requests_waiting", "sidestep_request_part_seconds_total"
HANDED_OVER, RECEIVED = (
    f'sidestep_handed_over_requests_total{{{FIRST},reason="length"}}',
    f'sidestep_received_prompt_tokens_total{{{SECOND},source="external_kv_transfer"}}',
)
ROLES = {
    "separate": ({FIRST: "prefill", SECOND: "decode"}, {}),
    # NIXL with kv_both: what they do tells the sides apart.
    "both": ({FIRST: "both", SECOND: "both"}, {HANDED_OVER: "0+60x10", RECEIVED: "0+60x10"}),
}


@needs_promtool
@pytest.mark.parametrize("case", ROLES)
@pytest.mark.parametrize(
    ("panel", "number", "wanted"),
    [
        ("Waiting requests", 0, 3.0),
        ("Waiting requests", 1, 4.0),
        ("Waiting requests", 2, 5.0),
        ("Waiting requests", 3, 6.0),
        ("Time that requests wait for KV", 0, 0.25),
        ("Time that requests wait for KV", 1, 0.5),
    ],
)
def test_sides(tmp_path: Path, case: str, panel: str, number: int, wanted: float) -> None:
    """Engines of vLLM belong to a side by their role or by what they do, those of SGLang by their type."""
    roles, signs = ROLES[case]
    series = {f'{INFO}{{{labels},role="{role}"}}': "1x10" for labels, role in roles.items()}
    # An engine that does both parts itself is on no side.
    whole = f'{PLACE},engine="1"'
    series[f'{INFO}{{{whole},role="both"}}'] = "1x10"
    for labels, count in {FIRST: 3, SECOND: 5, whole: 50}.items():
        series[f"{WAITING}{{{labels}}}"] = f"{count}x10"
        series[f'{PART}{{{labels},part="transfer"}}'] = "0+15x10"
        series[f'{PART}{{{labels},part="decode"}}'] = f"0+{9 * count}x10"
    for role, count in {"prefill": 4, "decode": 6}.items():
        of_type = f'{PLACE},engine_type="{role}"'
        for rank in "01":
            series[f'sglang:num_queue_reqs{{{of_type},tp_rank="{rank}"}}'] = f"{count}x10"
        series[f'{PART}{{{of_type},part="prefill_remote"}}'] = "0+10x10"
        series[f'{PART}{{{of_type},part="decode"}}'] = "0+10x10"
    path = GRAFANA / "service.json"
    expr = [filled(asked.expr) for asked in queries(path) if asked.panel == panel][number]

    look = expr.replace("[1m]", "[5m]")
    assert_query(tmp_path, series | signs, look, {"{}": wanted}, interval="1m", at="10m")
