"""Check of a Prometheus: its targets, its rules, and its clock."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from sidestep.catalog.engine_pages import PAGES as ENGINE_PAGES
from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.exporter import SKEW_SECONDS
from sidestep_tools.doctor.prometheus_api import Api, RefusedError
from sidestep_tools.doctor.queries.known_metrics import dialect_of
from sidestep_tools.doctor.queries.promql import PromqlError, parse, selectors
from sidestep_tools.web_client.fetch import FetchError

# fmt: off
NO_ANSWER = Code("SD301", "error", "Prometheus does not answer",
    "Nothing listens at the address, access is denied, or it is no Prometheus.",
    "Give the address of Prometheus's own page, with its path prefix if it has one; --user and --header as to curl.")
NOT_SCRAPED = Code("SD302", "error", "No exporter is scraped",
    "Prometheus has no series of a sidestep exporter: no job has its address, or a PodMonitor or ServiceMonitor does not select it.",
    "Add a job for the exporter's port, see deploy/prometheus.yml; in Kubernetes, run `sidestep doctor --manifest`.")
DOWN = Code("SD303", "error", "A target is down",
    "Prometheus cannot scrape an exporter or an engine; the text is Prometheus's own.",
    "Mend what the error names: a refused connection is a wrong port or a process that has ended; a deadline needs a longer scrape_timeout; 401 needs basic_auth.")
DOUBLED = Code("SD304", "error", "One job scrapes the same engines twice",
    "Both pages have the same counters under one `job`, so that every sum is twice what it should be.",
    "Scrape one of the two: the exporter's /metrics.")
TWO_JOBS = Code("SD305", "warning", "Two jobs scrape the same engines",
    "Sums that do not select a `job` are twice what they should be, as on most boards of engines.",
    "Scrape one of the two, or select the job in every query.")
WINDOW = Code("SD306", "warning", "A rule's window is too short for the scrape interval",
    "A rate needs two samples in its window; with less than two intervals it has gaps or no result.",
    "Scrape more often, or make the window at least twice the interval; four times is usual.")
NO_RULES = Code("SD308", "info", "No rule reads the metrics of engines",
    "Neither sidestep's recording rules and alerts nor others are loaded; boards that query recorded names are empty.",
    "Load deploy/rules/*.yaml by `rule_files`; see alerting.md.")
RULE_FAILS = Code("SD309", "error", "A rule cannot be evaluated",
    "Prometheus reports an error for the rule; it records nothing, and its alert never fires.",
    "Mend what the error names; two sources of one series are the usual cause.")
NOT_RECORDED = Code("SD310", "error", "A rule reads what no rule records",
    "The rule that records the name is not loaded, so this one never has a result.",
    "Load recording.yaml, too, in the same Prometheus.")
EXPORTED = Code("SD311", "warning", "Labels of the page clash with those of the target",
    "Prometheus renames a label of the page to `exported_...` if the target has it, too; queries that select or group by it then see the target's.",
    "Set `honor_labels: true` in the job, or remove the label from the target by relabel_configs.")
CLOCK = Code("SD312", "warning", "Clocks differ",
    "Ages and the times of restarts are computed from two clocks.",
    "Synchronise the hosts by NTP.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))

EXPORTER = "sidestep_build_info"
COUNTERS = (
    *(page.counters["generation"][-1][0].name for page in ENGINE_PAGES if page.dialect != "triton"),
    "nv_inference_count",
)
"""A counter of each engine."""
PAGES = f'{{__name__=~"{EXPORTER}|{"|".join(COUNTERS)}"}}'
OURS = re.compile(r"sidestep|vllm|sglang|llama|trtllm|triton|:9857\b", re.IGNORECASE)
"""Matches jobs and addresses of exporters and engines."""
ENGINES = re.compile(
    rf"\b({'|'.join(page.prefix for page in ENGINE_PAGES)}|sidestep_|(engine|instance|model|model_le):)"
)
"""Matches rules that read metrics of engines."""
_WINDOW = re.compile(r"\[\s*((?:\d+(?:ms|[smhdwy]))+)\s*\]")
UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
SAMPLES = 2
"""Fewest samples of a rate."""
ALIKE = 0.05
"""Relative difference up to which two counters are the same one, scraped at two moments."""
PARTIAL = re.compile(r"[?&]name(\[\]|%5B%5D)=")
"""Matches addresses that select families."""
AHEAD = (
    "max by (job, instance) (sidestep_engine_last_seen_timestamp_seconds) - time()"
    f" >= {SKEW_SECONDS}"
)
"""Times of exporters in Prometheus's future."""
Key = tuple[str, str]
"""Job and instance."""


