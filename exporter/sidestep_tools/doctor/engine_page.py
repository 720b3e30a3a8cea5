"""Check of the metrics pages of engines and exporters."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import aiohttp

from sidestep.catalog.engine_pages import PAGES, PATH
from sidestep.catalog.page_reader import Samples, samples
from sidestep.diagnosis.finding import Code, Finding
from sidestep.engines.dialects import DIALECTS
from sidestep_tools.doctor.checks import Check, codes, run
from sidestep_tools.web_client.fetch import (
    DENIED,
    TIMEOUT,
    FetchError,
    explained,
    fetch,
    parse_address,
    refusal,
)

PREFIXES = ("nv_", *(page.prefix for page in PAGES))
WITH_UNDERSCORE = ("vllm_", "ray_vllm_", "sglang_")
WEB_FRAMEWORK = "http_request_duration_highr_seconds"
"""A family that the web servers of vLLM and SGLang have, even without metrics of the engine."""
RUNNING = tuple(page.gauges["running"][0][0].name for page in PAGES if "running" in page.gauges)
"""Gauges of running requests; an engine's page has one of them."""
AT_START = {
    "vllm:": ("vllm:num_requests_running",),
    # A scheduler sets the first with its first report, and the second when it starts.
    "sglang:": ("sglang:num_running_reqs", "sglang:max_total_num_tokens"),
}
"""Families by an engine's prefix; its own page has one of them even before the first request."""
FEATURES = ("kv_cache_metrics", "spec_decode", "lora", "hicache", "response_cache")
"""Features whose options a finding names if their families are missing."""
LISTED = 4
"""Most names that a finding lists."""


class Page(NamedTuple):
    """A metrics page; ``families`` includes those without samples."""

    name: str
    families: frozenset[str]
    samples: Samples

    @property
    def is_exporters(self) -> bool:
        """True for the page of a sidestep exporter."""
        return "sidestep_build_info" in self.families

    def has(self, *prefixes: str) -> bool:
        """Return whether a family's name begins with one of the prefixes."""
        return any(name.startswith(prefixes) for name in self.families)

    def engines(self) -> Iterator[str]:
        """Yield the labels of each engine, without ``origin``, which an exporter adds to equal ones."""
        for name in RUNNING:
            for sample in self.samples.get(name, ()):
                own = sorted(sample.labels.items())
                yield ", ".join(f"{label}={value}" for label, value in own if label != "origin")


def parse(name: str, text: str) -> Page:
    """Read a page in Prometheus's text format."""
    found = samples(text)
    typed = (line[7:].partition(" ")[0] for line in text.splitlines() if line[:7] == "# TYPE ")
    return Page(name, frozenset((*typed, *found)), found)


async def read(session: aiohttp.ClientSession, name: str) -> Page | Finding:
    """Return the page at an address or in a file, or why it cannot be read."""
    file = Path(name)
    try:
        if await asyncio.to_thread(file.is_file):
            return _parsed(name, await asyncio.to_thread(file.read_text, "utf-8", "replace"))
        address = parse_address(name)
        answer = await fetch(session, name if address.path else f"{address.root}/metrics")
    except (FetchError, OSError) as error:
        return NO_ANSWER.on(name, getattr(error, "strerror", None) or str(error))
    if answer.status == HTTPStatus.OK:
        return _parsed(name, answer.text)
    return (NOT_ALLOWED if answer.status in DENIED else NO_PAGE).on(name, refusal(answer.status))


async def find(session: aiohttp.ClientSession, url: str) -> Page | None:
    """Return the page of the engine at ``url``, or None if there is none.

    A server that answers no HEAD may give its statistics to one reader only, so it is not asked.
    """
    address = parse_address(url)
    page_url = f"{address.root}{address.path.rstrip('/') or PATH}"
    try:
        with explained():
            async with session.head(page_url, timeout=aiohttp.ClientTimeout(TIMEOUT)) as answer:
                if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
                    return None
    except FetchError:
        return None
    page = await read(session, page_url)
    return page if isinstance(page, Page) and page.has(*PREFIXES) else None


