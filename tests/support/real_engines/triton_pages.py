"""Comparison of the exporter's page with Triton's own page and statistics, and over time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import aiohttp

from exporters import until
from pages import Labels
from real_engines.comparison import Found, Page, parse, value
from real_engines.processes import ExporterProcess
from real_engines.triton_server import TritonServer, Versions

SUCCESS = "nv_inference_request_success"
FAILURE = "nv_inference_request_failure"
COUNTS = (
    SUCCESS,
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_cache_num_hits_per_model",
    "nv_cache_num_misses_per_model",
)
DURATIONS = {
    "nv_inference_request_duration_us": SUCCESS,
    "nv_inference_queue_duration_us": SUCCESS,
    "nv_inference_compute_input_duration_us": SUCCESS,
    "nv_inference_compute_infer_duration_us": SUCCESS,
    "nv_inference_compute_output_duration_us": SUCCESS,
    "nv_cache_hit_duration_per_model": "nv_cache_num_hits_per_model",
    "nv_cache_miss_duration_per_model": "nv_cache_num_misses_per_model",
}
"""Durations, by the family that counts their observations: Triton rounds each one down."""
PASSED = (
    FAILURE,
    "nv_inference_pending_request_count",
    "nv_cache_num_entries",
    "nv_cache_num_hits",
    "nv_cache_num_lookups",
    "nv_cache_num_misses",
)
"""Families of Triton's own page that do not change while the server is idle."""
BATCH = "sidestep_triton_batch_size"
STATES = ("up", "stale", "down")
STAGES = ("compute_input", "compute_infer", "compute_output")
EXACT = 1e-13
"""Relative tolerance of floats made of whole nanoseconds, and of Unix times in milliseconds."""

PERIOD = 0.1
"""Seconds between two scrapes of a ``Sampler``."""

Samples = dict[tuple[str, Labels], float]


def samples(page: Page, family: str, *, without: Iterable[str] = ()) -> Samples:
    """Return a family's samples, summed over the labels ``without``."""
    found: Samples = {}
    for (name, labels), number in (page[family].samples if family in page else {}).items():
        kept = tuple((label, text) for label, text in labels if text and label not in without)
        found[name, kept] = found.get((name, kept), 0.0) + number
    return found


def differences(theirs: Page, ours: Page, *, passed: bool) -> Iterator[tuple[str, str]]:
    """Yield each family that should equal the one on Triton's page and does not, and how.

    ``passed``: the exporter exposes the families of Triton's own page, too.
    """
    for name in COUNTS:
        yield from _unequal(name, samples(theirs, name), samples(ours, name))
    if passed:
        for name in PASSED:
            yield from _unequal(name, samples(theirs, name), samples(ours, name))
        yield from ((name, "missing") for name in theirs.keys() - ours.keys())
    else:
        failed = samples(theirs, FAILURE, without=["reason"])
        yield from _unequal(FAILURE, failed, samples(ours, FAILURE))
    for name, counted in DURATIONS.items():
        yield from _unrounded(name, theirs, ours, counted)


def _unequal(family: str, theirs: Samples, ours: Samples) -> Iterator[tuple[str, str]]:
    for key in theirs.keys() | ours.keys():
        if theirs.get(key) != ours.get(key):
            yield family, f"{key} is {ours.get(key)}, not {theirs.get(key)}"


def _unrounded(family: str, theirs: Page, ours: Page, counted: str) -> Iterator[tuple[str, str]]:
    """Yield durations beyond Triton's rounding: it drops up to a microsecond per observation."""
    native, kept = samples(theirs, family), samples(ours, family)
    if native.keys() != kept.keys():
        yield family, f"has {sorted(kept)}, not {sorted(native)}"
        return
    observations = {labels: number for (_, labels), number in samples(theirs, counted).items()}
    for key, number in native.items():
        if not 0 <= round(kept[key] - number, 3) <= observations[key[1]]:
            yield family, f"{key} is {kept[key]}, not {number} and a bit"


def strayed(statistics: Versions, ours: Page) -> Iterator[tuple[str, str]]:
    """Yield each of the exporter's own families that contradicts Triton's statistics, and how."""
    expected = _expected(statistics)
    families = {name.removesuffix("_total") for name, _ in expected} | {BATCH}
    shown: Samples = {}
    for family in families:
        for (name, labels), number in samples(ours, family).items():
            if not name.endswith("_bucket"):
                # A model's tags are not in its statistics.
                kept = tuple((n, text) for n, text in labels if not n.startswith("_"))
                shown[name, kept] = number
    for key in expected.keys() | shown.keys():
        if not math.isclose(expected.get(key, math.nan), shown.get(key, math.nan), rel_tol=EXACT):
            yield key[0], f"{key[1]} is {shown.get(key)}, not {expected.get(key)}"
    yield from _astray_in_buckets(statistics, ours)


def _expected(statistics: Versions) -> Samples:
    """Return the expected samples of the exporter's own families."""
    found: Samples = {("sidestep_triton_model_versions", ()): len(statistics)}
    for (model, version), stats in statistics.items():
        for name, number, own in _expected_of(stats):
            labels = {"model": model, "version": version, **own}
            found[f"sidestep_triton_{name}", tuple(sorted(labels.items()))] = number
    return found


