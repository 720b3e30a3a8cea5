"""Check of autoscalers: KEDA's triggers, the metrics of HPAs, and the rules of prometheus-adapter."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sidestep.config.yaml_reader import read_documents
from sidestep.diagnosis.finding import Code, Finding
from sidestep.errors import ConfigError
from sidestep_tools.doctor.manifests.reading import Resource, mapping, mappings
from sidestep_tools.doctor.queries.files import Query, fill
from sidestep_tools.doctor.queries.known_metrics import catalogue, spellings
from sidestep_tools.doctor.queries.promql import PromqlError, Selector, parse

# fmt: off
NULLS = Code("SD571", "warning", "An empty result counts as 0",
    'Without `ignoreNullValues: "false"` KEDA takes a query without a result for 0, and scales busy engines down to the minimum while their exporter is not scraped.',
    "Set `ignoreNullValues: \"false\"` in the trigger's `metadata`, and `fallback` in the ScaledObject's `spec`.")
# fmt: on
CODES = (NULLS,)

DEFAULT_QUERY = "sum(<<.Series>>{<<.LabelMatchers>>}) by (<<.GroupBy>>)"
"""Query of a rule of prometheus-adapter that has none."""
_KEDA = re.compile(r"s\d+-")
"""Matches the beginning of the names that KEDA gives to metrics."""


def check(resources: Sequence[Resource]) -> Iterator[Finding]:
    """Yield which triggers read an empty result as 0."""
    for resource in resources:
        for place, trigger in _triggers(resource):
            if str(trigger.get("ignoreNullValues", True)).lower() != "false":
                yield NULLS.on(resource.subject, f"{place} has no ignoreNullValues: false")


def queries(resources: Sequence[Resource]) -> dict[str, list[Query]]:
    """Return the queries of each autoscaler, by its subject."""
    found = {each.subject: list(dict.fromkeys(_queries(each))) for each in resources}
    return {subject: some for subject, some in found.items() if some}


def _queries(resource: Resource) -> Iterator[Query]:
    for place, trigger in _triggers(resource):
        if trigger.get("query"):
            yield Query(place, str(trigger["query"]))
    for rule in _rules(resource):
        selected, series = rule["seriesQuery"], _series(rule)
        for text in (selected, _filled(rule, series)) if series else (selected,):
            filled, is_guessed = fill(text, {})
            yield Query(f"rule of {series or selected}", filled, is_guessed=is_guessed)
    for name, labels in _metrics(resource):
        # The adapter's names have no colon.
        known = next((each for each in spellings(name) if each in catalogue()), "")
        if known:
            matchers = ",".join(f"{key}={json.dumps(str(each))}" for key, each in labels.items())
            yield Query(f"metric {name}", f"{known}{{{matchers}}}")


def _triggers(resource: Resource) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield KEDA's triggers that query Prometheus, each with its place."""
    if resource.kind in ("ScaledObject", "ScaledJob"):
        for number, each in enumerate(mappings(resource.spec.get("triggers"))):
            if each.get("type") == "prometheus":
                yield f"trigger {each.get('name', number)}", mapping(each.get("metadata"))


def _metrics(resource: Resource) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the metrics of an HPA that are not Kubernetes' own, with the labels that it selects by."""
    if resource.kind == "HorizontalPodAutoscaler":
        for each in mappings(resource.spec.get("metrics")):
            metric = mapping(mapping(each.get(str(each.get("type")).lower())).get("metric"))
            name = str(metric.get("name", ""))
            if name and not _KEDA.match(name):
                yield name, mapping(mapping(metric.get("selector")).get("matchLabels"))


def _rules(resource: Resource) -> Iterator[Mapping[str, Any]]:
    """Yield the rules of prometheus-adapter in its ConfigMap or in its chart's values."""
    inside = [str(each) for each in mapping(resource.value.get("data")).values()]
    texts = [each for each in inside if "seriesQuery" in each]
    with contextlib.suppress(ConfigError):
        for each in (resource.value, *(one for text in texts for one in read_documents(text))):
            yield from _rules_in(mapping(each))


def _rules_in(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if isinstance(node.get("seriesQuery"), str):
        yield node
    for key in ("rules", "custom", "external", "externalRules"):
        inner = node.get(key)
        for each in [inner] if isinstance(inner, dict) else mappings(inner):
            yield from _rules_in(each)


def _series(rule: Mapping[str, Any]) -> str:
    """Return the name of a rule's series; empty: a pattern selects them."""
    try:
        node = parse(rule["seriesQuery"])
    except PromqlError:
        return ""
    return node.name if isinstance(node, Selector) else ""


def _filled(rule: Mapping[str, Any], series: str) -> str:
    """Return a rule's query, with variables as a dashboard has them for what a request decides."""
    query = str(rule.get("metricsQuery") or DEFAULT_QUERY)
    query = query.replace("<<.LabelMatchers>>", 'job=~".*"').replace("<<.GroupBy>>", "namespace")
    return re.sub("<<[^>]*>>", "$any", query.replace("<<.Series>>", series))