def _parsed(name: str, text: str) -> Page | Finding:
    start = text.lstrip()[:1]
    if start in ("[", "{"):
        return JSON.on(name, f"it begins with {start}")
    try:
        page = parse(name, text)
    except ValueError as error:
        return NOT_A_PAGE.on(name, str(error)[:100])
    return page if page.families else NOT_A_PAGE.on(name, "it has no samples")


def _metrics_off(page: Page) -> list[str]:
    if not page.has(*PREFIXES, *WITH_UNDERSCORE):
        return ["its families are those of the web framework only"] * page.has(WEB_FRAMEWORK)
    return [
        f"it has no sample of {' or '.join(names)}"
        for prefix, names in AT_START.items()
        if page.has(prefix) and not page.is_exporters and not page.samples.keys() & names
    ]


def _repeated(page: Page) -> Iterator[str]:
    for name, found in page.samples.items():
        series = Counter(tuple(sorted(each.labels.items())) for each in found)
        repeated = sum(count > 1 for count in series.values())
        if repeated:
            yield f"{repeated} series of {name}"


def _without_options(page: Page) -> Iterator[str]:
    for dialect in DIALECTS.values():
        if page.has(f"{dialect.name}:" if dialect.name != "triton" else "nv_"):
            rows = {each: [r.name for r in dialect.rows if r.feature == each] for each in FEATURES}
            absent = [each for each, names in rows.items() if page.families.isdisjoint(names)]
            options = "; ".join(dialect.feature_options[each] for each in absent if rows[each])
            if options:
                yield f"{dialect.title} lacks what needs {options}"


def _former(page: Page, *, is_alone: bool) -> str:
    """List the former names on a page whose successors are there, too, or (``is_alone``) are not."""
    rows = [row for dialect in DIALECTS.values() for row in dialect.rows if row.status == "hidden"]
    return _listed(
        f"{row.name} is now {row.successor}"
        for row in rows
        # An exporter exposes former names by --metrics.legacy, even if the successor has no data.
        if row.name in page.families
        and (page.is_exporters or row.successor.partition(" ")[0] in page.families) != is_alone
    )


def _without_latencies(page: Page) -> Iterator[str]:
    for each in PAGES:
        matches = [match for one in each.counters.get("generation", ()) for match in one]
        generated = [
            sample
            for match in matches
            for sample in page.samples.get(match.name, ())
            if dict(match.labels).items() <= sample.labels.items()
        ]
        is_part = any(s.labels.get("engine_type") in ("prefill", "decode") for s in generated)
        observed = [f"{name}_count" for name in each.histograms.get("ttft", ())]
        first_tokens = [s for name in observed for s in page.samples.get(name, ()) if s.value]
        if any(s.value for s in generated) and observed and not (first_tokens or is_part):
            yield f"{observed[0]} is 0, or is missing"


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more


# fmt: off
NO_ANSWER = Code("SD201", "error", "The page cannot be read",
    "The server does not answer, or the file cannot be read.",
    "Give the address that Prometheus scrapes, or the path of a file with the page.")
NOT_ALLOWED = Code("SD202", "error", "The server denies access to the page",
    "The page needs a password, a header or a client certificate.",
    "Give --user, --header, or --cert and --key, and Prometheus' job the same.")
NO_PAGE = Code("SD203", "error", "There is no metrics page at this path",
    "SGLang has a page with --enable-metrics only, TensorRT-LLM at /prometheus/metrics with `return_perf_metrics: true` only, Triton at port 8002. vLLM answers HTTP 500 if it cannot read PROMETHEUS_MULTIPROC_DIR.",
    "Correct the path, start the engine with its metrics, or put PROMETHEUS_MULTIPROC_DIR on a local disk.")
JSON = Code("SD204", "error", "The page is JSON",
    "It is another interface: TensorRT-LLM's /metrics gives iteration statistics as JSON to one reader only.",
    "Scrape /prometheus/metrics of TensorRT-LLM, with `return_perf_metrics: true`.")
NOT_A_PAGE = Code("SD205", "error", "The answer is no metrics page",
    "It is not in Prometheus' text format, or empty, as at other paths of Triton's metrics port, and of a vLLM whose processes do not share PROMETHEUS_MULTIPROC_DIR.",
    "Give the whole address of the metrics page.")
