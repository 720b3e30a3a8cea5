"""Families of KV connector payloads, with the meaning that vLLM gives them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.connector_rows import ROWS
from sidestep.protocol.self_described import Family, Samples
from sidestep_adapters.vllm.connectors import families

NIXL: dict[str, Any] = {
    "transfer_duration": [0.02, 0.5],
    "post_duration": [0.001, 0.002],
    "bytes_transferred": [4096, 1 << 20],
    "num_descriptors": [12, 300],
    "num_failed_transfers": [1],
    "num_failed_notifications": [1, 1],
    "num_failed_handshakes": [1],
    "num_kv_expired_reqs": [1],
    "num_notifications_after_expiry": [],
}
MOONCAKE: dict[str, Any] = {
    "transfer_duration": [0.02],
    "bytes_transferred": [4096],
    "num_descriptors": [12],
    "num_failed_transfers": [1, 1],
    "num_failed_recvs": [1],
    "num_kv_expired_reqs": [1],
}
HF3FS: dict[str, Any] = {
    "save_duration": [0.1],
    "load_duration": [0.2, 0.3],
    "num_failed_save": 2,
    "num_failed_load": 0,
    "num_transfer_task": 5,
}
HISPARSE: dict[str, Any] = {
    "cache_hits": [10, 5],
    "cache_misses": [1, 2],
    "host_to_device_bytes": [4096, 0],
    "host_cache_usage_perc": [0.25, 0.5],
    "pending_page_transfers": [3, 4],
    "host_block_lifetime_seconds": [12.5],
    "host_block_idle_before_evict_seconds": [2.5],
    "host_block_reuse_gap_seconds": [0.5, 0.25],
}


def put(
    seconds: float, keys: int, size: int, status: str = "ok", failed: int = 0
) -> dict[str, Any]:
    """Return the record of one call of Mooncake's store."""
    numbers = {"duration_seconds": seconds, "num_keys": keys, "num_bytes": size}
    return {**numbers, "status": status, "num_failed_keys": failed}


STORE: dict[str, Any] = {
    "save_put": [put(0.5, 3, 4096), put(0.25, 2, 1024), put(2.0, 1, 0, "error", 1)],
    "load_get": [],
}
UMBP: dict[str, Any] = {
    "load": {"submitted": 4, "completed": 3, "failed": 1, "num_bytes": 4096},
    "save": {"submitted": 2, "completed": 2, "failed": 0, "num_bytes": 2048},
}
OFFLOAD: dict[str, Any] = {
    "types": {
        "vllm:kv_offload_load_bytes": "counter",
        "vllm:kv_offload_load_time": "counter",
        "vllm:kv_offload_load_size": "histogram",
        "vllm:kv_offload_store_bytes": "counter",
        "vllm:kv_offload_cpu_cache_usage_perc": "gauge",
        "vllm:kv_offload_tiering_chunk_hits": "counter",
        "vllm:kv_offload_tiering_promotion_latency_seconds": "histogram",
        "vllm:kv_offload_tiering_active_promotion_jobs": "gauge",
    },
    "data": {
        "vllm:kv_offload_load_bytes": {(): 3_000_000},
        "vllm:kv_offload_load_time": {(): 0.25},
        "vllm:kv_offload_load_size": {(): [1_000_000, 2_000_000]},
        "vllm:kv_offload_store_bytes": {(): 500},
        "vllm:kv_offload_cpu_cache_usage_perc": {(): 0.5},
        "vllm:kv_offload_tiering_chunk_hits": {("0:primary",): 7, ("1:fs",): 2},
        "vllm:kv_offload_tiering_promotion_latency_seconds": {("1:fs", "success"): [0.1, 0.2]},
        "vllm:kv_offload_tiering_active_promotion_jobs": {("1:fs",): 3},
    },
    "info": [
        {
            "cpu_num_chunks": 100,
            "cpu_blocks_per_chunk": 2,
            "cpu_kv_cache_size_bytes": 1 << 30,
            "cpu_kv_cache_size_tokens": "None",
            "tier": "0:primary",
        },
        {"tier": "1:fs", "fs_root": "/somewhere"},
    ],
}
SIMPLE: dict[str, Any] = {
    "types": {
        "vllm:simple_kv_offload_save_outcomes_total": "counter",
        "vllm:simple_kv_offload_load_blocks_total": "counter",
        "vllm:simple_kv_offload_used_blocks": "gauge",
        "vllm:simple_kv_offload_pending_store_blocks": "gauge",
        "vllm:simple_kv_offload_info": "gauge",
    },
    "data": {
        "vllm:simple_kv_offload_save_outcomes_total": {("stored",): 4, ("dropped_cpu_full",): 1},
        "vllm:simple_kv_offload_load_blocks_total": {(): 9},
        "vllm:simple_kv_offload_used_blocks": {(): 3},
        "vllm:simple_kv_offload_pending_store_blocks": {(): 0},
        "vllm:simple_kv_offload_info": {("cpu", "false", "true", "128"): 1},
    },
}
PAYLOADS: dict[str, dict[str, Any]] = {
    "NixlConnector": NIXL,
    "MooncakeConnector": MOONCAKE,
    "HF3FSKVConnector": HF3FS,
    "HiSparseConnector": HISPARSE,
    "MooncakeStoreConnector": STORE,
    "UMBPStoreConnector": UMBP,
    "OffloadingConnector": OFFLOAD,
    "SimpleCPUOffloadConnector": SIMPLE,
    "MultiConnector": {"NixlPullConnector": NIXL, "OffloadingConnector": OFFLOAD},
}
EVERY = pytest.mark.parametrize(("connector", "payload"), PAYLOADS.items(), ids=PAYLOADS)