class Target(NamedTuple):
    """A target that Prometheus scrapes.

    Attributes:
        interval: Seconds between scrapes; 0: not known.
    """

    job: str
    instance: str
    url: str
    pod: str
    is_up: bool
    error: str
    interval: float

    @property
    def key(self) -> Key:
        """Its labels in series."""
        return self.job, self.instance


class _Read(NamedTuple):
    """Answers read from a Prometheus.

    Attributes:
        skew: Seconds by which its clock is ahead of this machine's.
        targets: Those of exporters and engines.
        exporters: Times at which exporters' processes started.
        counters: Values of ``COUNTERS``.
        names: Of all metrics.
        labels: Of the pages of exporters and engines.
        ahead: Seconds by which clocks of exporters are ahead of Prometheus's, by instance.
    """

    skew: float
    targets: list[Target]
    exporters: dict[Key, float]
    counters: dict[str, dict[Key, float]]
    rules: list[dict[str, Any]]
    names: frozenset[str]
    labels: list[str]
    ahead: dict[str, float]


async def check(session: aiohttp.ClientSession, url: str) -> AsyncIterator[Finding]:
    """Yield what is wrong with the Prometheus at ``url``.

    Raises:
        ConfigError: It is no address of a web server.
    """
    try:
        read = await _read(Api(session, url))
        found = [*_server(url, read), *_doubled(url, read), *_rules(url, read)]
    except (FetchError, RefusedError) as error:
        yield NO_ANSWER.on(url, str(error))
        return
    except (KeyError, TypeError, ValueError, AttributeError):
        yield NO_ANSWER.on(url, "its answers are none of Prometheus")
        return
    for finding in found:
        yield finding


async def _read(api: Api) -> _Read:
    """Read all that the checks need.

    Raises:
        FetchError: Prometheus does not answer.
        RefusedError: Prometheus refuses a request.
    """
    now = (await api.query("time()"))[0][1] - time.time()
    recent = await api.query(f"count by (job, instance) (last_over_time({PAGES}[1h]))")
    jobs = {labels.get("job", "") for labels, _ in recent}
    starts = {
        _key(labels): value for labels, value in await api.query("process_start_time_seconds")
    }
    active = (await api.optional("targets", {"state": "active"})).get("activeTargets", ())
    groups = (await api.optional("rules")).get("groups", ())
    return _Read(
        now,
        [
            target
            for target in map(_target, active)
            if target.job in jobs or OURS.search(f"{target.job} {target.url}")
        ],
        {_key(labels): starts.get(_key(labels), 0.0) for labels, _ in await api.query(EXPORTER)},
        {
            name: {
                _key(labels): value
                for labels, value in await api.query(f"sum by (job, instance) ({name})")
            }
            for name in COUNTERS
        },
        [rule for group in groups for rule in group["rules"]],
        frozenset(await api.names()),
        list(await api.optional("labels", {"match[]": PAGES})),
        {labels.get("instance", ""): value for labels, value in await api.query(AHEAD)},
    )


def _server(url: str, read: _Read) -> Iterator[Finding]:
    """Yield what is wrong with the server and its configuration."""
    if abs(read.skew) >= SKEW_SECONDS:
        yield CLOCK.on(url, f"its clock is {read.skew:+.0f} s from this machine's")
    for instance, seconds in read.ahead.items():
        yield CLOCK.on(url, f"the clock of {instance} is {seconds:.0f} s ahead of Prometheus's")
    if not read.exporters:
        yield NOT_SCRAPED.on(url, f"there is no {EXPORTER}")
    for each in read.targets:
        if not each.is_up:
            yield DOWN.on(url, f"{each.url} (job {each.job}): {each.error}")
    for label in read.labels:
        if label.startswith("exported_"):
            yield EXPORTED.on(url, f"series have the label {label}")


