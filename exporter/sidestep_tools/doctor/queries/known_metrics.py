"""Facts of the catalogue about a metric's name: kind, labels, successor, and the option that brings it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sidestep.catalog.engine_pages import PAGES
from sidestep.catalog.model import Kind, Row
from sidestep.catalog.slo import SLO_REQUESTS, SLO_UNDECIDED
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.sglang.legacy_rows import LOST
from sidestep.telemetry.rows import ROWS as SELF_ROWS

LEGACY, COMMON, SLO = "--metrics.legacy", "--metrics.common", "--slo"
TENANTS = "--tenants.by"
"""Flags of the exporter that add families."""
EXPORTERS: Mapping[str, str] = {
    "DCGM_": "NVIDIA's dcgm-exporter",
    "kube_": "kube-state-metrics",
    "container_": "the kubelet (cAdvisor)",
    "node_": "the node exporter",
    "keda_": "KEDA's operator",
    "dynamo_": "NVIDIA Dynamo",
    "kvbm_": "NVIDIA Dynamo",
    "lmcache:": "LMCache",
    "lmcache_": "LMCache",
    "inference_": "the endpoint picker of the Gateway API inference extension",
    "llm_d_": "llm-d's router",
    "router_": "production-stack's router",
    "vllm:current_qps": "production-stack's router",
    "vllm:healthy_pods_total": "production-stack's router",
    "vllm:num_incoming_requests_total": "production-stack's router",
    "http_": "the API server of an engine, on the engine's own page",
    "nv_gpu_": "Triton's own page",
    "nv_cpu_": "Triton's own page",
    "nv_": "Triton's own page",
    "trtllm_": "TensorRT-LLM",
    "llamacpp:": "llama.cpp",
    "istio_": "Istio",
    "envoy_": "Envoy",
    "apiserver_": "Kubernetes' API server",
}
"""Where other metrics come from, by the beginning of their names; the first that fits counts."""
PREFIXES: Mapping[str, str] = {
    **{page.prefix: page.dialect for page in PAGES if page.dialect != "triton"},
    "sidestep_": "exporter",
}
"""Beginnings of names that only the catalogue's metrics have, and their dialects."""
TITLES: Mapping[str, str] = {
    **{page.dialect: page.title for page in PAGES},
    **{name: dialect.title for name, dialect in DIALECTS.items()},
}
"""Names of engines for people, by dialect."""
TARGET_LABELS = frozenset(
    (
        "job", "instance", "namespace", "pod", "container", "service", "endpoint", "cluster", "node",
        "component", "name", "id", "type", "version", "region", "zone", "app", "env", "model",
    )
)  # fmt: skip
"""Labels that service discovery often adds, so that no metric is known to lack them."""
SUFFIXES = ("_bucket", "_sum", "_count")


class Metric(NamedTuple):
    """One name of samples.

    Attributes:
        dialects: The dialects that have it; ``exporter`` for the exporter's own.
        needs: What brings it; empty: nothing special.
        flag: The exporter's flag without which it is hidden.
        successor: The name or expression to use instead of a former name.
        until: Last release with a former name.
    """

    name: str
    family: str
    kind: Kind
    labels: frozenset[str]
    dialects: frozenset[str]
    needs: str = ""
    flag: str = ""
    successor: str = ""
    since: str = ""
    until: str = ""

    @property
    def suffix(self) -> str:
        """``_bucket``, ``_sum`` or ``_count`` of a histogram; else empty."""
        return self.name[len(self.family) :]


@functools.cache
def catalogue() -> Mapping[str, Metric]:
    """Return all metrics by the names of their samples."""
    found: dict[str, Metric] = {}
    for metric in (*_rows(), *_pages(), *_own()):
        for sample in _samples(metric):
            other = found.setdefault(sample.name, sample)
            found[sample.name] = other._replace(
                labels=other.labels | sample.labels, dialects=other.dialects | sample.dialects
            )
    return found


@functools.cache
def own_labels(dialect: str) -> frozenset[str]:
    """Return the labels that distinguish series of a dialect's metrics, but no engines."""
    rows = DIALECTS[dialect].rows if dialect in DIALECTS else ()
    return frozenset({"le", *(label for row in rows for label in row.own_labels)}) - TARGET_LABELS