LOAD, STORED = ("CPU_to_GPU",), ("GPU_to_CPU",)
PUT_OK, PUT_ERROR = ("save_put", "ok"), ("save_put", "error")
EXPECTED: dict[str, dict[str, dict[tuple[str, ...], float | list[float]]]] = {
    "NixlConnector": {
        "nixl_xfer_time_seconds": {(): [0.02, 0.5]},
        "nixl_post_time_seconds": {(): [0.001, 0.002]},
        "nixl_bytes_transferred": {(): [4096.0, 1048576.0]},
        "nixl_num_descriptors": {(): [12.0, 300.0]},
        # Failures of transfers, handshakes and notifications are one counter.
        "nixl_num_failed_transfers_total": {(): 4.0},
        "nixl_num_failed_notifications_total": {(): 2.0},
        "nixl_num_kv_expired_reqs_total": {(): 1.0},
    },
    "MooncakeConnector": {
        "mooncake_xfer_time_seconds": {(): [0.02]},
        "mooncake_bytes_transferred": {(): [4096.0]},
        "mooncake_num_descriptors": {(): [12.0]},
        "mooncake_num_failed_transfers_total": {(): 2.0},
        "mooncake_num_failed_recvs_total": {(): 1.0},
        "mooncake_num_kv_expired_reqs_total": {(): 1.0},
    },
    # Running tasks are not a metric.
    "HF3FSKVConnector": {
        "hf3fs_save_duration_seconds": {(): [0.1]},
        "hf3fs_load_duration_seconds": {(): [0.2, 0.3]},
        "hf3fs_num_failed_save_total": {(): 2.0},
        "hf3fs_num_failed_load_total": {(): 0.0},
    },
    # The last of several readings in one step is a gauge's value.
    "HiSparseConnector": {
        "hisparse_cache_hits_total": {(): 15.0},
        "hisparse_cache_misses_total": {(): 3.0},
        "hisparse_host_to_device_bytes_total": {(): 4096.0},
        "hisparse_host_cache_usage_perc": {(): 0.5},
        "hisparse_pending_page_transfers": {(): 4.0},
        "hisparse_host_block_lifetime_seconds": {(): [12.5]},
        "hisparse_host_block_idle_before_evict_seconds": {(): [2.5]},
        "hisparse_host_block_reuse_gap_seconds": {(): [0.5, 0.25]},
    },
    # A sum of 0 is exposed as well.
    "MooncakeStoreConnector": {
        "mooncake_store_operation_time_seconds": {PUT_OK: [0.5, 0.25], PUT_ERROR: [2.0]},
        "mooncake_store_operation_total": {PUT_OK: 2.0, PUT_ERROR: 1.0},
        "mooncake_store_operation_keys_total": {PUT_OK: 5.0, PUT_ERROR: 1.0},
        "mooncake_store_operation_bytes_total": {PUT_OK: 5120.0, PUT_ERROR: 0.0},
        "mooncake_store_operation_failed_keys_total": {PUT_OK: 0.0, PUT_ERROR: 1.0},
    },
    "UMBPStoreConnector": {
        "umbp_transfer_submitted_total": {("load",): 4.0, ("save",): 2.0},
        "umbp_transfer_completed_total": {("load",): 3.0, ("save",): 2.0},
        "umbp_transfer_failed_total": {("load",): 1.0, ("save",): 0.0},
        "umbp_transfer_bytes_total": {("load",): 4096.0, ("save",): 2048.0},
    },
    # Deprecated families have the direction as a label.
    "OffloadingConnector": {
        "kv_offload_load_bytes_total": {(): 3e6},
        "kv_offload_load_time_total": {(): 0.25},
        "kv_offload_load_size": {(): [1e6, 2e6]},
        "kv_offload_store_bytes_total": {(): 500.0},
        "kv_offload_cpu_cache_usage_perc": {(): 0.5},
        "kv_offload_tiering_chunk_hits_total": {("0:primary",): 7.0, ("1:fs",): 2.0},
        # Sent as tier, result; the row's order is sorted.
        "kv_offload_tiering_promotion_latency_seconds": {("success", "1:fs"): [0.1, 0.2]},
        "kv_offload_tiering_active_promotion_jobs": {("1:fs",): 3.0},
        "kv_offload_total_bytes_total": {LOAD: 3e6, STORED: 500.0},
        "kv_offload_total_time_total": {LOAD: 0.25},
        "kv_offload_size": {LOAD: [1e6, 2e6]},
        "kv_offload_config_info": {
            ("2", "1073741824", "None", "100", "0:primary"): 1.0,
            ("", "", "", "", "1:fs"): 1.0,
        },
    },
    "SimpleCPUOffloadConnector": {
        "simple_kv_offload_save_outcomes_total": {("stored",): 4.0, ("dropped_cpu_full",): 1.0},
        "simple_kv_offload_load_blocks_total": {(): 9.0},
        "simple_kv_offload_used_blocks": {(): 3.0},
        "simple_kv_offload_pending_store_blocks": {(): 0.0},
        # Sent as backend, page_cache, lazy_offload, capacity_blocks.
        "simple_kv_offload_info": {("cpu", "128", "true", "false"): 1.0},
    },
}
"""Values by connector, family and own label values."""


