"""HTTP views, family filters, the cardinality report, and errors for invalid settings of pages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from exporters import Start, until
from harm import World
from pages import Family, get, parse
from refused import refused
from replays import replay
from sidestep.app.exporter import Exporter
from sidestep.config.settings import read
from sidestep.exposition.negotiation import Format
from sidestep.exposition.pages import PageCopier, Pages
from sidestep.exposition.passthrough.registry import PassthroughRegistry
from sidestep.protocol.messages import EngineInfo

RUNS = ("core_dp", "sglang_dp")


async def families(exporter: Exporter, query: str = "") -> dict[str, Family]:
    """The engines' families of a page."""
    found = parse(await get(exporter.url + query))
    return {name: family for name, family in found.items() if name.startswith(("vllm:", "sgl"))}


def label_names(found: dict[str, Family]) -> set[str]:
    """Return the label names of all samples."""
    return {label for family in found.values() for _, ls in family.samples for label, _ in ls}


@pytest.fixture
async def exporter(start: Start) -> AsyncIterator[Exporter]:
    """Start an exporter with engines of two dialects, two ranks each."""
    async with start() as running:
        for run in RUNS:
            await replay(running, run)
        yield running


async def test_the_pod_view_has_a_path_of_its_own(exporter: Exporter) -> None:
    """Path and query give the same page: some clients take a path only."""
    by_query = await families(exporter, "?view=pod")
    by_path = await families(exporter, "/pod")

    assert by_query == by_path
    assert label_names(by_path).isdisjoint({"engine", "dp_rank", "tp_rank", "engine_type"})
    assert by_path.keys() == (await families(exporter)).keys()
    assert len(by_path["vllm:num_requests_running"].samples) == 1


async def test_an_unknown_view_is_refused(exporter: Exporter) -> None:
    """The status is 400, and one line names the known views."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(exporter.url + "?view=rank") as answer,
    ):
        assert answer.status == 400
        assert await answer.text() == "no such view; known are engine and pod\n"


async def test_the_default_view(start: Start) -> None:
    """Requests without a view get the default; the other view is available on request."""
    async with start(web_default_view="pod") as exporter:
        await replay(exporter, "core_dp")

        assert "engine" not in label_names(await families(exporter))
        assert "engine" in label_names(await families(exporter, "?view=engine"))


@pytest.mark.parametrize("openmetrics", [False, True])
async def test_no_family_is_twice_on_a_page(openmetrics: bool) -> None:
    """After an engine has gone, another exporter's family of that name is exposed."""
    name = "vllm:e2e_request_latency_seconds"
    other = f'# TYPE {name} histogram\n{name}_bucket{{le="+Inf"}} 3\n{name}_count 3\n{name}_sum 1\n'
    world = World()
    registry = world.intake.registry
    registry.clear()
    registry.register(EngineInfo("a", "vllm", {"engine": "a", "model_name": "m"}))
    passthrough = PassthroughRegistry(registry.names)
    passthrough.page().update([other.encode()])

    pages = Pages(PageCopier(registry, passthrough, world.own))
    form: Format = "openmetrics" if openmetrics else "text"

    async def ask() -> str:
        return b"".join((await pages.page("pod", form)).parts).decode()

    assert f'{name}_count{{model_name="m"}} 0' in await ask()
    registry.retire(registry.engines["a"])
    await until(lambda: not pages._renders)
    page = await ask()
    assert f"{name}_count 3" in page
    assert page.count(f"# TYPE {name} ") == 1


async def test_families_that_are_allowed_and_denied(start: Start) -> None:
    """The filter applies to text of both views and to JSON, not to the exporter's own families."""
    async with start(metrics_allow=("vllm:*",), metrics_deny=("*_tokens", "*seconds")) as exporter:
        for run in RUNS:
            await replay(exporter, run)
        pages = [parse(await get(exporter.url + view)) for view in ("", "/pod")]
        url = exporter.url.removesuffix("/metrics") + "/api/v1/metrics"
        typed = {family["name"] for family in json.loads(await get(url))}

    for page in pages:
        assert "sidestep_build_info" in page
        engines = {name for name in page if name.startswith(("vllm:", "sglang:"))}
        assert "vllm:num_requests_running" in engines
        assert not any(name.startswith("sglang:") for name in engines)
        assert not any(name.endswith(("_tokens_bucket", "seconds")) for name in engines)
    assert typed
    assert all(name.startswith("vllm:") for name in typed)


