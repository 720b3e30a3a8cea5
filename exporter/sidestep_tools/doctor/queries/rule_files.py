"""Checks of what Prometheus refuses in a rule file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from sidestep_tools.doctor.queries.problems import short
from sidestep_tools.doctor.queries.promql import PromqlError, experimental_functions, parse

_DURATION = r"^(?=.)(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?\Z|^0\Z"
Duration: TypeAlias = Annotated[str, Meta(pattern=_DURATION)] | Annotated[int, Meta(ge=0, le=0)]
Texts: TypeAlias = dict[str, str | int | float | bool | None]
_ACTION = re.compile(r"\{\{(?!-?\s*/\*)(.*?)\}\}", re.DOTALL)
_WORD = re.compile(
    r'"(?:\\.|[^"\\])*"|`[^`]*`|\'(?:\\.|[^\'\\])*\'|[$.][\w.]*|\d[\w.]*|([A-Za-z_]\w*)', re.DOTALL
)
TEMPLATES = frozenset(
    (
        "if", "else", "end", "range", "with", "define", "template", "block", "break", "continue",
        "nil", "true", "false", "and", "call", "html", "index", "slice", "js", "len", "not", "or",
        "print", "printf", "println", "urlquery", "eq", "ne", "lt", "le", "gt", "ge",
        "query", "first", "label", "value", "sortByLabel", "strvalue", "args", "safeHtml", "tmpl",
        "reReplaceAll", "match", "title", "toUpper", "toLower", "graphLink", "tableLink",
        "stripPort", "stripDomain", "humanize", "humanize1024", "humanizeDuration",
        "humanizePercentage", "humanizeTimestamp", "toTime", "toDuration", "now", "pathPrefix",
        "externalURL", "parseDuration", "urlQueryEscape",
    )
)  # fmt: skip
"""Words and functions of the templates of labels and annotations, in Prometheus 3."""


class Rule(msgspec.Struct, forbid_unknown_fields=True, rename={"for_": "for"}):
    """A rule."""

    record: str | None = None
    alert: str | None = None
    expr: str | int | float | None = None
    for_: Duration | None = None
    keep_firing_for: Duration | None = None
    labels: Texts | None = None
    annotations: Texts | None = None


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """A group of rules; ``partial_response_strategy`` is a field of Thanos and the operator."""

    name: Annotated[str, Meta(min_length=1)]
    interval: Duration | None = None
    query_offset: Duration | None = None
    limit: int | None = None
    labels: Texts | None = None
    rules: list[Rule] | None = None
    partial_response_strategy: str | None = None


class RuleFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file, or the specification of a PrometheusRule."""

    groups: list[Group]


def rules_in(documents: list[Any]) -> Iterator[Any]:
    """Yield what is a rule file among documents, and the specifications of PrometheusRules."""
    for each in documents:
        if not isinstance(each, dict):
            continue
        if each.get("kind") == "PrometheusRule":
            yield each.get("spec")
        elif isinstance(each.get("items"), list):
            yield from rules_in(each["items"])
        elif "kind" not in each and each.keys() & {"groups", "rules"}:
            yield each


def mistakes(document: Any) -> Iterator[str]:
    """Yield why Prometheus refuses a document of rules."""
    try:
        groups = msgspec.convert(document, RuleFile).groups
    except msgspec.ValidationError as error:
        yield str(error)
        return
    for name, count in Counter(group.name for group in groups).items():
        if count > 1:
            yield f"{count} groups are named {name}"
    for group in groups:
        for number, rule in enumerate(group.rules or (), 1):
            for text in _mistakes(rule):
                yield f"{text} (rule {number} of group {group.name})"


def _mistakes(rule: Rule) -> Iterator[str]:
    if bool(rule.record) == bool(rule.alert):
        yield "it needs one of record and alert"
    if rule.expr in (None, ""):
        yield "it has no expr"
    else:
        yield from _refused(str(rule.expr))
    if rule.record and (rule.for_ or rule.keep_firing_for or rule.annotations):
        yield "for, keep_firing_for and annotations are for alerts"
    if "__name__" in (rule.labels or {}):
        yield "__name__ is no label"
    for key, text in {**(rule.labels or {}), **(rule.annotations or {})}.items():
        if rule.alert and str(text).count("{{") != str(text).count("}}"):
            yield f"{key} has a template without its end"
        elif rule.alert:
            words = {
                word for action in _ACTION.findall(str(text)) for word in _WORD.findall(action)
            }
            for word in sorted(words - TEMPLATES - {""}):
                yield f"{key} has a template with {word}, which Prometheus does not have"


def _refused(query: str) -> Iterator[str]:
    """Yield why Prometheus refuses a query, whatever is stored."""
    try:
        names = experimental_functions(parse(query))
    except PromqlError as error:
        yield f"{short(query)}: {error}"
        return
    for name in sorted(names):
        yield f"{name} needs Prometheus's --enable-feature=promql-experimental-functions"
