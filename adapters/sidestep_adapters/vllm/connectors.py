"""Translation of KV connector statistics into families, without vLLM.

vLLM passes ``SchedulerStats.kv_connector_stats`` to a class of the connector, which alone
knows the payload's format; the parsers below match those classes (0.32 and 0.33). No part of
a payload is kept, because vLLM keeps filling its lists. Unreadable values are left out. EC
connectors need no parser: no class of vLLM exposes ``ec_connector_stats``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from sidestep.catalog.row import Kind, Row
from sidestep.engines.vllm.connector_rows import (
    HF3FS,
    HISPARSE,
    MOONCAKE,
    NIXL,
    ROWS,
    TRANSFER_TYPES,
    uncatalogued_row,
)
from sidestep.protocol.limits import (
    MAX_FAMILIES,
    MAX_LABEL_CHARS,
    MAX_OBSERVATIONS,
    VALUE_LIMIT,
    is_printable,
)
from sidestep.protocol.self_described import Family, Sample

Payload = Mapping[object, object]
Children = dict[tuple[str, ...], list[float]]
"""Reported values by own label values, in the order of the row's ``own_labels``."""

_KNOWN: Final = {row.name: row for row in ROWS}
_NUMBER: Final = (int, float)
_LIST: Final = (list, tuple)
"""Tuples for ``isinstance``, made once: it runs for each value."""
PayloadParser = Callable[[Payload], Iterator[Family]]
T = TypeVar("T")

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
_DEPRECATED_OFFLOAD: Final[Mapping[str, tuple[str, str]]] = {
    "vllm:kv_offload_total_bytes_total": (
        "vllm:kv_offload_load_bytes",
        "vllm:kv_offload_store_bytes",
    ),
    "vllm:kv_offload_total_time_total": ("vllm:kv_offload_load_time", "vllm:kv_offload_store_time"),
    "vllm:kv_offload_size": ("vllm:kv_offload_load_size", "vllm:kv_offload_store_size"),
}
"""Deprecated families, and the payload's names for loads and stores that vLLM feeds them from."""
_SENT_ORDER: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm:simple_kv_offload_info": ("backend", "page_cache", "lazy_offload", "capacity_blocks"),
    "vllm:kv_offload_tiering_promotion_latency_seconds": ("tier", "result"),
}
"""Label order of payloads that have label values only, where vLLM's order is not the sorted one."""


def families(payload: object, connector: str) -> list[Family]:
    """Return the families that ``payload`` reports.

    Args:
        payload: ``kv_connector_stats`` of one step; neither changed nor kept.
        connector: ``kv_transfer_config.kv_connector``; for an unknown connector the
            payload's keys select the parser.

    Returns:
        Families with their own labels only. A name may occur twice, from two connectors
        behind a MultiConnector. Empty for an unknown payload.
    """
    return list(_read(payload, connector))[:MAX_FAMILIES]


def _read(payload: object, connector: str) -> Iterator[Family]:
    content = _content(payload)
    if content is None:
        return
    parser = _PARSERS.get(connector) or _find_parser(content)
    if parser is not None:
        yield from parser(content)


def _content(payload: object) -> Payload | None:
    """Return the payload's mapping; behind a MultiConnector, older releases wrap it in an object."""
    if isinstance(payload, Mapping):
        wrapped = payload.get("data") if len(payload) == 1 else None
        return wrapped if isinstance(wrapped, Mapping) else payload
    inner = getattr(payload, "data", None)
    return inner if isinstance(inner, Mapping) else None


def _find_parser(payload: Payload) -> PayloadParser | None:
    if isinstance(payload.get("types"), Mapping) and isinstance(payload.get("data"), Mapping):
        return _parse_self_described
    for key, parser in _DISTINCTIVE_KEYS.items():
        if key in payload:
            return parser
    if any(isinstance(key, str) and key in _PARSERS for key in payload):
        return _parse_multi
    for part in payload.values():
        if isinstance(part, Mapping) and "submitted" in part:
            return _parse_umbp
        if any("duration_seconds" in record for record in _records_of(part)):
            return _parse_mooncake_store
    return None