async def test_cardinality(exporter: Exporter) -> None:
    """The report's numbers equal those of the pages: in total, by family, engine and label."""
    url = exporter.url.removesuffix("/metrics") + "/api/v1/cardinality"
    report = json.loads(await get(url))
    lines = _lines(await get(exporter.url))
    pod = _lines(await get(exporter.url + "/pod"))

    assert report["samples"] == report["pages"]["engine"]["samples"] == len(lines)
    assert report["pages"]["pod"]["samples"] == len(pod)
    sizes = [family["samples"] for family in report["families"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == len(lines)
    by_family = {family["name"]: family for family in report["families"]}
    assert by_family["vllm:request_success_total"]["series"] == 2 * 5
    engines = {engine["id"]: engine for engine in report["engines"]}
    assert set(engines) == set(exporter.registry.engines)
    labels = {label["name"]: label for label in report["labels"]}
    assert labels["engine"]["values"] == 2
    assert labels["engine"]["samples"] == sum('engine="' in line for line in lines)
    assert labels["finished_reason"]["values"] == 5


def _lines(page: str) -> list[str]:
    """Return the samples of the engines' families."""
    end = page.index("# HELP sidestep_frames") if "# HELP sidestep_frames" in page else len(page)
    own = page.index("# HELP sidestep_build_info")
    return [line for line in page[: min(own, end)].splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"web_default_view": "rank"}, "--web.default-view 'rank': must be one of engine, pod"),
        ({"metrics_drop_label": ("le",)}, "--metrics.drop-label 'le': must be the name of a label"),
        ({"metrics_drop_label": ("a-b",)}, "must be the name of a label"),
        ({"metrics_allow": ("a b",)}, "--metrics.allow 'a b': must be a family's name"),
        ({"metrics_deny": ("",)}, "--metrics.deny '': must be a family's name"),
        ({"metrics_bucket_thinning": "0"}, "must be a whole number, 1 or above"),
    ],
)
def test_mistakes_are_one_line(flags: dict[str, Any], said: str) -> None:
    """The error names the setting, the value and the problem."""
    assert said in refused(flags)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("shown_buckets = 5", "shown_buckets must be a table"),
        ('[shown_buckets]\n"vllm:*" = 5', "shown_buckets.vllm:* must be a list of numbers"),
        ('[shown_buckets]\n"a b" = [1]', "shown_buckets 'a b': must be a family's name"),
        ('[shown_buckets]\n"vllm:*" = [2, 1]', "must increase strictly"),
    ],
)
def test_mistakes_in_the_file_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    """The error names the setting, the value and the problem."""
    file = tmp_path / "sidestep.toml"
    file.write_text(text)

    assert said in refused({"config_file": str(file)})


def test_the_file_names_bounds_by_family(tmp_path: Path) -> None:
    """All other settings can be in the file, too."""
    file = tmp_path / "sidestep.toml"
    file.write_text(
        '[shown_buckets]\n"vllm:e2e_*" = [1, 2.5]\n'
        '[metrics]\ndrop-label = ["engine"]\nbucket-thinning = 2\n[web]\ndefault-view = "pod"\n'
    )

    config = read({"config_file": str(file)}, {"SIDESTEP_METRICS_DENY": "a,b_*"})

    assert config.shown_buckets == {"vllm:e2e_*": (1.0, 2.5)}
    assert config.metrics_drop_label == ("engine",)
    assert config.metrics_bucket_thinning == 2
    assert config.metrics_deny == ("a", "b_*")
    assert config.web_default_view == "pod"
