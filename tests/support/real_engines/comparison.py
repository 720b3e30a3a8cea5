"""Comparison of an engine's own page with the exporter's, once both are idle."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import pages
import sglang_pages
from exporters import until
from pages import ENGINES, Family, comparable
from real_engines.load import Answer, reasons
from real_engines.processes import ExporterProcess

Found = list[tuple[str, str]]

TOLERANCE = 1e-9
"""Relative tolerance: the exporter adds floats per batch, the engine one by one."""
SETTLE = 30.0
QUEUES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
"""Gauges that are 0 on an idle engine."""
COUNTED = {
    "generated": "vllm:generation_tokens",
    "preemptions": "vllm:num_preemptions",
    "tokens": "sglang:generation_tokens",
    "retractions": "sglang:num_retracted_requests",
    "evicted": "sglang:evicted_tokens",
    "aborts": "sglang:num_aborted_requests",
}
OBSERVED = {
    "steps": "vllm:iteration_tokens_total",
    "evictions": "vllm:kv_block_lifetime_seconds",
}
"""Families of the figures in a report."""


class Page(dict[str, Family]):
    """Families by name, with a short representation for failed assertions."""

    def __repr__(self) -> str:
        return f"<page of {len(self)} families>"


def parse(text: str) -> Page:
    """Parse a page into its families."""
    return Page(pages.parse(text))


def value(page: Page, family: str, /, **labels: str) -> float:
    """Return the sum of a counter's or gauge's samples that have ``labels``."""
    return _sum(page, family, (f"{family}_total", family), labels)


def count(page: Page, histogram: str, /, **labels: str) -> float:
    """Return the number of observations of a histogram's series that have ``labels``."""
    return _sum(page, histogram, (f"{histogram}_count",), labels)


def total(page: Page, histogram: str, /, **labels: str) -> float:
    """Return the sum of the observations of a histogram's series that have ``labels``."""
    return _sum(page, histogram, (f"{histogram}_sum",), labels)


def labels_of(page: Page, family: str) -> list[dict[str, str]]:
    """Return the labels of a family's samples, or nothing if the page does not have it."""
    known = page.get(family)
    return [] if known is None else [dict(labels) for _, labels in known.samples]


def engine_families(page: Page) -> Page:
    """Return the engine's families of a page."""
    return Page((name, family) for name, family in page.items() if name.startswith(ENGINES))


def shape(page: Page) -> dict[str, tuple[str, set[object]]]:
    """Return type, sample names and label sets of the engine's families: a page without values."""
    found = engine_families(page).items()
    return {name: (family.kind, set(comparable(family))) for name, family in found}


def idle(page: Page) -> bool:
    """Return whether no request runs or waits."""
    return not any(value(page, family) for family in QUEUES)


def all_differences(
    theirs: Page, ours: Page, since: Page | None = None, *, apart: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield each family that differs, and how, except those in ``apart``.

    ``since`` is an earlier page of the engine, for families that grow while it is idle.
    """
    yield from (
        (name, what)
        for name, what in sglang_pages.differences(theirs, ours, since or theirs, TOLERANCE)
        if name not in apart
    )


class Shown(Protocol):
    """A server or program with a metrics page."""

    async def page(self) -> str:
        """Fetch the page."""


async def settled(
    server: Shown, exporter: ExporterProcess, *, apart: Collection[str] = ()
) -> tuple[Page, Page, Found]:
    """Return both pages and their differences, as soon as there are none or after ``SETTLE`` seconds."""
    first: Page | None = None
    theirs = Page()
    ours = Page()
    found: Found = [("every family", "was never compared")]

    async def agree() -> bool:
        nonlocal first, theirs, ours, found
        ours = parse(await exporter.page())
        theirs = parse(await server.page())
        first = first or theirs
        found = list(all_differences(theirs, ours, first, apart=apart))
        if not idle(theirs):
            found.append(("the engine", "is not idle"))
        return not found

    with contextlib.suppress(AssertionError):
        await until(agree, SETTLE)
    return theirs, ours, found


async def settled_alone(exporter: ExporterProcess, condition: Callable[[Page], bool]) -> Page:
    """Return the exporter's page, as soon as it meets ``condition`` or after ``SETTLE`` seconds."""
    ours = Page()

    async def met() -> bool:
        nonlocal ours
        ours = parse(await exporter.page())
        return condition(ours)

    with contextlib.suppress(AssertionError):
        await until(met, SETTLE)
    return ours


def assert_nothing_refused(ours: Page) -> None:
    """Assert that the exporter accepted everything, and that the sender dropped nothing."""
    for family in (
        "sidestep_rejected",
        "sidestep_lost_items",
        "sidestep_stream_push_dropped",
        "sidestep_stream_errors",
        "sidestep_series_limited",
        "sidestep_refused_observations",
    ):
        assert value(ours, family) == 0, family


def assert_complete(answers: list[Answer]) -> None:
    """Assert that every completion was accepted, and either finished or left by its client."""
    assert [200] * len(answers) == [answer.status for answer in answers]
    assert all(answer.reasons or answer.left for answer in answers)


def report(run: str, page: Page, answers: list[Answer], **more: object) -> None:
    """Print one line of figures, seen with ``pytest -s``."""
    found = engine_families(page).values()
    figures = {
        "families": len(found),
        "samples": sum(len(family.samples) for family in found),
        "completions": len(answers),
        "refused": sum(answer.refused for answer in answers),
        "left": sum(answer.left for answer in answers),
        **reasons(answers),
        **{name: value(page, family) for name, family in COUNTED.items() if family in page},
        **{name: count(page, family) for name, family in OBSERVED.items() if family in page},
        **more,
    }
    print(f"\n{run}: {json.dumps(figures)}")  # noqa: T201 - for the one who runs it


def _sum(page: Page, family: str, names: tuple[str, ...], labels: dict[str, str]) -> float:
    known = page.get(family)
    samples = known.samples.items() if known is not None else ()
    return sum(
        number
        for (name, pairs), number in samples
        if name in names and labels.items() <= dict(pairs).items()
    )
