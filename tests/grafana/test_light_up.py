"""Every query of every dashboard is asked of a real Prometheus that scrapes exporters of all engines."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.screens.answers import Span
from tools.screens.page import page

import peers_boards
from boards import DASHBOARDS, ROOT, Asked, dashboard, families, filled, panels, queries
from fleet import fleet
from prometheus_server import BINARIES, Prometheus, prometheus

NATIVE = ("vllm-0", "vllm-3", "sglang-0")
"""Exporters that run once more with native histograms alone."""
RULES = sorted((ROOT / "deploy" / "rules").glob("*.yaml"))

NO_CONNECTOR = "no recorded vLLM had a KV connector"
NO_HICACHE = "no recorded SGLang had a cache in host memory"
NO_SPECULATION = "the recorded SGLang did not speculate"
NO_ADAPTERS = "the recorded SGLang had no adapters"
NO_OVERLOAD = "the recorded SGLang was not asked for more than it could serve"
NOT_SEPARATE = "the recorded SGLang did prefill and decode in one server"
EMPTY = {
    ("Prefix cache hits", "vllm:external_prefix_cache_hits_total"): NO_CONNECTOR,
    ("Prefix cache hits", "vllm:mm_cache_hits_total"): "the recorded model sees no images",
    ("Cached block lifetimes, median", "sidestep_kv_cached_block_reuse_gap_seconds"): (
        "SGLang does not tell of hits"
    ),
    ("Offloaded and brought back", "vllm:kv_offload_store_bytes_total"): NO_CONNECTOR,
    ("Offloaded and brought back", "vllm:kv_offload_load_bytes_total"): NO_CONNECTOR,
    ("Offload cache in use", "vllm:kv_offload_cpu_cache_usage_perc"): NO_CONNECTOR,
    ("Transfers between engines", "vllm:nixl_xfer_time_seconds"): NO_CONNECTOR,
    ("SGLang's cache on the host", "sglang:hicache_host_used_tokens"): NO_HICACHE,
    ("SGLang's cache on the host", "sglang:hicache_host_total_tokens"): NO_HICACHE,
    ("KV transfer", "sglang:kv_transfer_latency_ms"): NOT_SEPARATE,
    ("Refused", "sidestep_rejected_total"): "the engines send nothing that is refused",
    ("Accepted, SGLang", "sglang:spec_accept_rate"): NO_SPECULATION,
    ("SGLang", "sglang:spec_accept_length"): NO_SPECULATION,
    ("Saturation of schedulers", "sidestep_saturation_ratio"): NO_OVERLOAD,
    ("SGLang's slots", "sglang:lora_pool_slots_used"): NO_ADAPTERS,
    ("SGLang's slots", "sglang:lora_pool_slots_total"): NO_ADAPTERS,
}
"""Queries that have no answer here, by title and family, and why."""

SILENT = {
    "sidestep_rejected_total": "the engines send nothing that is refused",
    "sidestep_recovered_total": "no snapshot is damaged",
    "sidestep_zap_up": "no keys are needed",
    "sidestep_web_config_current": "there is no web configuration",
}
"""Families of which alerts ask for series that are not here, and why."""


class Lit:
    """What was scraped, and from when to when."""

    def __init__(self, servers: dict[str, Prometheus], start: float, end: float) -> None:
        self.servers, self.start, self.end = servers, start, end

    def answers(self, version: str, expr: str, job: str = "sidestep") -> bool:
        """Whether a Prometheus has something to show for it."""
        asked = filled(expr, __rate_interval="30s", job=job)
        return self.servers[version].answers(asked, self.start, self.end)

    def names(self, version: str, job: str) -> set[str]:
        """Of all samples that were scraped."""
        match = f'{{job=~"{job}"}}'
        found = self.servers[version].get("label/__name__/values", **{"match[]": match})
        return set(found)


@pytest.fixture(scope="module")
def lit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lit]:
    """Two rounds of all recordings, scraped before, between and after; the exporters are gone then."""
    directory = tmp_path_factory.mktemp("lit")
    with contextlib.ExitStack() as stack:

        async def play() -> Lit:
            async with fleet(directory, native=NATIVE) as made:
                urls = made.urls
                targets = {
                    "sidestep": {n: url for n, url in urls.items() if not n.endswith("-native")},
                    "native": {n: url for n, url in urls.items() if n.endswith("-native")},
                }
                servers = {
                    version: stack.enter_context(
                        prometheus(binary, directory / version, targets, rules=RULES)
                    )
                    for version, binary in BINARIES.items()
                    if binary
                }
                start = time.time()
                for _ in range(3):
                    now = time.time()
                    for server in servers.values():
                        await asyncio.to_thread(server.scraped, len(urls), now)
                    if made.rounds < 2:
                        await made.play()
                return Lit(servers, start, time.time())

        yield asyncio.run(play())


@pytest.fixture(params=BINARIES)
def version(request: pytest.FixtureRequest) -> str:
    """Of a Prometheus that is there."""
    found: str = request.param
    if BINARIES[found] is None:
        pytest.skip(f"there is no Prometheus {found} (make tools)")
    return found


def excuses(asked: Asked) -> set[tuple[str, str]]:
    """Keys of ``EMPTY`` that a query stands under."""
    return {(asked.panel, name) for name in families(asked.expr)} & EMPTY.keys()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_has_data(lit: Lit, version: str, path: Path) -> None:
    """Or is listed with the reason why not; what is listed has none."""
    dark = [asked for asked in queries(path) if not lit.answers(version, asked.expr)]

    assert [str(asked) for asked in dark if not excuses(asked)] == []
    assert [str(a) for a in queries(path) if excuses(a) and a not in dark] == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_series_have_what_they_are_named_by(lit: Lit, version: str, path: Path) -> None:
    """A label that a query's sums leave out would be missing from every name.

    Only servers with data-parallel ranks say which one it is, and not all families have some here.
    """
    server = lit.servers[version]
    nameless = []
    for panel in panels(dashboard(path)):
        for target in panel["targets"]:
            expr = filled(target["expr"], __rate_interval="30s", job="sidestep")
            found = [each["metric"] for each in server.range(expr, lit.start, lit.end, 1.0)]
            nameless += [
                f"{panel['title']}: {label}: {target['expr']}"
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                if label != "dp_rank"
                if found and not any(label in metric for metric in found)
            ]

    assert nameless == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_can_be_drawn(lit: Lit, version: str, path: Path) -> None:
    """With data, or with the reason why there is none."""
    board = dashboard(path)
    drawn = page(lit.servers[version], board, Span(lit.start, lit.end, 1.0))
    # A table has what there is in the end, when no adapter runs any more.
    excused = {title for title, _ in EMPTY} | {"What routers read"}

    assert set(drawn.empty) <= excused
    for panel in panels(board):
        assert (panel["fieldConfig"]["defaults"]["noValue"] in unescape(drawn.html)) >= (
            panel["title"] in drawn.empty
        )


def test_every_excuse_is_somebodys() -> None:
    """No reason stays behind when a panel goes."""
    used = {key for path in DASHBOARDS for asked in queries(path) for key in excuses(asked)}

    assert used == EMPTY.keys()


def test_native_histograms_light_up_as_well(lit: Lit, version: str) -> None:
    """Every query of a family that an exporter of native histograms has."""
    there = lit.names(version, "native")
    asked = [
        one
        for path in DASHBOARDS
        for one in queries(path)
        if "histogram_" in one.expr or "_bucket" in one.expr
        if families(one.expr) <= there
    ]

    assert not any(name.endswith("_bucket") for name in there)
    assert len(asked) > 100
    assert [str(one) for one in asked if not lit.answers(version, one.expr, job="native")] == []


def rules(path: Path) -> list[dict[str, Any]]:
    """Of a file."""
    groups = yaml.safe_load(path.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def selectors(expr: str) -> list[str]:
    """What of Prometheus' series an expression asks for, without windows."""
    return re.findall(r"(?:\b[a-z_]+:[\w:]+|\b(?:sidestep|nv)_\w+)(?:\{[^}]*\})?", expr)


