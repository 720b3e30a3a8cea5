"""Check of metrics pages: those of engines, and those of exporters, as a scrape reads them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sidestep.catalog.engine_pages import PAGES
from sidestep.catalog.model import Row
from sidestep.diagnosis.finding import Code, Finding
from sidestep.engines.dialect import Dialect
from sidestep.engines.dialects import DIALECTS
from sidestep_tools.web_client.fetch import DENIED, FetchError, fetch, parse_address, refusal

# fmt: off
NO_ANSWER = Code("SD201", "error", "The page cannot be read",
    "The server does not answer at this address, or the file cannot be read.",
    "Give the address that Prometheus scrapes, or the path of a file with the page.")
NOT_ALLOWED = Code("SD202", "error", "The server denies access to the page",
    "The page needs a password, a header or a client certificate.",
    "Give --user, --header, or --cert and --key, and Prometheus' job the same.")
NO_PAGE = Code("SD203", "error", "There is no metrics page at this path",
    "The server answers, but not with a page: SGLang has one with --enable-metrics only, TensorRT-LLM at /prometheus/metrics with `return_perf_metrics: true` only, and Triton at port 8002. vLLM answers HTTP 500 if it cannot read PROMETHEUS_MULTIPROC_DIR, as on a network volume.",
    "Correct the path, start the engine with its metrics, or put PROMETHEUS_MULTIPROC_DIR on a local disk.")
JSON = Code("SD204", "error", "The page is JSON",
    "The address is that of another interface: TensorRT-LLM's /metrics has iteration statistics as JSON, and each is given to one reader only.",
    "Scrape /prometheus/metrics of TensorRT-LLM, with `return_perf_metrics: true`.")
NOT_A_PAGE = Code("SD205", "error", "The answer is no metrics page",
    "The answer is not in Prometheus' text format, such as the HTML of a proxy, or it is empty, as Triton's metrics port answers at other paths than /metrics, and vLLM with a PROMETHEUS_MULTIPROC_DIR that its processes do not share.",
    "Give the whole address of the metrics page.")
NO_ENGINE = Code("SD206", "warning", "The page is of no known engine",
    "It has no family of vLLM, SGLang, Triton, TensorRT-LLM or llama.cpp. On an exporter's page no engine has sent anything yet.",
    "Give the page of an engine; for an exporter run `sidestep doctor URL`.")
METRICS_OFF = Code("SD207", "warning", "The engine's own metrics are off",
    "The server has a page without the engine's own families: vLLM runs with --disable-log-stats, or SIDESTEP_VLLM_MODE or SIDESTEP_SGLANG_MODE is `instead`.",
    "With `instead`, scrape the exporter's page; otherwise start the engine without --disable-log-stats.")
REPEATED = Code("SD208", "error", "A series is on the page twice",
    "Two samples have the same name and labels. Prometheus takes one of them and counts the other in `prometheus_target_scrapes_sample_duplicate_timestamp_total`.",
    "Find what merges two pages into one: a proxy, or two engines with the same labels.")
SAME_ENGINE = Code("SD209", "warning", "An engine is on the page twice",
    "Two sets of series differ by the label `origin` only, so sums over the page count both. With equal values it is one engine with two sources; otherwise two replicas have the same labels.",
    "Remove one source, or give each replica a SIDESTEP_NAMESPACE.")
TWO_PAGES = Code("SD210", "warning", "An engine is on its own page and on an exporter's",
    "Where Prometheus scrapes both, all sums count the engine twice, and vLLM's loop pays for its page.",
    "Scrape one of the two; SIDESTEP_VLLM_MODE=instead (SIDESTEP_SGLANG_MODE) turns the engine's own off.")
OPTIONAL = Code("SD211", "info", "Families are missing because the engine's options are off",
    "Panels and queries of these families are empty.",
    "Start the engine with the named options if you need them.")
OLD_NAMES = Code("SD212", "warning", "The engine has old names only",
    "The engine is of a release from before its families were renamed; queries for the new names are empty.",
    "Upgrade the engine, or let sidestep's plugin send its metrics: the exporter's page has the new names.")
LEGACY = Code("SD213", "info", "The page has deprecated names",
    "The families are there under their old names, too (--show-hidden-metrics-for-version of vLLM, --metrics.legacy of the exporter); a later release does not have them.",
    "Change dashboards and rules to the successors.")
NO_CACHE_CONFIG = Code("SD215", "warning", "vllm:cache_config_info is missing",
    "The sizes of the KV cache and its blocks are unknown, so panels in tokens or bytes are empty; a scrape job drops the family, or the engine has not finished its start.",
    "Check `metric_relabel_configs` of the job, and look again once the engine serves.")
NO_LATENCIES = Code("SD218", "warning", "Latencies are missing",
    "The engine has generated tokens, and no TTFT has been observed: its front end has no metrics, or no plugin, as with several tokenizer workers of SGLang.",
    "Run SGLang with --tokenizer-worker-num 1, and vLLM with a front end that loads the plugin.")
RENAMED = Code("SD219", "warning", "The names have an underscore for the colon",
    "The families come by way of Ray or OpenTelemetry, or from SGLang's /v1/loads: queries for `vllm:` and `sglang:` find none of them.",
    "Scrape the engine's own /metrics, or the exporter's page.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))

VLLM, SGLANG, TRITON = "vllm:", "sglang:", "nv_"
PREFIXES = (TRITON, *(page.prefix for page in PAGES))
RUNNING = {VLLM: "vllm:num_requests_running", SGLANG: "sglang:num_running_reqs"}
"""A gauge that every engine has."""
AT_START = {
    VLLM: (RUNNING[VLLM],),
    # A scheduler sets the first with its first report, and the second when it starts.
    SGLANG: (RUNNING[SGLANG], "sglang:max_total_num_tokens"),
}
"""Of these an engine's own page has one before its first request."""
GENERATED: Sequence[tuple[str, Mapping[str, str], str]] = (
    ("vllm:generation_tokens_total", {}, "vllm:time_to_first_token_seconds_count"),
    (
        "sglang:realtime_tokens_total",
        {"mode": "decode"},
        "sglang:time_to_first_token_seconds_count",
    ),
)
"""Tokens generated so far, and the latencies observed with the first of each request."""
FEATURES = ("kv_cache_metrics", "spec_decode", "lora", "hicache", "response_cache")
"""Features of the catalogue's rows that many would like to have."""
LISTED = 4
"""Most names in a text."""


