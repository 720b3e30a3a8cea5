"""Every query of every dashboard, sent to a real Prometheus that scrapes exporters of all engines."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from boards import (
    DASHBOARDS,
    ROOT,
    PanelQuery,
    dashboard,
    families,
    filled,
    panels,
    queries,
)
from dcgm import dcgm_exporter
from fleet import fleet
from markdown_blocks import blocks
from prometheus_server import BINARIES, Prometheus, prometheus
from rulefiles import RULE_FILES, rules

pytestmark = pytest.mark.timeout(1100)

WINDOW = "5m"
"""Rate interval that covers the exporters' whole run, on a slow machine too."""
NATIVE = ("vllm-0", "vllm-3", "sglang-0")
"""Exporters that also run with native histograms only."""

NO_CONNECTOR = "no recorded vLLM had a KV connector"
NO_HICACHE = "no recorded SGLang had a cache in host memory"
NO_SPECULATION = "the recorded SGLang did not speculate"
NO_ADAPTERS = "the recorded SGLang had no adapters"
LESS_THAN_A_MINUTE = "a recording is played in less than a minute"
ONLY_NIXL = "the simulated vLLM that hands requests over has NIXL"
EMPTY = {
    ("Prefix-cache hit rate", "vllm:external_prefix_cache_hits_total"): NO_CONNECTOR,
    ("Prefix-cache hit rate", "vllm:mm_cache_hits_total"): "the recorded model sees no images",
    ("Cached block lifetimes, p50", "sidestep_kv_cached_block_reuse_gap_seconds"): (
        "SGLang does not report hits"
    ),
    ("KV offload traffic", "vllm:kv_offload_store_bytes_total"): NO_CONNECTOR,
    ("KV offload traffic", "vllm:kv_offload_load_bytes_total"): NO_CONNECTOR,
    ("Offload cache usage", "vllm:kv_offload_cpu_cache_usage_perc"): NO_CONNECTOR,
    ("KV cache in host memory, SGLang", "sglang:hicache_host_used_tokens"): NO_HICACHE,
    ("KV cache in host memory, SGLang", "sglang:hicache_host_total_tokens"): NO_HICACHE,
    ("Transfer time, p50 and p95", "vllm:mooncake_xfer_time_seconds"): ONLY_NIXL,
    ("Transfer time, p50 and p95", "vllm:hf3fs_load_duration_seconds"): ONLY_NIXL,
    ("Transferred bytes", "vllm:mooncake_bytes_transferred"): ONLY_NIXL,
    ("Failed transfers", "vllm:mooncake_num_failed_transfers_total"): ONLY_NIXL,
    ("Failed transfers", "vllm:mooncake_num_failed_recvs_total"): ONLY_NIXL,
    ("Failed transfers", "vllm:mooncake_num_kv_expired_reqs_total"): ONLY_NIXL,
    ("Failed transfers", "vllm:hf3fs_num_failed_load_total"): ONLY_NIXL,
    (
        "Rejected messages and items",
        "sidestep_rejected_total",
    ): "the engines send nothing that is refused",
    ("Exporter restarted", "process_start_time_seconds"): "no exporter restarts",
    ("Counter reset", "sidestep_triton_resets_total"): "no Triton restarts",
    ("Acceptance rate", "sglang:spec_accept_rate"): NO_SPECULATION,
    ("Acceptance length", "sglang:spec_accept_length"): NO_SPECULATION,
    ("Saturation of schedulers", "sidestep_saturation_ratio"): LESS_THAN_A_MINUTE,
    ("Saturation by side", "sidestep_saturation_ratio"): LESS_THAN_A_MINUTE,
    ("Adapter slots", "sglang:lora_pool_slots_used"): NO_ADAPTERS,
    ("Adapter slots", "sglang:lora_pool_slots_total"): NO_ADAPTERS,
    ("Waiting tokens that no cache has", "sidestep_waiting_uncached_tokens"): (
        "the recorded SGLang did not send its backlog"
    ),
}
"""Reasons why queries have no data here, by panel and family."""