def values_of(found: list[Family]) -> dict[str, dict[tuple[str, ...], float | list[float]]]:
    """Return values or observations by family and own label values."""
    return {
        family.name.removeprefix("vllm:"): {
            tuple(sample.labels): sample.observations
            if family.kind == "histogram"
            else sample.value
            for sample in family.samples
        }
        for family in found
    }


def sent(found: list[Family]) -> list[Family]:
    """Return the families after encoding and decoding."""
    item = DIALECTS.decode(encode_item(Samples(0, 1.0, found)))
    assert isinstance(item, Samples)
    return item.families


@pytest.mark.parametrize("connector", EXPECTED)
def test_payloads_become_families(connector: str) -> None:
    """Lists of a counter are summed, those of a histogram are observations."""
    assert values_of(sent(families(PAYLOADS[connector], connector))) == EXPECTED[connector]


def test_multi_connector() -> None:
    """The payloads behind a MultiConnector are read one after the other."""
    found = families(PAYLOADS["MultiConnector"], "MultiConnector")

    assert found == [*families(NIXL, "NixlConnector"), *families(OFFLOAD, "OffloadingConnector")]


@EVERY
def test_an_unknown_connector_is_recognised_by_its_payload(
    connector: str, payload: dict[str, Any]
) -> None:
    """A connector loaded from the user's module is recognised by its keys."""
    assert families(payload, "MyOwnConnector") == families(payload, connector)