class Page(NamedTuple):
    """A metrics page.

    Attributes:
        name: Address or file, as given.
        families: Names of families, those without samples included, as their rows have them.
        samples: Samples by their name.
    """

    name: str
    families: frozenset[str]
    samples: Mapping[str, Sequence[Sample]]

    @property
    def is_exporters(self) -> bool:
        """True for the page of a sidestep exporter."""
        return "sidestep_build_info" in self.families

    def has(self, *prefixes: str) -> bool:
        """Return whether a family's name begins with one of the prefixes."""
        return any(name.startswith(prefixes) for name in self.families)

    def total(self, name: str, labels: Mapping[str, str]) -> float:
        """Return the sum of the samples with these labels."""
        found = self.samples.get(name, ())
        return sum(each.value for each in found if labels.items() <= each.labels.items())

    def engines(self) -> Iterator[str]:
        """Yield the labels of each engine, without the one that an exporter adds to equal ones."""
        for name in RUNNING.values():
            for sample in self.samples.get(name, ()):
                own = sorted(sample.labels.items())
                yield ", ".join(f"{label}={value}" for label, value in own if label != "origin")


def parse(name: str, text: str) -> Page:
    """Return a page.

    Raises:
        ValueError: It is not in the text format.
    """
    families, samples = set(), dict[str, list[Sample]]()
    for metric in text_string_to_metric_families(text):
        # The parser removes the suffix of a counter; Triton's counters have none.
        families |= (
            {metric.name, f"{metric.name}_total"} if metric.type == "counter" else {metric.name}
        )
        for sample in metric.samples:
            samples.setdefault(sample.name, []).append(sample)
    return Page(name, frozenset(families | samples.keys()), samples)


async def check(session: aiohttp.ClientSession, names: Sequence[str]) -> AsyncIterator[Finding]:
    """Yield what is wrong with the pages at addresses or in files.

    Raises:
        ConfigError: One is no address of a web server.
    """
    pages = []
    for name in names:
        text = await read(session, name)
        page = text if isinstance(text, Finding) else _parsed(name, text)
        if isinstance(page, Finding):
            yield page
            continue
        pages.append(page)
        for each in check_page(page):
            yield each
    for each in _on_two_pages(pages):
        yield each