def _list_parser(prefix: str, rows: Iterable[Row], **keys: Sequence[str]) -> PayloadParser:
    """Return a parser for the format {key: [value, ...]}.

    The lists of a counter contain increments, those of a gauge readings, of which the last counts.

    Args:
        prefix: Prefix of the families' names.
        rows: The families. A family's key is its name without prefix and ``_total``.
        keys: The keys of families that are named otherwise, or have several; by name without prefix.
    """
    names = {row.name.removeprefix(prefix): row for row in rows}
    table = [(row, keys.get(name, [name.removesuffix("_total")])) for name, row in names.items()]

    def parser(payload: Payload) -> Iterator[Family]:
        for row, own in table:
            values = [value for key in own for value in _numbers_of(payload.get(key))]
            if values:
                yield from _families_of(row, {(): values})

    return parser


def _parse_mooncake_store(payload: Payload) -> Iterator[Family]:
    """Parse Mooncake's store: {operation: [record of one call, ...]}."""
    found: dict[str, Children] = {name: {} for name in _STORE_FIELDS}
    for operation, records in payload.items():
        for record in _records_of(records):
            labels = _label_values((operation, record.get("status")))
            if labels is None:
                continue
            for name, field in _STORE_FIELDS.items():
                # vLLM exposes all five series from the first call on, with zeros.
                values = found[name].setdefault(labels, [])
                values.extend(_numbers_of(record.get(field)) if field else (1.0,))
    for name, children in found.items():
        yield from _families_of(_KNOWN[name], children)


def _parse_umbp(payload: Payload) -> Iterator[Family]:
    """Parse UMBP: {operation: {outcome: number}}."""
    for name, field in _UMBP_FIELDS.items():
        children: Children = {}
        for operation, outcomes in payload.items():
            labels = _label_values((operation,))
            if labels is not None and isinstance(outcomes, Mapping):
                children[labels] = _numbers_of(outcomes.get(field))
        yield from _families_of(_KNOWN[name], children)


def _parse_multi(payload: Payload) -> Iterator[Family]:
    """Parse MultiConnector: {connector: its payload}."""
    for connector, part in payload.items():
        if isinstance(connector, str):
            yield from _read(part, connector)


def _parse_self_described(payload: Payload) -> Iterator[Family]:
    """Parse offloading: {types: {name: kind}, data: {name: {label values: value}}, info: [labels]}."""
    types, data = payload.get("types"), payload.get("data")
    if isinstance(types, Mapping) and isinstance(data, Mapping):
        for name, values in data.items():
            if isinstance(name, str) and isinstance(values, Mapping):
                yield from _described_family(name, types.get(name), values)
        for old, parts in _DEPRECATED_OFFLOAD.items():
            row = _KNOWN[old]
            of_kind = [data.get(part) if types.get(part) == row.kind else None for part in parts]
            yield from _families_of(row, _by_direction(of_kind))
    info = _KNOWN["vllm:kv_offload_config_info"]
    yield from _families_of(info, _label_sets(info, payload.get("info")))


def _described_family(name: str, kind_name: object, values: Payload) -> Iterator[Family]:
    """Yield one family of the self-described format, which omits label names only."""
    kind = _KINDS.get(kind_name) if isinstance(kind_name, str) else None
    children = {
        labels: _numbers_of(value)
        for key, value in values.items()
        if isinstance(key, tuple) and (labels := _label_values(key)) is not None
    }
    if kind is None or not children:
        return
    exposed = name if kind != "counter" or name.endswith("_total") else f"{name}_total"
    row = _KNOWN.get(exposed) or uncatalogued_row(exposed, kind, len(next(iter(children))))
    if row is None or row.kind != kind:
        return
    own = row.own_labels
    fitting = {labels: found for labels, found in children.items() if len(labels) == len(own)}
    sent = _SENT_ORDER.get(exposed)
    if sent is not None:
        positions = [sent.index(label) for label in own]
        fitting = {
            tuple(labels[at] for at in positions): found for labels, found in fitting.items()
        }
    yield from _families_of(row, fitting)


def _by_direction(parts: Iterable[object]) -> Children:
    """Return the children of a deprecated family from the unlabelled series of loads and stores."""
    children: Children = {}
    for direction, values in zip(TRANSFER_TYPES, parts, strict=True):
        if isinstance(values, Mapping) and () in values:
            children[(direction,)] = _numbers_of(values[()])
    return children