@EVERY
def test_families_are_rows(connector: str, payload: dict[str, Any]) -> None:
    """All families of a known connector are in the catalogue, with the same kind and labels."""
    rows = {row.name: row for row in ROWS}

    for family in families(payload, connector):
        row = rows[family.name]
        assert (family.kind, family.labels) == (row.kind, list(row.own_labels))
        assert (family.help, family.bounds) == ("", [])
        assert all(len(sample.labels) == len(family.labels) for sample in family.samples)


def test_a_family_outside_the_catalogue_describes_itself() -> None:
    """Families of other tiers are sent with help, bounds and numbered labels."""
    payload = {
        "types": {"vllm:kvcr_op_seconds": "histogram", "vllm:kvcr_bytes": "counter"},
        "data": {
            "vllm:kvcr_op_seconds": {("get", "ok"): [0.5]},
            "vllm:kvcr_bytes": {("get",): 10, ("one", "too many"): 1},
        },
    }

    seconds, size = families(payload, "OffloadingConnector")

    assert (seconds.name, seconds.kind) == ("vllm:kvcr_op_seconds", "histogram")
    assert seconds.labels == ["label_1", "label_2"]
    assert seconds.help.endswith(".")
    assert seconds.bounds[0] == 0.005
    assert (size.name, size.labels) == ("vllm:kvcr_bytes_total", ["label_1"])
    assert [(sample.labels, sample.value) for sample in size.samples] == [(["get"], 10.0)]


@pytest.mark.parametrize(
    ("payload", "connector"),
    [
        (None, "NixlConnector"),
        ({}, ""),
        ({"hits": [1, 2]}, "LMCacheMPConnector"),
        ({"transfer_duration": [None, "1", [2.0], float("nan"), float("inf")]}, "NixlConnector"),
        ({"save_put": [{"duration_seconds": 1.0}]}, "MooncakeStoreConnector"),
        ({"save_put": [{"duration_seconds": 1.0, "status": "a\nb"}]}, "MooncakeStoreConnector"),
        ({"load": 3}, "UMBPStoreConnector"),
        ({"types": {"a-b": "gauge"}, "data": {"a-b": {(): 1}}}, "OffloadingConnector"),
        ({"types": {"vllm:a": "gauge"}, "data": {"vllm:a": {"x": 1}}}, "OffloadingConnector"),
        ({"types": {"a_total": "gauge"}, "data": {"a_total": {(): 1}}}, "OffloadingConnector"),
        (
            {
                "types": {"vllm:kv_offload_load_size": "gauge"},
                "data": {"vllm:kv_offload_load_size": {(): 1}},
            },
            "SimpleCPUOffloadConnector",
        ),
        ({"NixlConnector": None, 3: NIXL}, "MultiConnector"),
    ],
)
def test_unreadable_counts_nothing(payload: object, connector: str) -> None:
    """Unreadable values are left out."""
    assert families(payload, connector) == []


numbers = st.integers() | st.floats() | st.booleans() | st.none()
words = st.sampled_from(
    sorted(
        {key for payload in PAYLOADS.values() for key in payload}
        | {"status", "duration_seconds", "num_keys", "submitted", "counter", "gauge", "histogram"}
        | {name for payload in (OFFLOAD, SIMPLE) for name in payload["types"]}
    )
)
keys = words | st.text(max_size=8)
anything = st.recursive(
    numbers | keys,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.lists(keys, max_size=3).map(tuple), inner, max_size=3)
        | st.builds(
            lambda types, data, info: {"types": types, "data": data, "info": info},
            st.dictionaries(words, words, max_size=4),
            st.dictionaries(
                words,
                st.dictionaries(st.lists(keys, max_size=3).map(tuple), inner, max_size=3),
                max_size=4,
            ),
            inner,
        )
    ),
    max_leaves=20,
)


@given(payload=anything, connector=st.sampled_from([*PAYLOADS, "MyOwnConnector"]))
def test_any_payload_is_harmless(payload: object, connector: str) -> None:
    """For any payload the result is a valid item and the payload is untouched."""
    before = copy.deepcopy(payload)

    found = families(payload, connector)

    assert sent(found) == found
    assert repr(payload) == repr(before)