@pytest.mark.parametrize("path", RULES, ids=lambda path: path.stem)
def test_every_rule_has_data(lit: Lit, version: str, path: Path) -> None:
    """A recording rule has a value; of an alert, which is silent by design, all that it asks for has."""
    dark = {
        expr: rule.get("record", rule.get("alert"))
        for rule in rules(path)
        for expr in ([rule["expr"]] if "record" in rule else selectors(rule["expr"]))
        if not lit.answers(version, expr)
    }

    assert {expr: name for expr, name in dark.items() if expr.partition("{")[0] not in SILENT} == {}


PEERS = {
    "aibrix/vllm_engine.json": (37, 37),
    "kserve/kserve-epp-all.json": (22, 10),
    "kserve/pd-disaggregation.json": (7, 3),
    "kserve/prefix-caching.json": (18, 3),
    "kserve/routing-load-balancing.json": (5, 2),
    "llm-d/diagnostic-drilldown.json": (14, 12),
    "llm-d/failure-saturation.json": (12, 2),
    "llm-d/pd-coordinator-metrics.json": (32, 17),
    "llm-d/performance-kv-cache.json": (16, 13),
    "llm-d/sglang-overview.json": (15, 15),
    "production-stack/lmcache-dashboard.json": (6, 1),
    "production-stack/vllm-dashboard.json": (14, 8),
    "production-stack/vllm-model-metrics-dashboard.json": (27, 27),
    "triton/aws.json": (5, 3),
    "triton/gcp.json": (5, 3),
    "triton/k8s-onprem.json": (12, 8),
    "triton/oci.json": (5, 3),
    "vllm/grafana.json": (32, 32),
    "vllm/performance_statistics.json": (21, 21),
    "vllm/performance_statistics.yaml": (26, 26),
    "vllm/query_statistics.json": (14, 14),
    "vllm/query_statistics.yaml": (17, 17),
}
"""Dashboards of others that ask for engines' metrics: their queries, and those with an answer.

As on the engines' own pages, but for three families of a router (production-stack's), one that no engine has
(failure-saturation), and NIXL's, which no recorded engine used (pd-coordinator, 15 queries).
"""
ROUTERS = {
    'avg_over_time(up{job="gaie-optimized-baseline-epp",namespace=~".*"}[5m])',
    'vllm:gpu_prefix_cache_hits_total{endpoint="service-port"} / vllm:gpu_prefix_cache_queries_total',
}
"""Ask a router's target for what engines have under the same name."""


@pytest.mark.parametrize("name", peers_boards.BOARDS)
def test_dashboards_of_others_light_up(lit: Lit, version: str, name: str) -> None:
    """Every query of theirs has data whose metrics an engine has, and only these."""
    asked = peers_boards.queries(peers_boards.BOARDS[name])
    there = lit.names(version, "sidestep")
    dark = [expr for expr in asked if not lit.answers(version, expr)]

    assert [e for e in dark if not peers_boards.metrics(e) - there and e not in ROUTERS] == []
    assert (len(asked), len(asked) - len(dark)) == PEERS.get(name, (len(asked), 0))
