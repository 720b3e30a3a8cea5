"""vLLM's own classes and ours make the same samples of the same payloads.

It runs with the interpreter of vLLM's environment, see ``make test-engines``.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="no vLLM in this environment")

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from sidestep.catalog import buckets
from sidestep.catalog.row import Row
from sidestep.engines.vllm.connector_rows import FRONT_END, ROWS
from sidestep.protocol.self_described import Family
from sidestep_adapters.vllm.connectors import families
from sidestep_adapters.vllm.frontend import FrontendTap

pytestmark = pytest.mark.engine

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
SIMPLE = "vllm.v1.simple_kv_offload.metrics"
ROW = {row.name: row for row in ROWS}
KIND = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def load(module: str, name: str) -> Any:
    """Return a class of vLLM; skip the test if this machine or release has none."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:
        pytest.skip(f"{name}: {error}")


@pytest.fixture
def registry() -> CollectorRegistry:
    """Return an empty registry for vLLM's metrics."""
    return CollectorRegistry()


def metric_types(registry: CollectorRegistry) -> dict[type, Any]:
    """Return prometheus_client's classes, bound to ``registry``, in the form that vLLM takes."""

    def bound(kind: Any) -> Any:
        class Bound(kind):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{"registry": registry, **kwargs})

        Bound.__name__ = kind.__name__
        return Bound

    return {kind: bound(kind) for kind in KIND.values()}


def ours(payloads: list[Any], connector: str) -> Values:
    """Return the samples of our families, counted by prometheus_client in the catalogue's rows."""
    registry = CollectorRegistry()
    metrics: dict[str, Any] = {}
    for payload in payloads:
        for family in families(payload, connector):
            count(metrics, ROW[family.name], family, registry)
    return readings(registry)


def count(metrics: dict[str, Any], row: Row, family: Family, registry: CollectorRegistry) -> None:
    """Count ``family`` in a metric made from ``row``."""
    if family.name not in metrics:
        bounds = row.bounds or buckets.DEFAULTS.get(row.buckets, ())
        options = {"buckets": bounds} if row.kind == "histogram" else {}
        metrics[family.name] = KIND[row.kind](
            family.name, row.help, row.labels, registry=registry, **options
        )
    for sample in family.samples:
        child = metrics[family.name].labels(
            engine="0",
            model_name="a-model",
            **dict(zip(family.labels, sample.labels, strict=True)),
        )
        if row.kind == "counter":
            child.inc(sample.value)
        elif row.kind == "gauge":
            child.set(sample.value)
        for observation in sample.observations:
            child.observe(observation)


def readings(registry: CollectorRegistry) -> Values:
    """Return every sample, without creation times and empty labels."""
    return {
        (reading.name, tuple(sorted(item for item in reading.labels.items() if item[1]))): (
            reading.value
        )
        for metric in registry.collect()
        for reading in metric.samples
        if not reading.name.endswith("_created")
    }


def nonzero(values: Values) -> Values:
    """Return values other than 0."""
    return {key: value for key, value in values.items() if value}


def recorded(stats: Any, *calls: tuple[Any, ...]) -> Any:
    """Return the payload of vLLM's own stats object after ``calls`` of (method, *arguments)."""
    for method, *arguments in calls:
        getattr(stats, method)(*arguments)
    return stats.to_dict() if hasattr(stats, "to_dict") else stats.data


def nixl_payloads() -> list[Any]:
    """Return two steps of vLLM's own NIXL stats."""
    new = load(f"{V1}.nixl.stats", "NixlKVConnectorStats")
    transfer = SimpleNamespace(
        xferDuration=20_000, postDuration=700, totalBytes=1 << 20, descCount=64
    )
    return [
        recorded(
            new(),
            ("record_transfer", transfer),
            ("record_transfer", transfer),
            ("record_failed_transfer",),
            ("record_failed_handshake",),
            ("record_failed_notification",),
        ),
        recorded(
            new(),
            ("record_failed_notification",),
            ("record_kv_expired_req",),
            ("record_notification_after_expiry",),
        ),
    ]