TWO_PAGES = Code("SD210", "warning", "An engine is on its own page and on an exporter's",
    "Where Prometheus scrapes both, all sums count the engine twice.",
    "Scrape one of the two; SIDESTEP_VLLM_MODE=instead (SIDESTEP_SGLANG_MODE) turns the engine's own off.")
CHECKS: Sequence[Check[Page]] = (
    Check(Code("SD206", "warning", "The page is of no known engine",
        "It has no family of vLLM, SGLang, Triton, TensorRT-LLM or llama.cpp. On an exporter's page no engine has sent anything yet.",
        "Give the page of an engine; for an exporter run `sidestep doctor URL`."),
        lambda p: not p.has(*PREFIXES, *WITH_UNDERSCORE, WEB_FRAMEWORK) and len(p.families), "it has {} families of others"),
    Check(Code("SD207", "warning", "The engine's own metrics are off",
        "vLLM runs with --disable-log-stats, or SIDESTEP_VLLM_MODE or SIDESTEP_SGLANG_MODE is `instead`.",
        "With `instead`, scrape the exporter's page; otherwise start the engine without --disable-log-stats."),
        _metrics_off),
    Check(Code("SD208", "error", "A series is on the page twice",
        "Two samples have the same name and labels. Prometheus takes one of them.",
        "Find what merges two pages into one: a proxy, or two engines with the same labels."),
        _repeated),
    Check(Code("SD209", "warning", "An engine is on the page twice",
        "Two sets of series differ by the label `origin` only, so sums count both. With equal values it is one engine with two sources; otherwise two replicas have the same labels.",
        "Remove one source, or give each replica a SIDESTEP_NAMESPACE."),
        lambda p: [f"{count} sets of series have the labels {engine}" for engine, count in Counter(p.engines()).items() if count > 1]),
    Check(Code("SD211", "info", "Families are missing because the engine's options are off",
        "Panels and queries of these families are empty.",
        "Start the engine with the named options if you need them."),
        _without_options),
    Check(Code("SD212", "warning", "The engine has old names only",
        "The release is older than the present names of its families; queries for these are empty.",
        "Upgrade the engine, or let sidestep's plugin send its metrics: the exporter's page has the new names."),
        lambda p: _former(p, is_alone=True)),
    Check(Code("SD213", "info", "The page has deprecated names",
        "The families are there under old names, too; a later release does not have them.",
        "Change dashboards and rules to the successors."),
        lambda p: _former(p, is_alone=False)),
    Check(Code("SD215", "warning", "vllm:cache_config_info is missing",
        "Panels in tokens or bytes are empty; a scrape job drops the family, or the engine has not finished its start.",
        "Check `metric_relabel_configs` of the job, and look again once the engine serves."),
        lambda p: "vllm:num_requests_running" in p.samples and "vllm:cache_config_info" not in p.samples, "it has no vllm:cache_config_info"),
    Check(Code("SD218", "warning", "Latencies are missing",
        "The engine has generated tokens without a TTFT: its front end has no metrics or no plugin, as with several tokenizer workers of SGLang.",
        "Run SGLang with --tokenizer-worker-num 1, and vLLM with a front end that loads the plugin."),
        _without_latencies),
    Check(Code("SD219", "warning", "The names have an underscore for the colon",
        "The families come by way of Ray or OpenTelemetry, or from SGLang's /v1/loads: queries for `vllm:` find none of them.",
        "Scrape the engine's own /metrics, or the exporter's page."),
        lambda p: not p.has(*PREFIXES) and _listed(each for each in p.families if each.startswith(WITH_UNDERSCORE))),
)
# fmt: on
CODES = sorted((NO_ANSWER, NOT_ALLOWED, NO_PAGE, JSON, NOT_A_PAGE, TWO_PAGES, *codes(CHECKS)))


def check(pages: Sequence[Page]) -> Iterator[Finding]:
    """Yield what is wrong with each page, and with two pages together."""
    for page in pages:
        yield from run(CHECKS, page, page.name)
        for other in pages:
            both = set(page.engines()) & set(other.engines())
            if both and other.is_exporters and not page.is_exporters:
                yield TWO_PAGES.on(page.name, f"{other.name} has it, too: {_listed(both)}")