def _label_sets(row: Row, info: object) -> Children:
    """Return the children of an info metric; a missing label is empty."""
    sets = ([facts.get(name, "") for name in row.own_labels] for facts in _records_of(info))
    return {labels: [1.0] for each in sets if (labels := _label_values(each)) is not None}


def _families_of(row: Row, children: Children) -> Iterator[Family]:
    """Yield the families of ``row``, in parts that fit the wire's limits."""
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
        if row.name in _KNOWN:
            yield Family(row.name, row.kind, own, part)
        else:
            yield Family(row.name, row.kind, own, part, row.help, list(row.bounds))


def _parts(values: list[T]) -> Iterator[list[T]]:
    """Yield ``values`` in lists within the wire's limit; one empty list if there are none."""
    for start in range(0, max(len(values), 1), MAX_OBSERVATIONS):
        yield values[start : start + MAX_OBSERVATIONS]


def _numbers_of(value: object) -> list[float]:
    """Return the numbers in ``value``, a number or a list, that the wire allows."""
    values = value if isinstance(value, _LIST) else (value,)
    return [
        float(each)
        for each in values
        if isinstance(each, _NUMBER) and -VALUE_LIMIT <= each <= VALUE_LIMIT
    ]


def _records_of(value: object) -> Iterator[Payload]:
    """Yield the mappings in ``value``, a mapping or a list."""
    for each in value if isinstance(value, _LIST) else (value,):
        if isinstance(each, Mapping):
            yield each


def _label_values(values: Iterable[object]) -> tuple[str, ...] | None:
    """Return ``values`` as the label values that vLLM exposes; None if one is not allowed."""
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


_NIXL: Final = _list_parser(
    "vllm:nixl_",
    NIXL,
    xfer_time_seconds=["transfer_duration"],
    post_time_seconds=["post_duration"],
    num_failed_transfers_total=[
        "num_failed_transfers",
        "num_failed_handshakes",
        "num_failed_notifications",
    ],
)
_MOONCAKE: Final = _list_parser("vllm:mooncake_", MOONCAKE, xfer_time_seconds=["transfer_duration"])
_HF3FS: Final = _list_parser(
    "vllm:hf3fs_",
    HF3FS,
    save_duration_seconds=["save_duration"],
    load_duration_seconds=["load_duration"],
)
_HISPARSE: Final = _list_parser("vllm:hisparse_", HISPARSE)
_CONNECTORS: Final[Mapping[str, tuple[PayloadParser, str]]] = {
    "NixlConnector": (_NIXL, "nixl"),
    "NixlPullConnector": (_NIXL, "nixl"),
    "NixlPushConnector": (_NIXL, "nixl"),
    "MooncakeConnector": (_MOONCAKE, "mooncake"),
    "MooncakeStoreConnector": (_parse_mooncake_store, ""),
    "HF3FSKVConnector": (_HF3FS, "hf3fs"),
    "HiSparseConnector": (_HISPARSE, "hisparse"),
    "UMBPStoreConnector": (_parse_umbp, ""),
    "OffloadingConnector": (_parse_self_described, "kv_offload"),
    "SimpleCPUOffloadConnector": (_parse_self_described, ""),
    "MultiConnector": (_parse_multi, ""),
}
"""By connector: the parser of its payloads, and its series' ``feature`` in the catalogue, if any."""
_PARSERS: Final = {name: parser for name, (parser, _) in _CONNECTORS.items()}
FEATURES: Final = {name: feature for name, (_, feature) in _CONNECTORS.items() if feature}
"""Features for the Hello, by connector: their series exist before any data."""
CACHES: Final = frozenset({
    "FlexKVConnectorV1", "HF3FSKVConnector", "HiSparseConnector", "LMCacheConnectorV1",
    "LMCacheMPConnector", "MooncakeStoreConnector", "OffloadingConnector",
    "SimpleCPUOffloadConnector", "UMBPStoreConnector",
})  # fmt: skip
"""Connectors to caches; the others transfer the KV of single requests between engines."""
_DISTINCTIVE_KEYS: Final[Mapping[str, PayloadParser]] = {
    "post_duration": _NIXL,
    "num_failed_recvs": _MOONCAKE,
    "save_duration": _HF3FS,
    "cache_hits": _HISPARSE,
}
"""A key that occurs in the payloads of one connector only."""