@functools.cache
def known_labels() -> frozenset[str]:
    """Return the labels of all metrics and of targets."""
    return TARGET_LABELS | {"origin"}.union(*(each.labels for each in catalogue().values()))


@functools.cache
def counterparts() -> Mapping[str, tuple[str, ...]]:
    """Return, by family, the families of other engines that have the same numbers."""
    groups: dict[str, list[str]] = {}
    for dialect in DIALECTS.values():
        series = dialect.key_series
        for key in ("running", "waiting", "generation", "kv_cache_usage", "preemptions"):
            one = getattr(series, key, None)
            if one is not None and not one.value:
                groups.setdefault(key, []).append(one.family)
        for key, family in dialect.latencies.items():
            groups.setdefault(key, []).append(family)
    return {one: tuple(x for x in each if x != one) for each in groups.values() for one in each}


@functools.cache
def former_names() -> Mapping[str, tuple[str, ...]]:
    """Return, by sample, the names that former releases had for it."""
    found: dict[str, tuple[str, ...]] = {}
    for metric in catalogue().values():
        if metric.flag == LEGACY:
            name = successor(metric)
            found[name] = (*found.get(name, ()), metric.name)
    return found


def successor(metric: Metric) -> str:
    """Return the name of the sample that follows a former one, or the expression."""
    return metric.successor + (metric.suffix if metric.successor in _families() else "")


def spellings(name: str) -> Iterator[str]:
    """Yield names that are written alike: another separator, with or without ``_total``."""
    stems = [name]
    for prefix in ("vllm", "sglang"):
        if name.startswith((f"{prefix}:", f"{prefix}_")):
            rest = name[len(prefix) + 1 :]
            stems = [f"{prefix}:{rest}", f"{prefix}_{rest}"]
    for stem in stems:
        yield from (stem, stem.removesuffix("_total"), f"{stem}_total")


def exporter_of(name: str) -> str:
    """Return what exposes a metric that the catalogue does not have; empty: it is not known."""
    return next((who for start, who in EXPORTERS.items() if name.startswith(start)), "")


def dialect_of(name: str) -> str:
    """Return the dialect whose names begin like this one; empty: none."""
    return next((who for start, who in PREFIXES.items() if name.startswith(start)), "")


def why_lost(name: str) -> str:
    """Return why a former family has no successor under one name; empty: it is no such family."""
    return dict(LOST).get(name, "")


@functools.cache
def _families() -> frozenset[str]:
    return frozenset(metric.family for metric in catalogue().values())


def _rows() -> Iterator[Metric]:
    for dialect in DIALECTS.values():
        for row in (*dialect.rows, *dialect.common_rows):
            yield Metric(
                row.name,
                row.name,
                row.kind,
                frozenset(row.labels),
                frozenset((dialect.name,)),
                dialect.feature_options.get(row.feature, ""),
                _flag(row, is_common=row in dialect.common_rows),
                row.successor if row.status == "hidden" else "",
                row.since,
                row.until,
            )


def _pages() -> Iterator[Metric]:
    """Yield the families of engines that are known by their pages alone."""
    kinds: tuple[Kind, ...] = ("gauge", "counter", "histogram")
    for page in PAGES:
        if page.dialect not in DIALECTS:
            for kind in kinds:
                for name in page.names(kind):
                    yield Metric(name, name, kind, frozenset(), frozenset((page.dialect,)))


def _flag(row: Row, *, is_common: bool) -> str:
    if row.status == "hidden":
        return LEGACY
    if is_common:
        return COMMON
    if row.name.startswith("sidestep_tenant_"):
        return TENANTS
    return SLO if row.name in (SLO_REQUESTS, SLO_UNDECIDED) else ""


def _own() -> Iterator[Metric]:
    for row in SELF_ROWS:
        labels, dialects = frozenset(row.labels), frozenset(("exporter",))
        yield Metric(row.name, row.name, row.kind, labels, dialects)


def _samples(metric: Metric) -> Iterator[Metric]:
    """Yield the samples of a family; a native histogram has the family's name."""
    yield metric
    if metric.kind in ("histogram", "summary"):
        yield from (metric._replace(name=metric.family + suffix) for suffix in SUFFIXES[1:])
    if metric.kind == "histogram":
        yield metric._replace(name=f"{metric.family}_bucket", labels=metric.labels | {"le"})
