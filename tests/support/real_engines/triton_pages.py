"""The exporter's page against Triton's own page and statistics, and over time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import aiohttp

from pages import Labels
from real_engines.comparison import Found, Page, parse, value
from real_engines.processes import ExporterProcess, until
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
"""And what has as many observations, or more: Triton rounds each of them down."""
PASSED = (
    FAILURE,
    "nv_inference_pending_request_count",
    "nv_cache_num_entries",
    "nv_cache_num_hits",
    "nv_cache_num_lookups",
    "nv_cache_num_misses",
)
"""Families that only Triton's own page has, and that rest when the server does."""
BATCH = "sidestep_triton_batch_size"
STATES = ("up", "stale", "down")
STAGES = ("input", "infer", "output")
EXACT = 1e-13
"""Relative: floats made of whole nanoseconds, and Unix times to the millisecond."""

Samples = dict[tuple[str, Labels], float]


def samples(page: Page, family: str, *, without: Iterable[str] = ()) -> Samples:
    """A family's samples, those that only labels ``without`` tell apart summed."""
    found: Samples = {}
    for (name, labels), number in (page[family].samples if family in page else {}).items():
        kept = tuple((label, text) for label, text in labels if text and label not in without)
        found[name, kept] = found.get((name, kept), 0.0) + number
    return found


def differences(theirs: Page, ours: Page, *, passed: bool) -> Iterator[tuple[str, str]]:
    """What our page has otherwise than Triton's own, where it must be the same.

    ``passed``: whether the exporter shows what only Triton's own page has, too.
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
    """Each observation may have lost up to a microsecond in Triton, and never gained one."""
    native, kept = samples(theirs, family), samples(ours, family)
    if native.keys() != kept.keys():
        yield family, f"has {sorted(kept)}, not {sorted(native)}"
        return
    observations = {labels: number for (_, labels), number in samples(theirs, counted).items()}
    for key, number in native.items():
        if not 0 <= round(kept[key] - number, 3) <= observations[key[1]]:
            yield family, f"{key} is {kept[key]}, not {number} and a bit"


def strayed(statistics: Versions, ours: Page) -> Iterator[tuple[str, str]]:
    """What our page has otherwise than Triton's statistics say, in families that are our own."""
    expected = _expected(statistics)
    families = {name.removesuffix("_total") for name, _ in expected} | {BATCH}
    shown: Samples = {}
    for family in families:
        for (name, labels), number in samples(ours, family).items():
            if not name.endswith("_bucket"):
                # Tags of a model are not in its statistics.
                kept = tuple((n, text) for n, text in labels if not n.startswith("_"))
                shown[name, kept] = number
    for key in expected.keys() | shown.keys():
        if not math.isclose(expected.get(key, math.nan), shown.get(key, math.nan), rel_tol=EXACT):
            yield key[0], f"{key[1]} is {shown.get(key)}, not {expected.get(key)}"
    yield from _astray_in_buckets(statistics, ours)


def _expected(statistics: Versions) -> Samples:
    """By sample name and labels."""
    found: Samples = {("sidestep_triton_model_versions", ()): len(statistics)}
    for (model, version), stats in statistics.items():
        for name, number, size in _expected_of(stats):
            own = {"batch_size": str(size)} if size else {}
            labels = {"model": model, "version": version, **own}
            found[f"sidestep_triton_{name}", tuple(sorted(labels.items()))] = number
    return found


def _expected_of(stats: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Name, number and batch size of each sample of a version; 0 for those of none."""
    counts = _executions(stats)
    seconds = {
        batch["batch_size"]: sum(batch[f"compute_{stage}"]["ns"] for stage in STAGES) / 1e9
        for batch in stats["batch_stats"]
    }
    for size, count in counts.items():
        yield "batch_executions_total", count, size
        yield "batch_seconds_total", seconds[size], size
    yield "batch_size_count", stats["execution_count"], 0
    yield "batch_size_sum", sum(size * count for size, count in counts.items()), 0
    if stats["name"] != "chain":
        # Executions of an ensemble are its members'.
        yield "busy_seconds_total", sum(seconds.values()), 0
        yield "instances", 1, 0
    failed = stats["inference_stats"]["fail"]
    yield "failed_requests_total", failed["count"], 0
    yield "failed_request_seconds_total", failed["ns"] / 1e9, 0
    yield "last_inference_timestamp_seconds", stats["last_inference"] / 1e3, 0


def _executions(stats: Mapping[str, Any]) -> dict[int, int]:
    """Of each batch size."""
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
    """Our page, and what differs: at once when nothing does, and else after a while.

    Args:
        server: At rest, or about to be.
        exporter: One that polls it.
        models: To ask for one by one; otherwise Triton is asked for all at once.
        native: Whether Triton shows a page of its own that can be compared.
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
    """What the server is, by the page; empty: it says nothing."""
    family = "sidestep_triton_state"
    found = [state for state in STATES if value(page, family, state=state) == 1]
    assert len(found) == (family in page), page[family]
    return found[0] if found else ""


async def reached(exporter: ExporterProcess, wanted: str, timeout: float = 20.0) -> Page:
    """The page when the server's state is ``wanted``."""
    page = Page()

    async def has() -> bool:
        nonlocal page
        page = parse(await exporter.page())
        return state(page) == wanted

    await until(has, timeout, f"state {wanted}")
    return page


def answered(page: Page) -> Counter[tuple[str, str]]:
    """Requests that each model version has answered, by the page."""
    found: Counter[tuple[str, str]] = Counter()
    for (_, labels), number in samples(page, SUCCESS).items():
        of = dict(labels)
        found[of["model"], of["version"]] += int(number)
    return +found


class Sampler:
    """Looks at a page all the time: nothing that counts may ever be less than it was.

    What disappears and comes back has to come back with no less.

    Attributes:
        exporter: Whose page; another one's or nobody's from now on.
        looks: How many.
        shrunk: What was less than before.
        states: Those of the server, one after the other.
    """

    def __init__(self, period: float = 0.1) -> None:
        self.exporter: ExporterProcess | None = None
        self.period = period
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
            await asyncio.sleep(self.period)

    def check(self) -> None:
        """Nothing has shrunk, in enough looks to tell."""
        assert self.shrunk == []
        assert self.looks > 20

    def take(self, page: Page) -> None:
        """One look."""
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
    """Whether the exporter counts it, whatever it passes on of Triton's own page."""
    return family in COUNTS or family in DURATIONS or family.startswith("sidestep_triton_")