def offload_payloads() -> list[Any]:
    """Return steps of vLLM's own offloading stats, with tiers."""
    new = load(f"{V1}.offloading.metrics", "OffloadingConnectorStats")
    steps = [
        recorded(
            new(),
            ("increase_counter", "vllm:kv_offload_load_bytes", 3_000_000),
            ("increase_counter", "vllm:kv_offload_load_time", 0.25),
            ("observe_histogram", "vllm:kv_offload_load_size", 1_000_000),
            ("observe_histogram", "vllm:kv_offload_load_size", 7_000_000),
            ("increase_counter", "vllm:kv_offload_store_bytes", 500),
            ("increase_counter", "vllm:kv_offload_store_time", 0.5),
            ("observe_histogram", "vllm:kv_offload_store_size", 500),
            ("set_gauge", "vllm:kv_offload_cpu_cache_usage_perc", 0.5),
            ("observe_histogram", "vllm:kv_offload_cpu_allocation_size", 16),
            ("observe_histogram", "vllm:kv_offload_lookup_sync_delay_seconds", 0.002),
            ("increase_counter", "vllm:kv_offload_allocation_failure", 1),
        ),
        recorded(
            new(),
            ("set_gauge", "vllm:kv_offload_cpu_cache_usage_perc", 0.25),
            ("increase_counter", "vllm:kv_offload_tiering_chunk_hits", 2, ("1:fs",)),
            ("increase_counter", "vllm:kv_offload_tiering_chunk_hits", 3, ("0:primary",)),
            ("set_gauge", "vllm:kv_offload_tiering_active_promotion_jobs", 4, ("1:fs",)),
            (
                "observe_histogram",
                "vllm:kv_offload_tiering_lookup_async_delay_seconds",
                0.2,
                ("1:fs",),
            ),
            ("set_gauge", "vllm:kv_offload_tiering_backpressure_store_latency_ema", 0.1, ("1:fs",)),
            ("increase_counter", "vllm:kv_offload_tiering_promotion_allocation_failures", 1),
        ),
    ]
    tiering = load("vllm.v1.kv_offload.tiering.base", "TieringOffloadingMetrics")
    if hasattr(tiering, "PROMOTION_LATENCY"):
        recorded_late = new()
        recorded_late.observe_histogram(tiering.PROMOTION_LATENCY, 0.2, ("1:fs", "success"))
        steps.append(recorded_late.data)
    if hasattr(new, "set_info"):
        informed = new()
        informed.set_info(
            [
                {
                    "cpu_num_chunks": 10,
                    "cpu_blocks_per_chunk": 2,
                    "cpu_kv_cache_size_bytes": 4096,
                    "cpu_kv_cache_size_tokens": "None",
                    "tier": "0:primary",
                },
                {"tier": "1:fs"},
            ]
        )
        steps.append(informed.data)
    return steps


def mooncake_payloads() -> list[Any]:
    """Return a step of vLLM's own Mooncake stats."""
    payload = recorded(
        load(f"{V1}.mooncake.stats", "MooncakeKVConnectorStats")(),
        ("record_transfer", 0.02, 4096, 12),
        ("record_failed_transfer",),
        ("record_failed_transfer",),
        ("record_failed_recv",),
        ("record_kv_expired_req",),
    )
    return [payload, payload]


def store_payloads() -> list[Any]:
    """Return a step of vLLM's own stats of Mooncake's store."""
    stats = load(f"{V1}.mooncake.store.metrics", "MooncakeStoreConnectorStats")()
    stats.record_operation("save_put", 0.5, 3, num_bytes=4096)
    stats.record_operation("save_put", 0.25, 2, num_bytes=1024)
    stats.record_operation("load_get", 2.0, 1, status="error", num_failed_keys=1)
    return [stats.data]


def hf3fs_payloads() -> list[Any]:
    """Return a step of vLLM's own 3FS stats."""
    payload = load(f"{V1}.hf3fs.hf3fs_connector", "HF3FSKVConnectorStats")().data
    payload["save_duration"] += [0.1, 0.2]
    payload["load_duration"] += [0.3]
    payload["num_failed_save"] += 2
    return [payload, payload]


