"""Every query of every dashboard, sent to a real Prometheus that scrapes exporters of all engines."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tools.screens.answers import Span
from tools.screens.page import page

import peers_boards
from boards import (
    DASHBOARDS,
    ROOT,
    PanelQuery,
    dashboard,
    everything,
    families,
    filled,
    panels,
    queries,
)
from dcgm import dcgm_exporter
from fleet import fleet
from markdown_blocks import Block, blocks
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
                return Scraped(servers, start, time.time())

        yield asyncio.run(play())


async def _adapters_seen(servers: Iterable[Prometheus]) -> None:
    """Wait until servers have scraped the series of adapters."""
    for server in servers:
        for state in ("running", "waiting"):
            query = f'sidestep_lora_requests{{job="sidestep",state="{state}"}}'
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
    """Series have the labels of their legends.

    ``dp_rank`` is exempt: only servers with data-parallel ranks have it.
    """
    server = scraped.servers[version]
    nameless = []
    for panel in panels(dashboard(path)):
        for target in panel["targets"]:
            expr = filled(target["expr"], __rate_interval=WINDOW, job="sidestep")
            found = [each["metric"] for each in server.range(expr, scraped.start, scraped.end, 1.0)]
            nameless += [
                f"{panel['title']}: {label}: {target['expr']}"
                for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
                if label != "dp_rank"
                if found and not any(label in metric for metric in found)
            ]

    assert nameless == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_can_be_drawn(scraped: Scraped, version: str, path: Path) -> None:
    """Every panel is drawn with data, or with its text for no data."""
    board = dashboard(path)
    board["panels"] = everything(board)
    drawn = page(scraped.servers[version], board, Span(scraped.start, scraped.end, 1.0, WINDOW))
    # A table shows the end of the run, when the recorded engines may have lost their gauges on a
    # slow machine; test_every_panel_has_data has seen the data of its queries.
    tables = {panel["title"] for panel in panels(board) if panel["type"] == "table"}
    excused = {title for title, _ in EMPTY} | tables

    assert set(drawn.empty) <= excused
    for panel in panels(board):
        assert (panel["fieldConfig"]["defaults"]["noValue"] in unescape(drawn.html)) >= (
            panel["title"] in drawn.empty
        )


def test_every_reason_belongs_to_a_query() -> None:
    """Every entry of ``EMPTY`` belongs to a query."""
    used = {key for path in DASHBOARDS for asked in queries(path) for key in reasons(asked)}

    assert used == EMPTY.keys()


def test_queries_have_data_with_native_histograms(scraped: Scraped, version: str) -> None:
    """Queries of histograms also have data where an exporter has native histograms only."""
    there = scraped.names(version, "native")
    asked = [
        one
        for path in DASHBOARDS
        for one in queries(path)
        if "histogram_" in one.expr or "_bucket" in one.expr
        if families(one.expr) <= there
    ]

    assert not any(name.endswith("_bucket") for name in there)
    assert len(asked) > 100
    assert [str(one) for one in asked if not scraped.answers(version, one.expr, job="native")] == []


QUERIES = [
    (block, query)
    for name in ("kv-residency", "questions")
    for block in blocks(ROOT / "docs" / f"{name}.md")
    if block.language == "promql"
    for query in block.text.strip().split("\n\n")
]
"""Queries of documents."""


@pytest.mark.parametrize(("block", "query"), QUERIES, ids=str)
def test_queries_of_documents_have_data(
    scraped: Scraped, version: str, block: Block, query: str
) -> None:
    """Every query of these documents has data, over classic histograms as over native ones.

    Queries of a KV connector have none, as no recorded vLLM had one.
    """
    assert scraped.answers(version, query) == ("kv_offload" not in query), f"{block}: {query}"


def selectors(expr: str) -> list[str]:
    """Return the selectors of sidestep's and Triton's series in an expression, without windows."""
    return re.findall(r"(?:\b[a-z_]+:[\w:]+|\b(?:sidestep|trtllm|nv)_\w+)(?:\{[^}]*\})?", expr)


@pytest.mark.parametrize("path", RULE_FILES, ids=lambda path: path.stem)
def test_every_rule_has_data(scraped: Scraped, version: str, path: Path) -> None:
    """Every recording rule has a value, and every selector of an alert has data."""
    dark = {
        expr: rule.get("record", rule.get("alert"))
        for rule in rules(path.name)
        for expr in ([rule["expr"]] if "record" in rule else selectors(rule["expr"]))
        if not scraped.answers(version, expr)
    }

    found = {e: name for e, name in dark.items() if not {e.partition("{")[0], name} & SILENT.keys()}
    assert found == {}


NO_REQUESTS = "llama-server counts no requests and no latencies"
NOT_THERE = "it has no such value"
SCRAPED_ONLY = "its page has no such value, and the exporter knows no state of it"
LESS = "its servers are polled for less than a minute"
ANOTHER = "panels of other servers, or of something that did not happen"
UNLIT = {
    "llamacpp-0": dict.fromkeys(
        [
            ("fleet", "TTFT, p95"),
            ("fleet", "ITL, p95"),
            ("fleet", "E2E latency, p95"),
            ("fleet", "Models: Finished requests"),
            ("latency", "Objectives met"),
            ("latency", "Objectives met, by model"),
            ("latency", "Objectives missed"),
        ],
        NO_REQUESTS,
    )
    | {("fleet", "Preemptions"): NOT_THERE},
    "trtllm-0": dict.fromkeys(
        [
            ("fleet", "Engines"),
            ("fleet", "Engines by state"),
            ("fleet", "ITL, p95"),
            ("fleet", "Preemptions"),
            ("fleet", "Engines down"),
            ("fleet", "Engines by exporter: Last message"),
            ("fleet", "Engines by exporter: Restarts/s"),
            ("fleet", "Engines by exporter: Up"),
            ("fleet", "State"),
            ("fleet", "Step age"),
            ("fleet", "Unfinished requests"),
            ("latency", "Objectives met"),
            ("latency", "Objectives met, by model"),
            ("latency", "Objectives missed"),
        ],
        SCRAPED_ONLY,
    ),
}
"""Panels of the boards for all engines that have no data of an engine that is polled, and why."""
NEVER = dict.fromkeys(
    [
        ("fleet", "Saturation"),
        ("fleet", "Models: Saturation"),
    ],
    LESS,
) | dict.fromkeys(
    [
        ("fleet", "Stalled for"),
        ("fleet", "Triton"),
        ("fleet", "GPU utilization"),
        ("fleet", "GPU memory"),
        ("fleet", "GPU power"),
    ],
    ANOTHER,
)
"""Panels that have no data of either."""


def lit(scraped: Scraped, version: str, path: Path, instance: str) -> dict[tuple[str, str], bool]:
    """Return whether each panel of a board, or column of its tables, has data of one exporter."""
    found: dict[tuple[str, str], bool] = {}
    for panel in panels(dashboard(path)):
        names = columns(panel)
        for target in panel["targets"]:
            title = panel["title"] + names.get(target["refId"], "")
            key = path.stem, title
            found[key] = found.get(key, False) or scraped.answers(
                version, target["expr"], instance=instance
            )
    return found


def columns(panel: dict[str, Any]) -> dict[str, str]:
    """Return the titles of the columns with values of a table, by the letter of their query."""
    return {
        found[1]: f": {name}"
        for each in panel.get("transformations", ())
        for column, name in each["options"].get("renameByName", {}).items()
        if (found := re.fullmatch(r"Value #([A-Z])", column))
    }


@pytest.mark.parametrize("instance", UNLIT)
def test_boards_for_all_engines_have_data_of_polled_ones(
    scraped: Scraped, version: str, instance: str
) -> None:
    """The fleet's panels and the objectives' have data of the recorded llama.cpp and the constructed TensorRT-LLM."""
    boards = {path.stem: path for path in DASHBOARDS}
    found = lit(scraped, version, boards["fleet"], instance) | {
        key: has
        for key, has in lit(scraped, version, boards["latency"], instance).items()
        if key[1].startswith("Objectives")
    }

    dark = {key for key, has in found.items() if not has}
    slow = {key for key, reason in NEVER.items() if reason == LESS}
    # On a slow machine the run takes more than a minute.
    assert dark | slow == UNLIT[instance].keys() | NEVER.keys()


UNRECORDED = {
    "llamacpp": {
        "model:requests:rate5m": NO_REQUESTS,
        "model:requests_aborted:rate5m": NO_REQUESTS,
        "model:requests_aborted:ratio_rate5m": NO_REQUESTS,
        "engine:preemptions:rate5m": NOT_THERE,
    },
    "trtllm": {
        "engine:preemptions:rate5m": NOT_THERE,
        "model:requests_aborted:rate5m": NOT_THERE,
        "model:requests_aborted:ratio_rate5m": NOT_THERE,
        "engine:processed_tokens:rate5m": "nothing on its page moves before a request ends",
    },
}
"""Records that alerts select and vLLM has, without a series of an engine that is polled, and why."""


@pytest.mark.parametrize("dialect", UNRECORDED)
def test_alerts_select_records_of_polled_engines(
    scraped: Scraped, version: str, dialect: str
) -> None:
    """Of the records that alerts select and vLLM has, the recorded llama.cpp and the constructed TensorRT-LLM have all that are not listed."""
    selected = {
        name
        for rule in rules("alerts.yaml")
        if not rule["alert"].startswith("Triton")
        for name in re.findall(r"\b(?:engine|instance|instance_model|model):[\w:]+", rule["expr"])
    }
    dark = {
        name
        for name in selected
        if scraped.answers(version, f'{name}{{dialect="vllm"}}')
        and not scraped.answers(version, f'{name}{{dialect="{dialect}"}}')
    }

    objectives = {name for name in selected if ":slo_" in name}
    assert dark - objectives == UNRECORDED[dialect].keys()
    # Objectives need latencies or counts of requests, and --slo does not replace those of a page.
    replaced = {"model:slo_replaced:rate5m"}
    assert dark & objectives == (objectives if dialect == "llamacpp" else replaced)


PEERS = {
    "aibrix/vllm_engine.json": (37, 37),
    "dcgm/dcgm-exporter.json": (8, 4),
    "dynamo/dcgm-metrics.json": (14, 4),
    "dynamo/disagg-dashboard.json": (25, 2),
    "dynamo/dynamo-cm.yaml": (13, 2),
    "dynamo/dynamo.json": (13, 2),
    "kserve/kserve-epp-all.json": (22, 10),
    "kserve/pd-disaggregation.json": (7, 3),
    "kserve/prefix-caching.json": (18, 3),
    "kserve/routing-load-balancing.json": (5, 2),
    "llm-d/diagnostic-drilldown.json": (14, 12),
    "llm-d/failure-saturation.json": (12, 2),
    "llm-d/pd-coordinator-metrics.json": (32, 32),
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
"""Queries of other projects' dashboards, and how many of them have data.

Of dcgm-exporter's metrics those of its stand-in are there. The others use metrics of a router (production-stack), and one
that no engine has (failure-saturation).
"""
ROUTERS = {
    'avg_over_time(up{job="gaie-optimized-baseline-epp",namespace=~".*"}[5m])',
    'vllm:gpu_prefix_cache_hits_total{endpoint="service-port"} / vllm:gpu_prefix_cache_queries_total',
}
"""Queries that select a router's target by labels, for metrics that engines also have."""


@pytest.mark.parametrize("name", peers_boards.BOARDS)
def test_other_projects_dashboards_have_data(scraped: Scraped, version: str, name: str) -> None:
    """Queries of other projects' dashboards have data wherever an engine has the metrics."""
    asked = peers_boards.queries(peers_boards.BOARDS[name])
    there = scraped.names(version, "sidestep")
    dark = [expr for expr in asked if not scraped.answers(version, expr)]

    assert [e for e in dark if not peers_boards.metrics(e) - there and e not in ROUTERS] == []
    assert (len(asked), len(asked) - len(dark)) == PEERS.get(name, (len(asked), 0))
