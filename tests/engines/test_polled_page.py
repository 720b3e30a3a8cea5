"""Differences of polled pages, and the series that they feed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from intakes import discard
from pages import parse
from rendered import render
from sidestep.catalog.layout_builder import compile_layout
from sidestep.catalog.row import ENGINE_LABELS
from sidestep.engines.apply import Applier
from sidestep.engines.dialect import Dialect, Dialects
from sidestep.engines.polled_page import PageHandlers, PolledPage, resets_row
from sidestep.engines.row_builders import SampledRows
from sidestep.engines.shared_rows import REFUSED_OBSERVATIONS
from sidestep.metrics.merge import restore_engine
from sidestep.metrics.registry import Registry
from sidestep.metrics.totals_codec import decode_totals, encode_totals, totals_of
from sidestep.protocol.messages import EngineInfo
from sidestep.protocol.self_described import Family, Sample

TOY = SampledRows("toy:")
DIALECTS = Dialects(
    Dialect(
        name="toy",
        title="Toy",
        rows=(
            TOY.counter("tokens_total", "Tokens."),
            TOY.counter("ends_total", "Ends.", "reason"),
            TOY.gauge("running", "Running.", "rank"),
            resets_row("sidestep_toy_", ENGINE_LABELS),
            REFUSED_OBSERVATIONS,
        ),
        items=(PolledPage,),
        polled=PolledPage,
        handlers=PageHandlers,
    )
)
INFO = EngineInfo("e", "toy", {"engine": "0", "model_name": "m"})


def page(
    tokens: float = 0,
    ends: dict[str, float] | None = None,
    running: dict[str, float] | None = None,
    process: int = 0,
) -> PolledPage:
    """Return a page."""

    def labelled(found: dict[str, float] | None) -> list[Sample]:
        return [Sample([label], value) for label, value in (found or {}).items()]

    families = (
        Family("toy:tokens_total", "counter", [], [Sample([], tokens)]),
        Family("toy:ends_total", "counter", ["reason"], labelled(ends)),
        Family("toy:running", "gauge", ["rank"], labelled(running)),
    )
    return PolledPage(0, 1.0, process, families)


class Polled:
    """An engine whose pages are applied."""

    def __init__(self) -> None:
        layouts = {name: compile_layout(one) for name, one in DIALECTS.items()}
        self.registry = Registry(layouts)
        self.applier = Applier(self.registry, DIALECTS)
        self.registry.register(INFO)

    def poll(self, *pages: PolledPage) -> None:
        """Apply pages."""
        for each in pages:
            self.applier.apply(self.registry.engines["e"], each)

    def samples(self) -> dict[str, float]:
        """Return the engine's series, by name and own labels."""
        return {
            " ".join((name, *(v for k, v in labels if k not in INFO.labels))): value
            for family in parse(render(self.registry).decode()).values()
            for (name, labels), value in family.samples.items()
        }


numbers = st.integers(0, 1 << 40)
steps = st.lists(
    st.tuples(
        numbers,
        st.sampled_from(["stop", "length"]),
        st.booleans(),
    ),
    max_size=12,
)


@given(steps)
def test_counters_are_the_sum_over_all_processes(
    run: list[tuple[int, str, bool]],
) -> None:
    """Whatever is counted between polls and restarts arrives once, if the page names the process."""
    polled = Polled()
    tokens, ends = 0, dict[str, float]()
    process, all_tokens = 1, 0
    for number, reason, restarts in run:
        if restarts:
            process, tokens, ends = process + 1, 0, {}
        tokens, all_tokens = tokens + number, all_tokens + number
        ends[reason] = ends.get(reason, 0) + 1
        polled.poll(page(tokens, ends, process=process))

    found = polled.samples()
    if run:
        assert found["toy:tokens_total"] == all_tokens
        assert sum(v for k, v in found.items() if k.startswith("toy:ends_total")) == len(run)


def test_a_lower_total_shows_a_restart() -> None:
    """Then the whole page is new, series that did not fall included."""
    polled = Polled()
    polled.poll(page(10, {"stop": 1}), page(12, {"stop": 3}), page(5, {"stop": 4}))

    assert polled.samples()["toy:tokens_total"] == 17
    assert polled.samples()["toy:ends_total stop"] == 7
    assert polled.samples()["sidestep_toy_resets_total"] == 1


def test_a_missing_series_counts_once() -> None:
    """A page without it, such as one that was read while it was written, changes nothing."""
    polled = Polled()
    polled.poll(page(1, {"stop": 3}), page(2), page(3, {"stop": 4}))

    assert polled.samples()["toy:ends_total stop"] == 4


def test_an_engine_that_is_gone_continues() -> None:
    """While the server does not have it nothing is exposed, and no count is lost or doubled."""
    polled = Polled()
    polled.poll(page(5, process=7), PolledPage(0, 2.0, absent=True))
    assert polled.samples() == {}

    polled.poll(page(6, process=7), PolledPage(0, 3.0, absent=True), page(2, process=8))
    assert polled.samples()["toy:tokens_total"] == 8


@pytest.mark.parametrize("process", [0, 7])
def test_a_snapshot_holds_the_last_page(process: int) -> None:
    """What the server counts while the exporter is away arrives once."""
    polled, later = Polled(), Polled()
    polled.poll(page(5, {"stop": 2}, process=process))
    engine = polled.registry.engines["e"]
    record = decode_totals(encode_totals(engine, totals_of(engine)))
    discard(later.registry, later.registry.engines["e"])
    later.registry.retired["e"] = restore_engine(later.registry, record)
    later.registry.register(INFO)
    later.poll(page(8, {"stop": 3}, process=process))

    assert later.samples()["toy:tokens_total"] == 8
    assert later.samples()["toy:ends_total stop"] == 3
