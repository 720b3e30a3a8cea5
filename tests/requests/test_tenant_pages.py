"""Sums over tenants equal totals on pages, too, that are written in steps while requests go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import metric_families
from pages import parse
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.exposition import json_format, protobuf_page
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.exposition.series_filter import SeriesFilter
from sidestep.exposition.text_page import TextPage
from sidestep.metrics.native_histogram import NativeSettings
from sidestep.metrics.registry import Registry
from sidestep.otlp.page_families import PageFamilies
from sidestep.protocol.messages import ENGINE_CORE, EngineInfo
from sidestep.protocol.request_events import (
    Event,
    Finished,
    Identity,
    Iteration,
    Output,
    Prompt,
    Queued,
    RequestEvents,
    Scheduled,
)
from sidestep.requests.request_log import EngineRequests
from sidestep.requests.tenants import Tenants
from sidestep.telemetry.self_metrics import SelfMetrics, own_registry

PAIRS = {
    "sidestep_tenant_requests": "vllm:request_success",
    "sidestep_tenant_generation_tokens": "vllm:generation_tokens",
}


class Traffic:
    """A registry whose engine serves a request of another tenant with each call."""

    def __init__(self) -> None:
        tenants = Tenants("cache-salt", 2)
        self.registry = Registry(
            DIALECTS.layouts(),
            {},
            native=NativeSettings({}, lambda: 1.0),
            tenants=tenants,
            request_sink=lambda engine: EngineRequests(None, tenants, engine),
        )
        tenants.replaced = self.registry.hide_tenant
        labels = {"engine": "0", "model_name": "m"}
        info = EngineInfo("e", "vllm", labels, features=[ENGINE_CORE])
        self._engine = self.registry.register(info)
        self._applier = Applier(self.registry)
        self.number = 0

    def serve(self) -> None:
        """Serve one request."""
        self.number += 1
        number, at = self.number, float(self.number)
        output = [Output(at + 0.5, [number])]
        events: list[Event] = [
            Queued(number, at, at, 5, identity=Identity(salt=f"t{number % 5}")),
            Scheduled(number, at + 0.25),
            Iteration(at + 0.3, at + 0.5, at + 0.5, output, prompts=[Prompt(number, 3, 2)]),
            Finished(number, at + 0.5, at + 0.5, 0, 5, 1),
        ]
        self._applier.apply(self._engine, RequestEvents(0, at, 1, [*events]))
        self.registry.touch(self._engine)


def of_text(pieces: Iterable[list[bytes]]) -> dict[str, float]:
    """Return sums by family."""
    page = parse(b"".join(text for piece in pieces for text in piece).decode())
    return {name: sum(page[name].samples.values()) for name in [*PAIRS, *PAIRS.values()]}


def of_protobuf(pieces: Iterable[list[bytes]]) -> dict[str, float]:
    """Return sums by family."""
    page = metric_families.parsed(b"".join(part for piece in pieces for part in piece))
    return {
        name.removesuffix("_total"): sum(family.samples.values()) for name, family in page.items()
    }


def of_json(pieces: Iterable[bytes]) -> dict[str, float]:
    """Return sums by family."""
    return {
        family["name"].removesuffix("_total"): sum(one.get("value", 0) for one in family["samples"])
        for family in json.loads(b"".join(pieces))
    }


def of_series(pieces: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return sums by family."""
    found: dict[str, float] = {}
    for name, value in pieces:
        short = name.removesuffix("_total")
        found[short] = found.get(short, 0.0) + value
    return found


def otlp(registry: Registry) -> Iterator[tuple[str, float]]:
    """Yield the numbers that are sent by OTLP."""
    families = PageFamilies(
        registry,
        PassthroughRegistry(registry.names),
        own_registry(SelfMetrics(), ()),
        SeriesFilter(),
        exponential=False,
    )
    for family in families:
        if family is None:
            continue
        for series in family.series:
            if series is not None and isinstance(series.value, int | float):
                yield family.name, series.value


Pieces = Callable[[Registry], Iterator[Any]]
FORMS: dict[str, tuple[Pieces, Callable[[Iterable[Any]], dict[str, float]]]] = {
    "text": (lambda registry: TextPage(registry).pieces(), of_text),
    "pod": (lambda registry: TextPage(registry, SeriesFilter().for_pod).pieces(), of_text),
    "protobuf": (protobuf_page.pieces, of_protobuf),
    "json": (json_format.pieces, of_json),
    "otlp": (otlp, of_series),
}


@pytest.mark.parametrize("form", FORMS)
def test_sums_are_of_one_moment(form: str) -> None:
    """A request ends between any two steps of a page."""
    traffic = Traffic()
    traffic.serve()
    pieces, read = FORMS[form]

    def while_serving() -> Iterator[Any]:
        for piece in pieces(traffic.registry):
            traffic.serve()
            yield piece

    for _ in range(3):
        found = read(while_serving())
        assert all(found[ours] == found[total] > 0 for ours, total in PAIRS.items()), found
    assert traffic.number > 100
