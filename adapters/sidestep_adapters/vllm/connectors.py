"""What a KV connector reports, as families: pure translation, without vLLM.

vLLM hands the payload of ``SchedulerStats.kv_connector_stats`` to a class of the
connector, which alone knows what it means; the forms below say the same as those
classes do (0.32 and 0.33). Nothing of a payload is kept: vLLM goes on filling its
lists. What cannot be read is left out. EC connectors need no form: no class of
vLLM exposes ``ec_connector_stats``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from sidestep.catalog.model import Kind, Row
from sidestep.engines.vllm.connector_rows import TRANSFER_TYPES
from sidestep.protocol.limits import MAX_FAMILIES
from sidestep.protocol.self_described import Family
from sidestep_adapters.vllm.connector_families import (
    KNOWN,
    Children,
    Payload,
    families_of,
    label_values,
    numbers_of,
    records_of,
    stranger,
)

FEATURES: Final[Mapping[str, str]] = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "NixlPushConnector": "nixl",
    "MooncakeConnector": "mooncake",
    "HF3FSKVConnector": "hf3fs",
    "HiSparseConnector": "hisparse",
    "OffloadingConnector": "kv_offload",
}
"""The catalogue's ``feature`` by connector, for the hello: series that exist before any data."""

Form = Callable[[Payload], Iterator[Family]]

_KINDS: Final[Mapping[str, Kind]] = {
    "counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
}
_STORE_FIELDS: Final[Mapping[str, str]] = {
    "vllm:mooncake_store_operation_time_seconds": "duration_seconds",
    "vllm:mooncake_store_operation_total": "",
    "vllm:mooncake_store_operation_keys_total": "num_keys",
    "vllm:mooncake_store_operation_bytes_total": "num_bytes",
    "vllm:mooncake_store_operation_failed_keys_total": "num_failed_keys",
}
_UMBP_FIELDS: Final[Mapping[str, str]] = {
    "vllm:umbp_transfer_submitted_total": "submitted",
    "vllm:umbp_transfer_completed_total": "completed",
    "vllm:umbp_transfer_failed_total": "failed",
    "vllm:umbp_transfer_bytes_total": "num_bytes",
}
_OLD_OFFLOAD: Final[Mapping[str, tuple[str, str]]] = {
    "vllm:kv_offload_total_bytes_total": (
        "vllm:kv_offload_load_bytes",
        "vllm:kv_offload_store_bytes",
    ),
    "vllm:kv_offload_total_time_total": (
        "vllm:kv_offload_load_time",
        "vllm:kv_offload_store_time",
    ),
    "vllm:kv_offload_size": ("vllm:kv_offload_load_size", "vllm:kv_offload_store_size"),
}
"""Deprecated families, which the engine feeds from the payload's names of loads and of stores."""
_SENT_ORDER: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm:simple_kv_offload_info": ("backend", "page_cache", "lazy_offload", "capacity_blocks"),
    "vllm:kv_offload_tiering_promotion_latency_seconds": ("tier", "result"),
}
"""The payload has label values only, in the engine's order; elsewhere that is the sorted one."""


def families(payload: object, connector: str) -> list[Family]:
    """What ``payload`` reports.

    Args:
        payload: ``kv_connector_stats`` of one step; never changed, never kept.
        connector: ``kv_transfer_config.kv_connector``; where it is none we know,
            the payload's shape decides.

    Returns:
        Families with their own labels only. The same name may come twice, from
        two connectors behind a MultiConnector. Nothing for an unknown payload.
    """
    return list(_read(payload, connector))[:MAX_FAMILIES]


def _read(payload: object, connector: str) -> Iterator[Family]:
    content = _content(payload)
    if content is None:
        return
    form = _FORMS.get(connector) or _recognised(content)
    if form is not None:
        yield from form(content)


def _content(payload: object) -> Payload | None:
    """The payload itself; behind a MultiConnector, older releases send the object around it."""
    if isinstance(payload, Mapping):
        wrapped = payload.get("data") if len(payload) == 1 else None
        return wrapped if isinstance(wrapped, Mapping) else payload
    inner = getattr(payload, "data", None)
    return inner if isinstance(inner, Mapping) else None