def hisparse_payloads() -> list[Any]:
    """Return a step of vLLM's own HiSparse stats, with evictions from the host."""
    evicted = load("vllm.v1.metrics.stats", "KVCacheEvictionEvent")(
        lifetime_seconds=12.5, idle_seconds=2.5, reuse_gaps_seconds=(0.5, 0.25)
    )
    payload = recorded(
        load(f"{V1}.hisparse.stats", "HiSparseKVConnectorStats")(),
        ("record_snapshot", 10, 2, 4096),
        ("record_snapshot", 5, 1, 0),
        ("record_host_usage", 0.5, 3),
        ("record_host_usage", 0.25, 4),
        ("record_host_evictions", [evicted]),
    )
    return [payload, payload]


def umbp_payloads() -> list[Any]:
    """Return a step of vLLM's own UMBP stats."""
    stats = load(f"{V1}.umbp.stats", "UMBPStoreConnectorStats")()
    stats.record("load", submitted=4, completed=3, failed=1, num_bytes=4096)
    stats.record("save", submitted=2, completed=2, num_bytes=2048)
    return [stats.data, stats.data]


def simple_payloads() -> list[Any]:
    """Return a step of vLLM's own stats of the simple offloading connector."""
    names = load(SIMPLE, "MetricName")
    payload = recorded(
        load(SIMPLE, "SimpleCPUOffloadStats")(),
        ("increase_counter", names.SAVE_OUTCOMES, 4, ("stored",)),
        ("increase_counter", names.SAVE_OUTCOMES, 1, ("dropped_cpu_full",)),
        ("increase_counter", names.LOAD_BLOCKS, 9),
        ("set_gauge", names.USED_BLOCKS, 3),
        ("set_gauge", names.PENDING_STORE_BLOCKS, 0),
        ("set_gauge", names.INFO, 1, ("cpu", "false", "true", "128")),
    )
    return [payload, payload]


CLASSES: dict[str, tuple[str, str, Callable[[], list[Any]]]] = {
    "NixlConnector": (f"{V1}.nixl.stats", "NixlPromMetrics", nixl_payloads),
    "MooncakeConnector": (f"{V1}.mooncake.stats", "MooncakePromMetrics", mooncake_payloads),
    "MooncakeStoreConnector": (
        f"{V1}.mooncake.store.metrics",
        "MooncakeStorePromMetrics",
        store_payloads,
    ),
    "HF3FSKVConnector": (f"{V1}.hf3fs.hf3fs_connector", "HF3FSPromMetrics", hf3fs_payloads),
    "HiSparseConnector": (f"{V1}.hisparse.stats", "HiSparsePromMetrics", hisparse_payloads),
    "UMBPStoreConnector": (f"{V1}.umbp.stats", "UMBPStorePromMetrics", umbp_payloads),
    "OffloadingConnector": (f"{V1}.offloading.metrics", "OffloadPromMetrics", offload_payloads),
    "SimpleCPUOffloadConnector": (SIMPLE, "SimpleCPUOffloadPromMetrics", simple_payloads),
}
"""By connector: vLLM's class of metrics, and steps of its class of stats."""


def native_metrics(connector: str, registry: CollectorRegistry) -> Any:
    """Return vLLM's metrics of ``connector``."""
    module, name, _ = CLASSES[connector]
    extra = {"spec_name": "TieringOffloadingSpec", "store_threshold": 2}
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    config = SimpleNamespace(
        kv_transfer_config=transfer if connector == "OffloadingConnector" else None,
        observability_config=SimpleNamespace(kv_cache_metrics=True, custom_histogram_buckets=None),
    )
    return load(module, name)(
        config, metric_types(registry), ["model_name", "engine"], {0: ["a-model", "0"]}
    )


@pytest.mark.parametrize("connector", CLASSES)
def test_samples_equal_the_engines(registry: CollectorRegistry, connector: str) -> None:
    """Recorded steps of each connector give the same samples."""
    metrics = native_metrics(connector, registry)
    payloads = CLASSES[connector][2]()

    for payload in payloads:
        metrics.observe(copy.deepcopy(payload), 0)
    theirs, mine = readings(registry), ours(payloads, connector)

    # Some classes create series before their first data, others do not.
    assert nonzero(mine) == nonzero(theirs) != {}
    assert mine.keys() <= theirs.keys()