SILENT = {
    "sidestep_rejected_total": "the engines send nothing that is refused",
    "sidestep_recovered_total": "no snapshot is damaged",
    "sidestep_zap_up": "no keys are needed",
    "sidestep_web_config_current": "there is no web configuration",
}
"""Reasons why families in alerts, or recording rules, have no series here."""


class Scraped:
    """Prometheus servers after the exporters' run, and the time span of the run."""

    def __init__(self, servers: dict[str, Prometheus], start: float, end: float) -> None:
        self.servers, self.start, self.end = servers, start, end

    def answers(self, version: str, expr: str, job: str = "sidestep", instance: str = ".*") -> bool:
        """Return whether a Prometheus has data for a query."""
        asked = filled(expr, __rate_interval=WINDOW, job=job, instance=instance)
        return self.servers[version].answers(asked, self.start, self.end)

    def names(self, version: str, job: str) -> set[str]:
        """Return the names of all scraped samples of a job."""
        match = f'{{job=~"{job}"}}'
        found = self.servers[version].get("label/__name__/values", **{"match[]": match})
        return set(found)


@pytest.fixture(scope="module")
def scraped(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scraped]:
    """Play all recordings twice, scraped before, between and after; then stop the exporters.

    GPUs have the labels of the pods of two of them. The recording with LoRA adapters also plays at its own pace, until every server has seen them.
    """
    directory = tmp_path_factory.mktemp("scraped")
    asked = {
        item.callspec.params.get("version")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    with contextlib.ExitStack() as stack:

        async def play() -> Scraped:
            async with fleet(directory, native=NATIVE) as made:
                urls = made.urls
                gpus = dict.fromkeys(("vllm-0", "sglang-0"), stack.enter_context(dcgm_exporter()))
                targets = {
                    "sidestep": {n: url for n, url in urls.items() if not n.endswith("-native")},
                    "native": {n: url for n, url in urls.items() if n.endswith("-native")},
                    "dcgm": gpus,
                }
                servers = {
                    version: stack.enter_context(
                        prometheus(
                            binary, directory / version, targets, rules=RULE_FILES, interval="2s"
                        )
                    )
                    for version, binary in BINARIES.items()
                    if binary and version in asked
                }
                start = time.time()
                for _ in range(3):
                    now = time.time()
                    for server in servers.values():
                        await asyncio.to_thread(server.scraped, len(urls) + len(gpus), now)
                    if made.rounds < 2:
                        await made.play()
                    if made.rounds == 1:
                        async with made.adapters_running():
                            await _adapters_seen(servers.values())
                await _computed(servers.values())
                return Scraped(servers, start, time.time())

        yield asyncio.run(play())


async def _adapters_seen(servers: Iterable[Prometheus]) -> None:
    """Wait until servers have scraped the series of adapters."""
    for server in servers:
        for state in ("running", "waiting"):
            query = f'sidestep_lora_requests{{job="sidestep",state="{state}"}}'
            await asyncio.to_thread(server.until, query, bool)


async def _computed(servers: Iterable[Prometheus]) -> None:
    """Wait until servers have scraped what an exporter computes every ten seconds, and later than all else."""
    for server in servers:
        for query in (
            "sidestep_kv_whatif_shared_hit_ratio",
            f"increase(sidestep_tenant_request_part_seconds_total[{WINDOW}]) > 0",
        ):
            await asyncio.to_thread(server.until, query, bool)


def reasons(asked: PanelQuery) -> set[tuple[str, str]]:
    """Return the keys of ``EMPTY`` that apply to a query."""
    return {(asked.panel, name) for name in families(asked.expr)} & EMPTY.keys()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_has_data(scraped: Scraped, version: str, path: Path) -> None:
    """Every query has data unless it is listed with a reason, and no listed one has.

    On a slow machine the run takes more than a minute.
    """
    dark = [asked for asked in queries(path) if not scraped.answers(version, asked.expr)]
    listed = [
        asked
        for asked in queries(path)
        if any(EMPTY[key] != LESS_THAN_A_MINUTE for key in reasons(asked))
    ]

    assert [str(asked) for asked in dark if not reasons(asked)] == []
    assert [str(asked) for asked in listed if asked not in dark] == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_series_have_the_labels_of_their_legends(
    scraped: Scraped, version: str, path: Path
) -> None:
    """Only servers with data-parallel ranks have ``dp_rank``, and only replicas ``origin``."""
    server = scraped.servers[version]
    nameless = []
    for panel in panels(dashboard(path)):
        for target in panel["targets"]:
            legends = {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
            legends -= {"dp_rank", "origin"}
            if not legends:
                continue
            expr = filled(target["expr"], __rate_interval=WINDOW, job="sidestep")
            found = [each["metric"] for each in server.range(expr, scraped.start, scraped.end, 1.0)]
            nameless += [
                f"{panel['title']}: {label}: {target['expr']}"
                for label in legends
                if found and not any(label in metric for metric in found)
            ]

    assert nameless == []


def test_queries_have_data_with_native_histograms(scraped: Scraped, version: str) -> None:
    """Queries of histograms also have data where an exporter has native histograms only."""
    there = scraped.names(version, "native")
    asked = [
        one
        for path in DASHBOARDS
        for one in queries(path)
        if "histogram_" in one.expr or "_bucket" in one.expr
        # No SGLang of that exporter is an engine for prefill or decode.
        if families(one.expr) <= there
        and not (path.stem == "service" and "engine_type!" in one.expr)
    ]

    assert not any(name.endswith("_bucket") for name in there)
    assert len(asked) > 100
    assert [str(one) for one in asked if not scraped.answers(version, one.expr, job="native")] == []


def test_queries_of_documents_have_data(scraped: Scraped, version: str) -> None:
    """Over classic histograms as over native ones; no recorded vLLM had a KV connector."""
    asked = [
        (f"{block}: {query}", query)
        for name in ("kv-residency", "questions")
        for block in blocks(ROOT / "docs" / f"{name}.md")
        if block.language == "promql"
        for query in block.text.strip().split("\n\n")
    ]
    dark = [where for where, query in asked if not scraped.answers(version, query)]

    assert len(asked) > 10
    assert [where for where in dark if "kv_offload" not in where] == []


def selectors(expr: str) -> list[str]:
    """Return the selectors of sidestep's and Triton's series in an expression, without windows."""
    return re.findall(r"(?:\b[a-z_]+:[\w:]+|\b(?:sidestep|trtllm|nv)_\w+)(?:\{[^}]*\})?", expr)


@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.stem)
def test_every_rule_has_data(scraped: Scraped, version: str, path: Path) -> None:
    """Prometheus evaluates it; a recording rule has a value, and every selector of an alert data."""
    dark = {
        expr: rule.get("record", rule.get("alert"))
        for rule in rules(path.name)
        for expr in ([rule["expr"]] if "record" in rule else selectors(rule["expr"]))
        if not scraped.answers(version, expr)
    }
    evaluated = [
        rule
        for group in scraped.servers[version].get("rules")["groups"]
        for rule in group["rules"]
        if path.stem in group["file"]
    ]

    assert {
        e: name for e, name in dark.items() if not {e.partition("{")[0], name} & SILENT.keys()
    } == {}
    assert len(evaluated) == len(rules(path.name))
    assert [rule for rule in evaluated if rule.get("lastError") or rule["health"] != "ok"] == []


BOTH = {
    "Running",
    "Waiting",
    "Generation throughput",
    "KV cache usage, max",
    "Prefix-cache hit rate",
}
LIT = {
    "llamacpp-0": {*BOTH, "Engines", "State", "Step age", "Unfinished requests"},
    "trtllm-0": {*BOTH, "TTFT, p95", "E2E latency, p95"},
}
"""Panels of the fleet that have data of an engine that is polled."""


@pytest.mark.parametrize("instance", LIT)
def test_the_fleet_has_data_of_polled_engines(
    scraped: Scraped, version: str, instance: str
) -> None:
    """Of the recorded llama.cpp and of the constructed TensorRT-LLM."""
    (path,) = (path for path in DASHBOARDS if path.stem == "fleet")
    lit = {
        panel["title"]
        for panel in panels(dashboard(path))
        if any(scraped.answers(version, t["expr"], instance=instance) for t in panel["targets"])
    }

    assert LIT[instance] <= lit