def _key(labels: Mapping[str, str]) -> Key:
    return labels.get("job", ""), labels.get("instance", "")


def _target(found: Mapping[str, Any]) -> Target:
    labels = found["labels"]
    pod = labels.get("pod", "")
    return Target(
        *_key(labels),
        found["scrapeUrl"],
        f"{labels.get('namespace', '')}/{pod}" if pod else "",
        found["health"] != "down",
        found["lastError"],
        _seconds(found.get("scrapeInterval", "")),
    )


def _seconds(duration: str) -> float:
    return sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)(ms|[smhdwy])", duration))


def _doubled(url: str, read: _Read) -> Iterator[Finding]:
    """Yield the pairs of targets that have the same engines."""
    starts = read.exporters
    groups: dict[object, list[Target]] = {}
    for each in read.targets:
        if each.is_up and not PARTIAL.search(each.url):
            host = urlsplit(each.url).hostname
            for place in filter(None, (host, each.pod, starts.get(each.key))):
                groups.setdefault(place, []).append(each)
    pairs = dict.fromkeys(pair for group in groups.values() for pair in combinations(group, 2))
    for one, other in pairs:
        is_exporter = (one.key in starts, other.key in starts)
        is_same = urlsplit(one.url).netloc == urlsplit(other.url).netloc
        if one.url == other.url:
            why = "the same page"
        elif is_same and any(is_exporter):
            why = "two views of an exporter"
        elif is_same or not _are_alike(one, other, read.counters):
            continue
        elif is_exporter == (True, True) and starts[one.key] == starts[other.key]:
            why = "one exporter under two addresses"
        elif any(is_exporter) and not all(is_exporter):
            why = "an exporter's page and its engine's own"
        else:
            continue
        code = DOUBLED if one.job == other.job else TWO_JOBS
        jobs = ", ".join(sorted({one.job, other.job}))
        yield code.on(url, f"{one.url} and {other.url} (job {jobs}) are {why}")


def _are_alike(one: Target, other: Target, counters: Mapping[str, Mapping[Key, float]]) -> bool:
    """Return whether two targets have the same count of an engine."""
    for values in counters.values():
        first, second = values.get(one.key, 0.0), values.get(other.key, 0.0)
        if first and abs(first - second) <= ALIKE * first:
            return True
    return False


def _rules(url: str, read: _Read) -> Iterator[Finding]:
    """Yield what is wrong with the rules that read metrics of engines."""
    rules = [rule for rule in read.rules if ENGINES.search(rule["query"])]
    if not rules:
        yield NO_RULES.on(url, "no rule queries them")
    recorded = {rule["name"] for rule in read.rules if rule["type"] == "recording"}
    interval = max((target.interval for target in read.targets if target.is_up), default=0.0)
    short: dict[str, list[str]] = {}
    for rule in rules:
        if rule["health"] == "err":
            yield RULE_FAILS.on(url, f"{rule['name']}: {rule.get('lastError', '')}")
        missing = sorted(_recorded_names(rule["query"]) - recorded - read.names)
        if missing:
            yield NOT_RECORDED.on(url, f"{rule['name']} reads {', '.join(missing)}")
        for window in _WINDOW.findall(rule["query"]):
            if _seconds(window) < SAMPLES * interval:
                short.setdefault(window, []).append(rule["name"])
    for window, each in short.items():
        text = (
            f"[{window}] of {', '.join(dict.fromkeys(each))}, but scrapes are {interval:g} s apart"
        )
        yield WINDOW.on(url, text)


def _recorded_names(query: str) -> set[str]:
    """Return the names with a colon that a query selects, without engines' own."""
    try:
        names = {selector.name for selector in selectors(parse(query))}
    except PromqlError:
        return set()
    return {name for name in names if ":" in name and not dialect_of(name)}
