"""The plug-in inside a real vLLM: what arrives, and that serving never depends on it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engines.load import MAIN_ENVIRON, MAIN_FLAGS, Answer, Client, reasons
from engines.processes import ExporterProcess, VllmServer, until
from pages import Family, differences, parse

pytestmark = pytest.mark.engine

TOLERANCE = 1e-9
"""Relative. Sums of floats are added per batch here, one by one in the engine."""
SETTLE = 30.0

Pages = dict[str, Family]


def value(page: Pages, family: str, /, sample: str = "", **labels: str) -> float:
    """The sum of ``family``'s samples with ``labels``; of a counter, or of those named ``sample``."""
    name = sample or f"{family}_total"
    known = page.get(family)
    samples = known.samples.items() if known is not None else ()
    return sum(
        number
        for (own, pairs), number in samples
        if own in (name, family) and labels.items() <= dict(pairs).items()
    )


def native(page: Pages) -> Pages:
    """The engine's families alone."""
    return {name: family for name, family in page.items() if name.startswith("vllm:")}


def shape(page: Pages) -> dict[str, tuple[str, set[object]]]:
    """Families, types, sample names and label sets: a page without its values."""
    return {name: (family.kind, set(family.samples)) for name, family in native(page).items()}


def idle(page: Pages) -> bool:
    """Whether no request runs or waits."""
    return not value(page, "vllm:num_requests_running") + value(page, "vllm:num_requests_waiting")


async def settled(
    server: VllmServer,
    exporter: ExporterProcess,
    compare: Callable[[Pages, Pages], list[object]],
) -> tuple[Pages, Pages, list[object]]:
    """Both pages once the engine is idle and ``compare`` finds nothing, or after a while."""
    theirs: Pages = {}
    ours: Pages = {}
    found: list[object] = []

    async def equal() -> bool:
        nonlocal theirs, ours, found
        theirs = parse(await server.page())
        ours = parse(await exporter.page())
        found = compare(theirs, ours)
        return idle(theirs) and not found

    with contextlib.suppress(AssertionError):
        await until(equal, SETTLE)
    return theirs, ours, found


def all_differences(theirs: Pages, ours: Pages) -> list[object]:
    """What differs between the pages, and what ours has beyond theirs."""
    extra = [(name, "extra") for name in native(ours).keys() - theirs.keys()]
    return [*differences(theirs, ours, tolerance=TOLERANCE), *extra]


def assert_accepted(answers: list[Answer]) -> None:
    """Every completion came to its end, or was left by the client."""
    assert [200] * len(answers) == [answer.status for answer in answers]
    assert all(answer.reasons or answer.left for answer in answers)


@pytest.fixture
def log(home: Path) -> Path:
    """What the exporters of this test print."""
    return home / "exporter.log"


@contextlib.asynccontextmanager
async def both(
    server: VllmServer, endpoint: str, log: Path
) -> AsyncIterator[tuple[VllmServer, ExporterProcess]]:
    """A server and an exporter that run; both are asked to end, and must."""
    async with server, ExporterProcess(endpoint, log) as exporter:
        await exporter.started()
        await server.started()
        yield server, exporter


async def test_beside_the_engine_both_pages_agree(
    vllm_python: Path, tiny: Path, home: Path, endpoint: str, log: Path
) -> None:
    """After a mixed load every family, label set, bucket and value of vLLM's page is on ours."""
    environ = {**MAIN_ENVIRON, "SIDESTEP_ENDPOINT": endpoint}
    server = VllmServer(vllm_python, tiny, home, MAIN_FLAGS, environ)
    async with both(server, endpoint, log) as (_, exporter):
        async with Client(server.base) as client:
            answers = await client.mixed()
        theirs, ours, found = await settled(server, exporter, all_differences)

        refused = [answer for answer in answers if answer.status != 200]
        print(report("beside", theirs, answers))

    assert [] == found
    assert [400] == [answer.status for answer in refused]
    assert_accepted([answer for answer in answers if answer.status == 200])
    # The load did reach every state that it is there for.
    assert value(theirs, "vllm:num_preemptions") > 0
    assert value(theirs, "vllm:prefix_cache_hits") > 0
    assert value(theirs, "vllm:kv_block_lifetime_seconds", "vllm:kv_block_lifetime_seconds_count")
    assert {"stop", "length"} == set(reasons(answers))
    assert sum(answer.left for answer in answers) == 5
    assert_nothing_refused(ours)


def assert_nothing_refused(ours: Pages) -> None:
    """The exporter took all, and the sender had nothing to complain of."""
    for family in (
        "sidestep_rejected",
        "sidestep_lost_items",
        "sidestep_stream_push_dropped",
        "sidestep_stream_errors",
        "sidestep_label_values_limited",
    ):
        assert value(ours, family) == 0, family


def report(run: str, page: Pages, answers: list[Answer]) -> str:
    """One line for ``pytest -s``."""
    figures = {
        "families": len(native(page)),
        "samples": sum(len(family.samples) for family in native(page).values()),
        "completions": len(answers),
        "left": sum(answer.left for answer in answers),
        **reasons(answers),
        "generated": value(page, "vllm:generation_tokens"),
        "preemptions": value(page, "vllm:num_preemptions"),
        "evictions": value(
            page, "vllm:kv_block_lifetime_seconds", "vllm:kv_block_lifetime_seconds_count"
        ),
    }
    return f"\n{run}: {json.dumps(figures)}"
