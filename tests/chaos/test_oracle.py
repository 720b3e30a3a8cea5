"""The oracle: the expected page, and the verdict on a page that differs."""

from __future__ import annotations

from chaos.traffic import ENGINES, MODEL, Traffic, infos
from chaos.verdict import compare
from chaos.watch import parse

from rendered import render
from sidestep.catalog.layout_builder import compile_layout
from sidestep.engines.apply import Applier
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.metrics.registry import Registry


def expected_page(traffic: Traffic, items: int) -> dict[str, float]:
    """Return the expected page after ``items`` items."""
    pages = (
        tally.page(engine, MODEL)
        for tally, engine in zip(traffic.tallies(items), ENGINES, strict=True)
    )
    return {key: value for page in pages for key, value in page.items()}


def applied(traffic: Traffic, *numbers: int) -> dict[str, float]:
    """Return the page of a registry to which these items were applied."""
    registry = Registry({"vllm": compile_layout(DIALECTS["vllm"])})
    applier = Applier(registry)
    engines = [registry.register(info) for info in infos()]
    for number in numbers:
        item = DIALECTS.decode(encode_item(traffic.item(number)[0]))
        applier.apply(engines[item.engine], item)
    return parse(render(registry).decode(), MODEL)


def test_a_missing_or_repeated_item_is_found() -> None:
    """Whichever item it is, it shows as lost or doubled; without one the pages are equal."""
    traffic = Traffic(5, 1)
    expected = expected_page(traffic, 21)
    assert not compare(expected, applied(traffic, *range(21)), derived_apart=False).worst
    for number in range(20):
        for times, wanted in ((0, (1, 0)), (2, (0, 1))):
            numbers = [*range(number), *[number] * times, *range(number + 1, 21)]
            found = compare(expected, applied(traffic, *numbers), derived_apart=True)

            assert (found.lost, found.doubled) == wanted