def check_page(page: Page) -> Iterator[Finding]:
    """Yield what is wrong with a page."""
    yield from _format(page)
    if not page.has(*PREFIXES):
        if page.has("vllm_", "ray_vllm_", "sglang_"):
            yield RENAMED.on(page.name, _listed(n for n in page.families if "_num_" in n))
        elif page.has("http_request_duration_highr_seconds"):
            yield METRICS_OFF.on(page.name, "its families are those of the web framework only")
        else:
            yield NO_ENGINE.on(page.name, f"it has {len(page.families)} families of others")
        return
    yield from _missing(page)
    yield from _names(page)
    yield from _same_engine(page)
    if RUNNING[VLLM] in page.samples and "vllm:cache_config_info" not in page.samples:
        yield NO_CACHE_CONFIG.on(page.name, "it has no vllm:cache_config_info")


async def read(session: aiohttp.ClientSession, name: str) -> str | Finding:
    """Return the text of a page at an address or in a file, or why it cannot be read.

    Raises:
        ConfigError: It is neither a file nor the address of a web server.
    """
    file = Path(name)
    try:
        if await asyncio.to_thread(file.is_file):
            return await asyncio.to_thread(file.read_text, "utf-8", "replace")
        address = parse_address(name)
        answer = await fetch(session, name if address.path else f"{address.root}/metrics")
    except (FetchError, OSError) as error:
        return NO_ANSWER.on(name, getattr(error, "strerror", None) or str(error))
    if answer.status == HTTPStatus.OK:
        return answer.text
    return (NOT_ALLOWED if answer.status in DENIED else NO_PAGE).on(name, refusal(answer.status))


def _parsed(name: str, text: str) -> Page | Finding:
    start = text.lstrip()[:1]
    if start in ("[", "{"):
        return JSON.on(name, f"it begins with {start}")
    try:
        page = parse(name, text)
    except ValueError as error:
        return NOT_A_PAGE.on(name, str(error)[:100])
    return page if page.families else NOT_A_PAGE.on(name, "it has no samples")


def _format(page: Page) -> Iterator[Finding]:
    for name, found in page.samples.items():
        series = Counter(tuple(sorted(each.labels.items())) for each in found)
        repeated = sum(count > 1 for count in series.values())
        if repeated:
            yield REPEATED.on(page.name, f"{repeated} series of {name}")


def _missing(page: Page) -> Iterator[Finding]:
    for prefix, names in AT_START.items():
        if page.has(prefix) and not page.is_exporters and not page.samples.keys() & names:
            yield METRICS_OFF.on(page.name, f"it has no sample of {' or '.join(names)}")
    for dialect in DIALECTS.values():
        if page.has(f"{dialect.name}:" if dialect.name != "triton" else TRITON):
            absent = [each for each in FEATURES if _is_absent(page, dialect, each)]
            if absent:
                options = "; ".join(dialect.feature_options[each] for each in absent)
                yield OPTIONAL.on(page.name, f"{dialect.title} lacks what needs {options}")
    for generated, labels, observed in GENERATED:
        others = {each.labels.get("engine_type") for each in page.samples.get(generated, ())}
        is_whole = others.isdisjoint({"prefill", "decode"})
        if is_whole and page.total(generated, labels) and not page.total(observed, {}):
            yield NO_LATENCIES.on(page.name, f"{observed} is 0, or is missing")


def _names(page: Page) -> Iterator[Finding]:
    rows = [row for dialect in DIALECTS.values() for row in dialect.rows if row.status == "hidden"]
    both: list[Row] = []
    old: list[Row] = []
    for row in rows:
        if row.name in page.families:
            is_there = row.successor.partition(" ")[0] in page.families
            # An exporter has old names without a successor's data only by --metrics.legacy.
            (both if is_there or page.is_exporters else old).append(row)
    for code, some in ((OLD_NAMES, old), (LEGACY, both)):
        if some:
            yield code.on(page.name, _listed(f"{row.name} is now {row.successor}" for row in some))


def _same_engine(page: Page) -> Iterator[Finding]:
    for engine, count in Counter(page.engines()).items():
        if count > 1:
            yield SAME_ENGINE.on(page.name, f"{count} sets of series have the labels {engine}")


def _on_two_pages(pages: Sequence[Page]) -> Iterator[Finding]:
    for own in pages:
        for other in pages:
            both = set(own.engines()) & set(other.engines())
            if both and other.is_exporters and not own.is_exporters:
                yield TWO_PAGES.on(own.name, f"{other.name} has it, too: {_listed(both)}")


def _is_absent(page: Page, dialect: Dialect, feature: str) -> bool:
    """Return whether a dialect has rows of a feature, and the page none of them."""
    names = {row.name for row in dialect.rows if row.feature == feature}
    return bool(names) and names.isdisjoint(page.families)


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more