def _recognised(payload: Payload) -> Form | None:
    if isinstance(payload.get("types"), Mapping) and isinstance(payload.get("data"), Mapping):
        return _self_described
    for mark, form in _MARKS.items():
        if mark in payload:
            return form
    if any(isinstance(key, str) and key in _FORMS for key in payload):
        return _several
    for part in payload.values():
        if isinstance(part, Mapping) and "submitted" in part:
            return _umbp
        if any("duration_seconds" in record for record in records_of(part)):
            return _store
    return None


def _listed(table: Mapping[str, tuple[str, ...]]) -> Form:
    """The form {key: [value, ...]} of connectors that list what happened.

    Args:
        table: The payload's keys that make each family. The lists of a counter
            hold increments, those of a gauge readings, of which the last is valid.
    """

    def form(payload: Payload) -> Iterator[Family]:
        for name, keys in table.items():
            values = [value for key in keys for value in numbers_of(payload.get(key))]
            if values:
                yield from families_of(KNOWN[name], {(): values})

    return form


def _store(payload: Payload) -> Iterator[Family]:
    """Mooncake's store: {operation: [record of one call, ...]}."""
    found: dict[str, Children] = {name: {} for name in _STORE_FIELDS}
    for operation, records in payload.items():
        for record in records_of(records):
            labels = label_values((operation, record.get("status")))
            if labels is None:
                continue
            for name, field in _STORE_FIELDS.items():
                # The engine shows all five series from the first call on, zeros too.
                values = found[name].setdefault(labels, [])
                values.extend(numbers_of(record.get(field)) if field else (1.0,))
    for name, children in found.items():
        yield from families_of(KNOWN[name], children)


def _umbp(payload: Payload) -> Iterator[Family]:
    """UMBP: {operation: {outcome: number}}."""
    for name, field in _UMBP_FIELDS.items():
        children: Children = {}
        for operation, outcomes in payload.items():
            labels = label_values((operation,))
            if labels is not None and isinstance(outcomes, Mapping):
                children[labels] = numbers_of(outcomes.get(field))
        yield from families_of(KNOWN[name], children)


def _several(payload: Payload) -> Iterator[Family]:
    """MultiConnector: {connector: its payload}."""
    for connector, part in payload.items():
        if isinstance(connector, str):
            yield from _read(part, connector)


def _self_described(payload: Payload) -> Iterator[Family]:
    """Offloading: {types: {name: kind}, data: {name: {label values: value}}, info: [labels]}."""
    types, data = payload.get("types"), payload.get("data")
    if isinstance(types, Mapping) and isinstance(data, Mapping):
        for name, values in data.items():
            if isinstance(name, str) and isinstance(values, Mapping):
                yield from _described(name, types.get(name), values)
        for old, parts in _OLD_OFFLOAD.items():
            row = KNOWN[old]
            of_kind = [data.get(part) if types.get(part) == row.kind else None for part in parts]
            yield from families_of(row, _by_direction(of_kind))
    info = KNOWN["vllm:kv_offload_config_info"]
    yield from families_of(info, _label_sets(info, payload.get("info")))


def _described(name: str, said: object, values: Payload) -> Iterator[Family]:
    """One family of the self-described form, which names everything but the labels."""
    kind = _KINDS.get(said) if isinstance(said, str) else None
    children = {
        labels: numbers_of(value)
        for key, value in values.items()
        if isinstance(key, tuple) and (labels := label_values(key)) is not None
    }
    if kind is None or not children:
        return
    exposed = name if kind != "counter" or name.endswith("_total") else f"{name}_total"
    row = KNOWN.get(exposed) or stranger(exposed, kind, len(next(iter(children))))
    if row is None or row.kind != kind:
        return
    own = row.own_labels
    fitting = {labels: found for labels, found in children.items() if len(labels) == len(own)}
    sent = _SENT_ORDER.get(exposed)
    if sent is not None:
        places = [sent.index(label) for label in own]
        fitting = {tuple(labels[at] for at in places): found for labels, found in fitting.items()}
    yield from families_of(row, fitting)


