"""Triton's own page beside its statistics, recorded at the same time."""

from __future__ import annotations

import pytest

from exporters import Start, page_of_engine, until
from pages import Family, get, parse
from sidestep.app.exporter import Exporter
from sidestep_adapters.triton.rows import FROM_STATISTICS
from tritons import PAGE, STATS, Triton, answer, recording, tritons

FAILURE = "nv_inference_request_failure"


def flag(server: Triton, *options: str) -> str:
    """Return the flag with ``metrics=`` at the same server's port."""
    return ",".join((server.url, "interval=0.05", f"metrics={server.url}{PAGE}", *options))


def recorded(server: Triton) -> None:
    """Make ``server`` send the recorded answers."""
    server.respond(STATS, recording("stats_all.http"))
    server.respond(PAGE, answer(page_of_engine("page_triton").encode(), kind="text/plain"))


async def families(exporter: Exporter) -> dict[str, Family]:
    """Return the families of the whole page."""
    text = await get(exporter.url)
    names = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(names) == len(set(names))
    return parse(text)


def count(exporter: Exporter, target: str) -> float:
    """Return the number of pages that were read."""
    return exporter.metrics.value("sidestep_scrape_polls_total", target, "ok")


async def test_statistics_equal_the_page(start: Start) -> None:
    """Counts are equal; each observation differs by less than a microsecond."""
    theirs = parse(page_of_engine("page_triton"))
    async with tritons("cached") as server:
        server.configs["cached"] = {"response_cache": {"enable": True}}
        recorded(server)
        async with start(triton=(f"{server.url},interval=0.05",)) as exporter:
            await until(lambda: len(exporter.registry.engines) == 8)
            ours = await families(exporter)

    assert ours.keys() & theirs.keys() == FROM_STATISTICS | {FAILURE}
    requests = ours["nv_inference_request_success"].samples
    for name in FROM_STATISTICS:
        for (sample, labels), value in ours[name].samples.items():
            named = {pair for pair in labels if pair[0] in ("model", "version")}
            (native,) = (
                number for (_, found), number in theirs[name].samples.items() if named <= set(found)
            )
            if name.endswith(("_us", "duration_per_model")):
                served = next(n for (_, found), n in requests.items() if found == labels)
                assert native <= value < native + served + 1, sample
            else:
                assert native == value, sample
    for (_, labels), value in ours[FAILURE].samples.items():
        named = {pair for pair in labels if pair[0] in ("model", "version")}
        by_reason = [n for (_, found), n in theirs[FAILURE].samples.items() if named <= set(found)]
        assert sum(by_reason) == value


async def test_failures_come_from_pages_or_from_statistics(start: Start) -> None:
    """One server with a page decides for all."""
    async with tritons("a") as one, tritons("b") as other:
        recorded(one)
        one.respond(STATS, answer(b'{"model_stats": [{"name": "a", "version": "1"}]}'))
        other.models["b", "1"].fail(3)
        flags = (flag(one, "label.pod=x"), f"{other.url},interval=0.05,label.pod=y")
        async with start(triton=flags) as exporter:
            await until(lambda: count(exporter, one.url + PAGE) > 0)
            await until(lambda: len(exporter.registry.engines) == 4)
            ours = await families(exporter)

    assert {dict(labels)["pod"] for _, labels in ours[FAILURE].samples} == {"x"}
    failed = ours["sidestep_triton_failed_requests"].samples
    assert {dict(labels)["pod"]: value for (_, labels), value in failed.items()} == {"x": 0, "y": 3}


@pytest.mark.parametrize("response", [b"", b"<html>"])
async def test_an_invalid_page_does_not_affect_statistics(start: Start, response: bytes) -> None:
    """Pages are polled separately."""
    async with tritons("a") as server:
        server.respond(PAGE, answer(response, kind="text/html"))
        async with start(triton=(flag(server),)) as exporter:
            await until(lambda: len(exporter.registry.engines) == 2)
            ours = await families(exporter)

    assert "nv_inference_request_success" in ours
