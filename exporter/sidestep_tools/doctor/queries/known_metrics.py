"""Metrics of the catalogue by name: kind, labels, successor, and the option that exposes them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sidestep.catalog.engine_pages import PAGES
from sidestep.catalog.row import Kind, Row
from sidestep.catalog.slo import SLO_REQUESTS, SLO_UNDECIDED
from sidestep.engines.dialects import DIALECTS
from sidestep.telemetry.rows import ROWS as SELF_ROWS

LEGACY, COMMON, SLO = "--metrics.legacy", "--metrics.common", "--slo"
TENANTS = "--tenants.by"
"""Flags of the exporter that add families."""
EXPORTERS: Mapping[str, str] = {
    "DCGM_": "NVIDIA's dcgm-exporter",
    "kube_": "kube-state-metrics",
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
    "nv_": "Triton's own page",
    "trtllm_": "TensorRT-LLM",
    "llamacpp:": "llama.cpp",
}
"""Sources of other metrics, by the beginning of a name; the first that fits counts."""
PREFIXES: Mapping[str, str] = {
    **{page.prefix: page.dialect for page in PAGES},
    "sidestep_": "exporter",
}
"""Dialects, by the beginning of the names that only their metrics have."""
TITLES: Mapping[str, str] = {
    **{page.dialect: page.title for page in PAGES},
    **{name: dialect.title for name, dialect in DIALECTS.items()},
}
"""Names of engines for people, by dialect."""
TARGET_LABELS = frozenset(("version", "component", "name", "endpoint", "id", "type"))
"""Labels of metrics that service discovery often adds to others, so that any metric may have them."""
SUFFIXES = ("_bucket", "_sum", "_count")


class Metric(NamedTuple):
    """A name of samples: that of a family, or one with a suffix of a histogram.

    Attributes:
        dialects: The dialects that have it; ``exporter`` for the exporter's own.
        needs: Option of the engine that exposes it; empty: none is needed.
        flag: Flag of the exporter that exposes it; empty: none is needed.
        successor: Name or expression to use instead of a former name.
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


@functools.cache
def catalogue() -> Mapping[str, Metric]:
    """Return all metrics by the names of their samples."""
    found: dict[str, Metric] = {}
    for metric in _metrics():
        for sample in _samples(metric):
            other = found.setdefault(sample.name, sample)
            found[sample.name] = other._replace(
                labels=other.labels | sample.labels, dialects=other.dialects | sample.dialects
            )
    return found


@functools.cache
def own_labels(dialect: str) -> frozenset[str]:
    """Return the labels that distinguish the series of one engine of a dialect."""
    rows = DIALECTS[dialect].rows if dialect in DIALECTS else ()
    return frozenset({"le", *(label for row in rows for label in row.own_labels)}) - TARGET_LABELS


@functools.cache
def counterparts() -> Mapping[str, tuple[str, ...]]:
    """Return the families of other engines with the same meaning, by family."""
    groups: dict[str, list[str]] = {}
    for page in PAGES:
        for key, alternatives in {**page.gauges, **page.counters}.items():
            alone = (one[0] for one in alternatives if len(one) == 1)
            groups.setdefault(key, []).extend(each.name for each in alone if not each.labels)
        for key, names in page.histograms.items():
            groups.setdefault(key, []).extend(names)
    return {one: tuple(x for x in each if x != one) for each in groups.values() for one in each}


@functools.cache
def former_names() -> Mapping[str, tuple[str, ...]]:
    """Return the names of former releases, by the present name."""
    found: dict[str, tuple[str, ...]] = {}
    for metric in catalogue().values():
        if metric.flag == LEGACY:
            found[metric.successor] = (*found.get(metric.successor, ()), metric.name)
    return found


def spellings(name: str) -> Iterator[str]:
    """Yield names that are written alike: another separator, with or without ``_total``."""
    stems = [name]
    for prefix in ("vllm", "sglang"):
        if name.startswith((f"{prefix}:", f"{prefix}_")):
            rest = name[len(prefix) + 1 :]
            stems = [f"{prefix}:{rest}", f"{prefix}_{rest}"]
    for stem in stems:
        yield from (stem, stem.removesuffix("_total"), f"{stem}_total")


def by_prefix(table: Mapping[str, str], name: str) -> str:
    """Return the first value of a table for the beginning of a name; empty: there is none."""
    return next((value for start, value in table.items() if name.startswith(start)), "")


def _metrics() -> Iterator[Metric]:
    """Yield all families: of engines, of the exporter, and of engines that are known by their pages alone."""
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
    for own in SELF_ROWS:
        labels = frozenset(own.labels)
        yield Metric(own.name, own.name, own.kind, labels, frozenset(("exporter",)))
    kinds: tuple[Kind, ...] = ("gauge", "counter", "histogram")
    for page, kind in itertools.product(PAGES, kinds):
        for name in page.names(kind) if page.dialect not in DIALECTS else ():
            yield Metric(name, name, kind, frozenset(), frozenset((page.dialect,)))


def _flag(row: Row, *, is_common: bool) -> str:
    if row.status == "hidden":
        return LEGACY
    if is_common:
        return COMMON
    if row.name.startswith("sidestep_tenant_"):
        return TENANTS
    return SLO if row.name in (SLO_REQUESTS, SLO_UNDECIDED) else ""


def _samples(metric: Metric) -> Iterator[Metric]:
    """Yield the samples of a family; a native histogram has the family's name."""
    yield metric
    suffixes = {"histogram": SUFFIXES, "summary": SUFFIXES[1:]}.get(metric.kind, ())
    for suffix in suffixes:
        yield metric._replace(
            name=metric.name + suffix,
            labels=metric.labels | ({"le"} if suffix == "_bucket" else set()),
            successor=metric.successor and metric.successor + suffix,
        )