def _by_direction(parts: Iterable[object]) -> Children:
    """What a deprecated family shows: the unlabelled series of loads and of stores."""
    children: Children = {}
    for direction, values in zip(TRANSFER_TYPES, parts, strict=True):
        if isinstance(values, Mapping) and () in values:
            children[(direction,)] = numbers_of(values[()])
    return children


def _label_sets(row: Row, info: object) -> Children:
    """The children of an info metric; a label that nobody filled is empty."""
    sets = ([facts.get(name, "") for name in row.own_labels] for facts in records_of(info))
    return {labels: [1.0] for each in sets if (labels := label_values(each)) is not None}


_NIXL: Final = _listed(
    {
        "vllm:nixl_xfer_time_seconds": ("transfer_duration",),
        "vllm:nixl_post_time_seconds": ("post_duration",),
        "vllm:nixl_bytes_transferred": ("bytes_transferred",),
        "vllm:nixl_num_descriptors": ("num_descriptors",),
        "vllm:nixl_num_failed_transfers_total": (
            "num_failed_transfers",
            "num_failed_handshakes",
            "num_failed_notifications",
        ),
        "vllm:nixl_num_failed_notifications_total": ("num_failed_notifications",),
        "vllm:nixl_num_kv_expired_reqs_total": ("num_kv_expired_reqs",),
        "vllm:nixl_num_notifications_after_expiry_total": ("num_notifications_after_expiry",),
    }
)
_MOONCAKE: Final = _listed(
    {
        "vllm:mooncake_xfer_time_seconds": ("transfer_duration",),
        "vllm:mooncake_bytes_transferred": ("bytes_transferred",),
        "vllm:mooncake_num_descriptors": ("num_descriptors",),
        "vllm:mooncake_num_failed_transfers_total": ("num_failed_transfers",),
        "vllm:mooncake_num_failed_recvs_total": ("num_failed_recvs",),
        "vllm:mooncake_num_kv_expired_reqs_total": ("num_kv_expired_reqs",),
    }
)
_HF3FS: Final = _listed(
    {
        "vllm:hf3fs_save_duration_seconds": ("save_duration",),
        "vllm:hf3fs_load_duration_seconds": ("load_duration",),
        "vllm:hf3fs_num_failed_save_total": ("num_failed_save",),
        "vllm:hf3fs_num_failed_load_total": ("num_failed_load",),
    }
)
_HISPARSE: Final = _listed(
    {
        "vllm:hisparse_cache_hits_total": ("cache_hits",),
        "vllm:hisparse_cache_misses_total": ("cache_misses",),
        "vllm:hisparse_host_to_device_bytes_total": ("host_to_device_bytes",),
        "vllm:hisparse_host_cache_usage_perc": ("host_cache_usage_perc",),
        "vllm:hisparse_pending_page_transfers": ("pending_page_transfers",),
        "vllm:hisparse_host_block_lifetime_seconds": ("host_block_lifetime_seconds",),
        "vllm:hisparse_host_block_idle_before_evict_seconds": (
            "host_block_idle_before_evict_seconds",
        ),
        "vllm:hisparse_host_block_reuse_gap_seconds": ("host_block_reuse_gap_seconds",),
    }
)
_FORMS: Final[Mapping[str, Form]] = {
    "NixlConnector": _NIXL,
    "NixlPullConnector": _NIXL,
    "NixlPushConnector": _NIXL,
    "MooncakeConnector": _MOONCAKE,
    "MooncakeStoreConnector": _store,
    "HF3FSKVConnector": _HF3FS,
    "HiSparseConnector": _HISPARSE,
    "UMBPStoreConnector": _umbp,
    "OffloadingConnector": _self_described,
    "SimpleCPUOffloadConnector": _self_described,
    "MultiConnector": _several,
}
_MARKS: Final[Mapping[str, Form]] = {
    "post_duration": _NIXL,
    "num_failed_recvs": _MOONCAKE,
    "save_duration": _HF3FS,
    "cache_hits": _HISPARSE,
}
"""A key that only this form has."""
