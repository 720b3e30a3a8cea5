"""What a KV connector reports, as families: pure translation, without vLLM.

vLLM hands the payload of ``SchedulerStats.kv_connector_stats`` to a class of the
connector, which alone knows what it means; the forms below say the same as those
classes do (0.32 and 0.33). Nothing of a payload is kept: vLLM goes on filling its
lists. What cannot be read is left out. EC connectors need no form: no class of
vLLM exposes ``ec_connector_stats``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from sidestep.catalogue.model import Kind, Row, Sampled
from sidestep.catalogue.vllm_connectors import ROWS, TRANSFER_TYPES
from sidestep.wire.items import Family, Sample
from sidestep.wire.limits import (
    MAX_FAMILIES,
    MAX_LABEL_CHARS,
    MAX_OBSERVATIONS,
    VALUE_LIMIT,
    is_printable,
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

Payload = Mapping[object, object]
Form = Callable[[Payload], Iterator[Family]]
Children = dict[tuple[str, ...], list[float]]
"""What was reported, by own label values in the order of the row's ``own_labels``."""

_ROWS: Final = {row.name: row for row in ROWS}
_NUMBER: Final = (int, float)
_LIST: Final = (list, tuple)
"""Made once: this runs on the engine's serving loop."""
_KINDS: Final[Mapping[str, Kind]] = {
    "counter": "counter",
    "gauge": "gauge",
    "histogram": "histogram",
}
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,127}\Z")

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
_STRANGE_LABELS: Final = tuple(f"label_{number}" for number in range(1, 10))
_STRANGE_SECONDS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
"""What the engine shows where a family names no bounds: those of prometheus_client."""
_STRANGE_SIZES: Final = tuple(float(10**power) for power in range(11))

T = TypeVar("T")


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
        if any("duration_seconds" in record for record in _records(part)):
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
            values = [value for key in keys for value in _numbers(payload.get(key))]
            if values:
                yield from _family(_ROWS[name], {(): values})

    return form


def _store(payload: Payload) -> Iterator[Family]:
    """Mooncake's store: {operation: [record of one call, ...]}."""
    found: dict[str, Children] = {name: {} for name in _STORE_FIELDS}
    for operation, records in payload.items():
        for record in _records(records):
            labels = _label_values((operation, record.get("status")))
            if labels is None:
                continue
            for name, field in _STORE_FIELDS.items():
                # The engine shows all five series from the first call on, zeros too.
                values = found[name].setdefault(labels, [])
                values.extend(_numbers(record.get(field)) if field else (1.0,))
    for name, children in found.items():
        yield from _family(_ROWS[name], children)


def _umbp(payload: Payload) -> Iterator[Family]:
    """UMBP: {operation: {outcome: number}}."""
    for name, field in _UMBP_FIELDS.items():
        children: Children = {}
        for operation, outcomes in payload.items():
            labels = _label_values((operation,))
            if labels is not None and isinstance(outcomes, Mapping):
                children[labels] = _numbers(outcomes.get(field))
        yield from _family(_ROWS[name], children)


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
            row = _ROWS[old]
            of_kind = [data.get(part) if types.get(part) == row.kind else None for part in parts]
            yield from _family(row, _by_direction(of_kind))
    info = _ROWS["vllm:kv_offload_config_info"]
    yield from _family(info, _label_sets(info, payload.get("info")))


def _described(name: str, said: object, values: Payload) -> Iterator[Family]:
    """One family of the self-described form, which names everything but the labels."""
    kind = _KINDS.get(said) if isinstance(said, str) else None
    children = {
        labels: _numbers(value)
        for key, value in values.items()
        if isinstance(key, tuple) and (labels := _label_values(key)) is not None
    }
    if kind is None or not children:
        return
    exposed = name if kind != "counter" or name.endswith("_total") else f"{name}_total"
    row = _ROWS.get(exposed) or _stranger(exposed, kind, len(next(iter(children))))
    if row is None or row.kind != kind:
        return
    own = row.own_labels
    fitting = {labels: found for labels, found in children.items() if len(labels) == len(own)}
    sent = _SENT_ORDER.get(exposed)
    if sent is not None:
        places = [sent.index(label) for label in own]
        fitting = {tuple(labels[at] for at in places): found for labels, found in fitting.items()}
    yield from _family(row, fitting)


def _stranger(name: str, kind: Kind, labels: int) -> Row | None:
    """A row for a family that the catalogue does not know, from a tier or a spec of the user's."""
    countable = (kind == "counter") == name.endswith("_total")
    if not countable or not _NAME.match(name) or labels > len(_STRANGE_LABELS):
        return None
    bounds = _STRANGE_SECONDS if "seconds" in name else _STRANGE_SIZES
    return Row(
        name=name,
        kind=kind,
        source=Sampled(),
        help="Reported by the KV connector of the engine.",
        labels=_STRANGE_LABELS[:labels],
        bounds=bounds if kind == "histogram" else (),
    )


def _by_direction(parts: Iterable[object]) -> Children:
    """What a deprecated family shows: the unlabelled series of loads and of stores."""
    children: Children = {}
    for direction, values in zip(TRANSFER_TYPES, parts, strict=True):
        if isinstance(values, Mapping) and () in values:
            children[(direction,)] = _numbers(values[()])
    return children


def _label_sets(row: Row, info: object) -> Children:
    """The children of an info metric; a label that nobody filled is empty."""
    sets = ([facts.get(name, "") for name in row.own_labels] for facts in _records(info))
    return {labels: [1.0] for each in sets if (labels := _label_values(each)) is not None}


def _family(row: Row, children: Children) -> Iterator[Family]:
    samples: list[Sample] = []
    for labels, values in children.items():
        if row.kind == "histogram":
            samples += [Sample(list(labels), observations=part) for part in _parts(values)]
        elif row.kind == "counter":
            total = math.fsum(value for value in values if value > 0)
            if total <= VALUE_LIMIT:
                samples.append(Sample(list(labels), total))
        elif values:
            samples.append(Sample(list(labels), values[-1]))
    if not samples:
        return
    own = list(row.own_labels)
    for part in _parts(samples):
        if row.name in _ROWS:
            yield Family(row.name, row.kind, own, part)
        else:
            yield Family(row.name, row.kind, own, part, row.help, list(row.bounds))


def _parts(values: list[T]) -> Iterator[list[T]]:
    """``values`` in lists of what the wire takes; of nothing, one empty list."""
    for start in range(0, max(len(values), 1), MAX_OBSERVATIONS):
        yield values[start : start + MAX_OBSERVATIONS]


def _numbers(value: object) -> list[float]:
    """Those of ``value``, one or a list, that are numbers the wire takes."""
    values = value if isinstance(value, _LIST) else (value,)
    return [
        float(each)
        for each in values
        if isinstance(each, _NUMBER) and -VALUE_LIMIT <= each <= VALUE_LIMIT
    ]


def _records(value: object) -> Iterator[Payload]:
    for each in value if isinstance(value, _LIST) else (value,):
        if isinstance(each, Mapping):
            yield each


def _label_values(values: Iterable[object]) -> tuple[str, ...] | None:
    """``values`` as the engine would show them, unless one of them cannot travel."""
    texts = []
    for value in values:
        if isinstance(value, str):
            text = value
        elif isinstance(value, _NUMBER) and -VALUE_LIMIT <= value <= VALUE_LIMIT:
            text = str(value)
        else:
            return None
        if len(text) > MAX_LABEL_CHARS or not is_printable(text):
            return None
        texts.append(text)
    return tuple(texts)


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