def test_payload_after_the_engine_core() -> None:
    """A payload keeps its meaning over vLLM's own encoding between its processes."""
    codec = importlib.import_module("vllm.v1.serial_utils")
    stats_class = load("vllm.v1.metrics.stats", "SchedulerStats")
    outputs_class = load("vllm.v1.engine", "EngineCoreOutputs")
    payloads = offload_payloads()

    for payload in payloads:
        outputs = outputs_class(scheduler_stats=stats_class(kv_connector_stats=payload))
        sent = codec.MsgpackEncoder().encode(outputs)
        received = codec.MsgpackDecoder(outputs_class).decode(sent)

        arrived = received.scheduler_stats.kv_connector_stats
        assert families(arrived, "OffloadingConnector") == families(payload, "OffloadingConnector")


@pytest.mark.parametrize("connector", CLASSES)
def test_rows_equal_the_engines(registry: CollectorRegistry, connector: str) -> None:
    """Families that a class of vLLM registers are rows, with the same kind, labels and bounds."""
    native_metrics(connector, registry)

    # prometheus_client exposes labels and bounds of a family only with its samples.
    registered = {str(metric): metric for metric in registry._collector_to_names}
    rows = {f"{row.kind}:{row.name.removesuffix('_total')}": row for row in ROWS}
    assert registered
    assert registered.keys() <= rows.keys()
    for key, metric in registered.items():
        row = rows[key]
        assert row.labels == tuple(sorted(vars(metric)["_labelnames"]))
        if row.kind == "histogram":
            bounds = row.bounds or buckets.DEFAULTS[row.buckets]
            assert tuple(vars(metric)["_kwargs"]["buckets"]) == bounds


def test_front_end() -> None:
    """Families that vLLM's front end registers are found in the process registry, with its bounds."""
    sleep = load("vllm.entrypoints.serve.dev.sleep.metrics", "sleep_mode_operation_metrics")
    update = load("vllm.entrypoints.rl.online.metrics", "weight_operation_metrics")
    middleware = load(
        "vllm.entrypoints.speech_to_text.realtime.metrics", "WebSocketMetricsMiddleware"
    )
    load("vllm.parser.metrics", "init_parser_metrics")(model_name="a-model")
    record = load("vllm.parser.metrics", "record_tool_parser_invocation")
    tap = FrontendTap()
    assert middleware
    with sleep().record("sleep"), update().record("update"):
        during = {family.name: family for family in tap.families()}
    record(is_tool_called=True, is_streaming=False, request=None)
    after = {family.name: family for family in tap.families()}

    rows = {row.name: row for row in FRONT_END}
    durations = [name for name in rows if name.endswith("_duration_seconds")]
    assert during.keys() | after.keys() == rows.keys()
    for family in [*during.values(), *after.values()]:
        row = rows[family.name]
        assert (family.kind, family.labels) == (row.kind, list(row.own_labels))
        assert tuple(family.bounds) == row.bounds
    for name in ("sleep_mode_operations", "rl_weight_update_operations"):
        gauge = f"vllm:{name}_in_flight"
        assert [during[gauge].samples[0].value, after[gauge].samples[0].value] == [1.0, 0.0]
    assert [sum(after[name].samples[0].counts) for name in durations if name in after] == [1, 1]
    (parsed,) = after["vllm:tool_call_parser_invocations_total"].samples
    assert (parsed.labels, parsed.value) == (["non_streaming", "tool_call", "other"], 1.0)
    # Each child that the engine creates beforehand was there at 0.
    assert len(during["vllm:tool_call_parser_invocations_total"].samples) == 12
    own = REGISTRY.get_sample_value(
        "vllm:tool_call_parser_invocations_total",
        {
            "model_name": "a-model",
            "mode": "non_streaming",
            "outcome": "tool_call",
            "request_type": "other",
        },
    )
    assert own == 1.0