def _expected_of(stats: Mapping[str, Any]) -> Iterator[tuple[str, float, Mapping[str, str]]]:
    """Yield name, value and own labels of each sample of a version."""
    counts = _executions(stats)
    busy = 0.0
    for batch in stats["batch_stats"]:
        size = {"batch_size": str(batch["batch_size"])}
        seconds = {stage: batch[stage]["ns"] / 1e9 for stage in STAGES}
        busy += sum(seconds.values())
        yield "batch_executions_total", counts[batch["batch_size"]], size
        yield "batch_seconds_total", sum(seconds.values()), size
        for stage, number in seconds.items():
            yield "batch_stage_seconds_total", number, {**size, "stage": stage}
    yield "batch_size_count", stats["execution_count"], {}
    yield "batch_size_sum", sum(size * count for size, count in counts.items()), {}
    if stats["name"] != "chain":
        # An ensemble's executions are counted by its members.
        yield "busy_seconds_total", busy, {}
        yield "instances", 1, {}
    failed = stats["inference_stats"]["fail"]
    yield "failed_requests_total", failed["count"], {}
    yield "failed_request_seconds_total", failed["ns"] / 1e9, {}
    yield "last_inference_timestamp_seconds", stats["last_inference"] / 1e3, {}


def _executions(stats: Mapping[str, Any]) -> dict[int, int]:
    """Return the executions of each batch size."""
    return {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}


def _astray_in_buckets(statistics: Versions, ours: Page) -> Iterator[tuple[str, str]]:
    shown = samples(ours, BATCH)
    for (name, labels), number in shown.items():
        of = dict(labels)
        if name.endswith("_bucket"):
            counts = _executions(statistics[of["model"], of["version"]])
            expected = sum(n for size, n in counts.items() if size <= float(of["le"]))
            if number != expected:
                yield BATCH, f"{of} is {number}, not {expected}"


async def settled(
    server: TritonServer,
    exporter: ExporterProcess,
    *models: str,
    native: bool = True,
    passed: bool = False,
) -> tuple[Page, Found]:
    """Return the exporter's page and its differences, as soon as there are none or after a while.

    Args:
        server: A server that is idle, or soon will be.
        exporter: An exporter that polls it.
        models: Models to poll one by one; none to poll all at once.
        native: Compare Triton's own page, too.
        passed: See ``differences``.
    """
    ours = Page()
    found: Found = [("every family", "was never compared")]

    async def agree() -> bool:
        nonlocal ours, found
        shown = parse(await exporter.page())
        strays = list(strayed(await server.statistics(*models), shown))
        theirs = parse(await server.page()) if native else Page()
        others = differences(theirs, shown, passed=passed) if native else ()
        ours, found = shown, [*strays, *others]
        return not found

    with contextlib.suppress(AssertionError):
        await until(agree, 20.0)
    return ours, found


def state(page: Page) -> str:
    """Return the server's state by the page, or an empty string if the page has none."""
    family = "sidestep_triton_state"
    found = [state for state in STATES if value(page, family, state=state) == 1]
    assert len(found) == (family in page), page[family]
    return found[0] if found else ""


async def reached(exporter: ExporterProcess, wanted: str) -> Page:
    """Wait until the server's state is ``wanted``, and return the page."""
    page = Page()

    async def has() -> bool:
        nonlocal page
        page = parse(await exporter.page())
        return state(page) == wanted

    await until(has, 20.0, f"state {wanted}")
    return page


def answered(page: Page) -> Counter[tuple[str, str]]:
    """Count the answered requests of each model version by the page."""
    found: Counter[tuple[str, str]] = Counter()
    for (_, labels), number in samples(page, SUCCESS).items():
        of = dict(labels)
        found[of["model"], of["version"]] += int(number)
    return +found


class Sampler:
    """A scraper in the background that records every counter which decreases.

    A series that disappears must not come back with a lower value.

    Attributes:
        exporter: Exporter to scrape; None for a pause.
        looks: Scrapes so far.
        shrunk: Decreases so far.
        states: States of the server, in order.
    """

    def __init__(self) -> None:
        self.exporter: ExporterProcess | None = None
        self.looks = 0
        self.shrunk: list[str] = []
        self.states: list[str] = []
        self._most: Samples = {}

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended

    async def _look(self) -> None:
        while True:
            exporter = self.exporter
            if exporter is not None:
                try:
                    self.take(parse(await exporter.page()))
                except aiohttp.ClientError:
                    assert exporter is not self.exporter or exporter.code is not None
            await asyncio.sleep(PERIOD)

    def check(self) -> None:
        """Assert that no counter has decreased, over enough scrapes."""
        assert self.shrunk == []
        assert self.looks > 20

    def take(self, page: Page) -> None:
        """Compare a page with the highest values so far."""
        self.looks += 1
        found = state(page)
        if found and self.states[-1:] != [found]:
            self.states.append(found)
        for name, family in page.items():
            if family.kind in ("counter", "histogram") and _is_ours(name):
                for key, number in family.samples.items():
                    if number < self._most.get(key, 0.0):
                        self.shrunk.append(f"{key}: {number} after {self._most[key]}")
                    self._most[key] = max(number, self._most.get(key, 0.0))


def _is_ours(family: str) -> bool:
    """Return whether the exporter counts a family itself."""
    return family in COUNTS or family in DURATIONS or family.startswith("sidestep_triton_")
