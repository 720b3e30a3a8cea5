"""SGLang's metric collectors: their metrics are replaced with stubs. Needs no SGLang itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from sidestep.catalog.row import Sampled
from sidestep.engines.sglang.rows import DEAD
from sidestep_adapters.sglang.metric_stubs import AddingStub, ChildStub, MetricStub
from sidestep_adapters.sglang.process import ROWS, Process, custom_bounds, family_name, is_metric
from sidestep_adapters.sglang.stats import RENAMED_FIELDS

UNRECORDED_FAMILIES = frozenset(
    {*(name for name, _ in DEAD), *(f"sglang:{name}" for name in RENAMED_FIELDS)}
)
FEATURES = {
    "enable_lora": "lora",
    "enable_hierarchical_cache": "hicache",
    "enable_streaming_session": "streaming_session",
}
"""Attributes of a scheduler's collector, and the catalogue's names of these features."""


def wrap(process: Process, collector: Any, role: str) -> dict[str, MetricStub]:
    """Replace the metrics of ``collector`` with stubs, and return the stubs by attribute.

    The gauges that ``log_stats`` sets are left alone: the stats are sent as a whole.
    """
    labels = getattr(collector, "labels", None) or {}
    if not any(map(is_metric, vars(collector).values())):
        raise LookupError("the collector has no metrics")
    found = {name: m for name, m in vars(collector).items() if _is_replaced(m)}
    features = [name for option, name in FEATURES.items() if getattr(collector, option, False)]
    engine = process.engine(role, labels, features, custom_bounds(found.values()))
    made: dict[str, MetricStub] = {}
    families: dict[str, MetricStub] = {}
    for name, metric in found.items():
        made[name] = families[family_name(metric)] = process.stub(engine, metric, labels)
        process.wrapped_families.add(family_name(metric))
        setattr(collector, name, made[name])
        _record_children(metric, made[name])
    for name, value in list(vars(collector).items()):
        # Children that the collector looked up when it was made.
        if isinstance(value, dict) and any(map(_is_child, value.values())):
            setattr(collector, name, {key: _child_stub(v, families) for key, v in value.items()})
        elif _is_child(value):
            setattr(collector, name, _child_stub(value, families))
    return made


def adding_copy(collector: Any) -> Any:
    """Return a copy of ``collector`` for the publisher thread: calls of its stubs are added at once."""

    def adding(value: Any) -> Any:
        if isinstance(value, MetricStub):
            return AddingStub(value)
        return ChildStub(value.stub, value.key, value.stub.add)

    return _copy(collector, adding)


def native_copy(collector: Any) -> Any:
    """Return a copy of ``collector`` with its own metrics, for stubs ``beside`` them."""
    return _copy(collector, lambda value: value.native)


def _copy(collector: Any, replacement: Callable[[Any], Any]) -> Any:
    made = copy.copy(collector)
    for name, value in vars(collector).items():
        if isinstance(value, dict) and any(_is_stub(each) for each in value.values()):
            copied: Any = {
                key: replacement(each) if _is_stub(each) else each for key, each in value.items()
            }
        else:
            copied = replacement(value) if _is_stub(value) else value
        vars(made)[name] = copied
    return made


def _is_stub(value: Any) -> bool:
    return isinstance(value, MetricStub | ChildStub)


def _is_child(value: Any) -> bool:
    return is_metric(value) and bool(getattr(value, "_labelvalues", ()))


def _is_replaced(value: Any) -> bool:
    if not is_metric(value) or _is_child(value):
        return False
    name = family_name(value)
    row = ROWS.get(name)
    if row is None:
        return name not in UNRECORDED_FAMILIES
    # A family that has another type than in the catalogue cannot be exposed.
    return isinstance(row.source, Sampled) and row.kind == value._type


def _child_stub(child: Any, families: Mapping[str, MetricStub]) -> Any:
    """Return the child of the stub that replaces the family of ``child``."""
    stub = families.get(family_name(child)) if _is_child(child) else None
    return child if stub is None else stub.labels(*child._labelvalues)


def _record_children(metric: Any, stub: MetricStub) -> None:
    """Record children that exist without a value yet: SGLang exposes them at 0."""
    if stub.kind == "gauge":
        return
    if not metric._labelnames:
        stub.record({}, 0, 0)
    for values in list(getattr(metric, "_metrics", ())):
        stub.record(dict(zip(metric._labelnames, values, strict=True)), 0, 0)
