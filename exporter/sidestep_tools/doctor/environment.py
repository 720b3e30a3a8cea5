"""Check of the environment that an engine runs in: its packages, variables and options."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from typing import NamedTuple

from sidestep.config.variables import unknown_to_engines
from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor import endpoint
from sidestep_tools.doctor.checks import Check, codes, run

TAP = "sidestep_adapters.vllm.scheduler.SidestepScheduler"
SHORT = {"-dp": "--data-parallel-size", "-asc": "--api-server-count"}
"""Other names of vLLM's options that are looked at."""
Version = tuple[int, ...]


class InstalledEngine(NamedTuple):
    """An engine that loads sidestep's plugin.

    Attributes:
        first: The oldest release that loads the plugin.
        last: The newest release that it was tested with.
        allowed: Variable with the list of plugins that may be loaded.
        mode: Variable that says whether the engine computes its own metrics as well.
    """

    title: str
    package: str
    first: Version
    last: Version
    group: str
    allowed: str
    mode: str


VLLM = InstalledEngine(
    "vLLM", "vllm", (0, 11, 1), (0, 33), "vllm.stat_logger_plugins", "VLLM_PLUGINS",
    "SIDESTEP_VLLM_MODE",
)  # fmt: skip
SGLANG = InstalledEngine(
    "SGLang", "sglang", (0, 5, 11), (0, 5, 23), "sglang.srt.plugins", "SGLANG_PLUGINS",
    "SIDESTEP_SGLANG_MODE",
)  # fmt: skip
ENGINES = (VLLM, SGLANG)
VALUES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((each.mode for each in ENGINES), ("beside", "instead")),
    "SIDESTEP_STACKS": ("on", "off"),
}
"""Variables with a choice of values."""


class Start(NamedTuple):
    """Variables and options of an engine's start; the value of a switch is empty."""

    engine: InstalledEngine
    environ: Mapping[str, str]
    options: Mapping[str, str] = {}

    @property
    def is_tapped(self) -> bool:
        """True if vLLM runs sidestep's scheduler."""
        return self.options.get("--scheduler-cls") == TAP

    @property
    def allows_plugin(self) -> bool:
        """True if the engine may load the plugin; SGLang reads an empty list as no list."""
        given = self.environ.get(self.engine.allowed)
        if self.engine is SGLANG:
            return not given or "sidestep" in map(str.strip, given.split(","))
        return given is None or "sidestep" in given.split(",")


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line; their names may have underscores for dashes."""
    options = {}
    for given, following in zip(arguments, (*arguments[1:], "-"), strict=False):
        name, equals, value = given.partition("=")
        name = SHORT.get(name, name)
        if name.startswith("--"):
            own = value if equals else "" if following.startswith("-") else following
            options[name.replace("_", "-")] = own
    return options


def _find(path: Sequence[str], package: str) -> Distribution | None:
    """Return the metadata of a package in the directories in which Python looks for packages."""
    return next(iter(distributions(name=package, path=list(path))), None)


def installed(path: Sequence[str]) -> dict[InstalledEngine, str]:
    """Return the installed engines and their versions."""
    found = {each: _find(path, each.package) for each in ENGINES}
    return {engine: each.version for engine, each in found.items() if each is not None}


def numbers(text: str) -> Version:
    """Return the numbers of a release; none if the text says nothing of it."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    # A build from a checkout without tags has a version of its own, such as 0.1.dev1.
    return tuple(map(int, found[0].split("."))) if found and "dev" not in text else ()


def _too_old(path: Sequence[str]) -> list[str]:
    found = installed(path).items()
    return [_release(each, text) for each, text in found if () < numbers(text) < each.first]


def _untested(path: Sequence[str]) -> list[str]:
    found = ((each, text, numbers(text)) for each, text in installed(path).items())
    return [_release(each, text) for each, text, v in found if v[: len(each.last)] > each.last]


def _release(engine: InstalledEngine, text: str) -> str:
    first, last = (".".join(map(str, each)) for each in (engine.first, engine.last))
    return f"{engine.title} {text}; sidestep supports {first} to {last}"


def _without_entry_point(path: Sequence[str]) -> list[str]:
    sidestep = _find(path, "sidestep")
    return [
        f"sidestep {sidestep.version} has no entry point of the group {each.group}"
        for each in installed(path)
        if sidestep and not sidestep.entry_points.select(group=each.group)
    ]


def why_killed(start: Start) -> str:
    """Return why vLLM ends its processes before they have sent all; empty if it does not."""
    # With data parallelism vLLM starts an API server for each rank.
    options = start.options
    servers = options.get("--api-server-count", options.get("--data-parallel-size", "1"))
    servers = "1" if "--headless" in options else servers
    is_patient = options.get("--shutdown-timeout", "0") != "0"
    if is_patient or not (servers != "1" or start.is_tapped):
        return ""
    return "the tap is configured" if servers == "1" else f"it has {servers} API servers"


# fmt: off
PACKAGES: Sequence[Check[Sequence[str]]] = (
    Check(Code("SD001", "error", "sidestep is not installed beside the engine",
        "The engine's Python environment has no package `sidestep`. Sources on PYTHONPATH need their metadata (`sidestep-*.dist-info`), too.",
        "Install sidestep with the engine's own pip: PREFIX/bin/python -m pip install, with the wheel or the repository."),
        lambda p: installed(p) and _find(p, "sidestep") is None, "no package sidestep is installed"),
    Check(Code("SD002", "error", "The plugin's entry point is missing",
        "sidestep's metadata (`sidestep-*.dist-info`) does not name the plugin: the release is too old.",
        "Install a release of sidestep that supports the engine."),
        _without_entry_point),
    Check(Code("SD004", "error", "The engine's release is too old",
        "It does not load sidestep's plugin. The engine's log does not say so.",
        "Upgrade the engine, or let the exporter scrape the engine's page (--scrape)."),
        _too_old),
    Check(Code("SD005", "warning", "The engine's release is newer than those tested",
        "This release of sidestep was not tested with it. A field that it renamed is missing on the page.",
        "Upgrade sidestep, and compare the exporter's page with the engine's own."),
        _untested),
    Check(Code("SD006", "warning", "No engine is installed",
        "The Python environment has neither vLLM nor SGLang.",
        "Run the command with the engine's Python, in the engine's container."),
        lambda p: not installed(p), "neither vLLM nor SGLang is installed"),
)
VARIABLES: Sequence[Check[Mapping[str, str]]] = (
    Check(Code("SD011", "warning", "A variable has an unknown value",
        "The plugin logs it and takes the default.",
        "Set one of the named values."),
        lambda environ: [f"{name} is {value!r}, not {' or '.join(allowed)}" for name, allowed in VALUES.items()
            if (value := environ.get(name)) and value not in allowed]),
    Check(Code("SD013", "warning", "A variable is unknown",
        "Nothing reads it: it is probably misspelt.",
        "Correct the name; docs/configuration.md lists the known ones."),
        lambda environ: [f"{name} (did you mean {nearest}?)" if nearest else name for name, nearest in unknown_to_engines(environ)]),
)
ENDPOINT: Sequence[Check[Mapping[str, str]]] = (
    Check(Code("SD010", "error", "SIDESTEP_ENDPOINT is not set",
        "The plugin and the tap do nothing without it.",
        "Start the engine with SIDESTEP_ENDPOINT set to the exporter's --ingest.endpoint."),
        lambda environ: not environ.get("SIDESTEP_ENDPOINT"), "SIDESTEP_ENDPOINT is not set"),
)
ALLOWED: Sequence[Check[Start]] = (
    Check(Code("SD003", "error", "The engine may not load the plugin",
        "The list of allowed plugins (`VLLM_PLUGINS`, `SGLANG_PLUGINS`) does not contain `sidestep`. vLLM compares names as they are, spaces included.",
        "Add sidestep to the list, without spaces, or unset the variable. The tap needs no plugin."),
        lambda s: not (s.is_tapped or s.allows_plugin) and f"{s.engine.allowed} is {s.environ[s.engine.allowed]!r}"),
)
MODE: Sequence[Check[Start]] = (
    Check(Code("SD012", "info", "The engine computes its own metrics as well",
        "In the default mode, `beside`, the engine's loop still pays for them.",
        "Set the mode to `instead`; or keep both pages, and scrape only one of them."),
        lambda s: s.environ.get("SIDESTEP_ENDPOINT") and s.environ.get(s.engine.mode) != "instead"
            and f"{s.engine.mode} is {s.environ.get(s.engine.mode) or 'not set'}"),
)
OPTIONS: Sequence[Check[Start]] = (
    Check(Code("SD021", "error", "The tap's path is wrong",
        "vLLM's --scheduler-cls names a class that sidestep does not have, so vLLM does not start.",
        f"Write --scheduler-cls {TAP}."),
        lambda s: not s.is_tapped and "sidestep" in (named := s.options.get("--scheduler-cls", "")) and named,
        "--scheduler-cls is {}"),
    Check(Code("SD022", "error", "SGLang runs without --enable-metrics",
        "SGLang then makes no collectors, and the plugin has nothing to send.",
        "Start SGLang with --enable-metrics; SIDESTEP_SGLANG_MODE=instead removes what it costs."),
        # The file of --config may have it.
        lambda s: s.engine is SGLANG and s.options.keys().isdisjoint({"--enable-metrics", "--config"}),
        "--enable-metrics is not set"),
    Check(Code("SD023", "error", "vLLM's Rust front end loads no plugins",
        "VLLM_USE_RUST_FRONTEND is set and the tap is not configured, so nothing is sent.",
        f"Add the tap: --scheduler-cls {TAP}."),
        lambda s: s.engine is VLLM and s.environ.get("VLLM_USE_RUST_FRONTEND") == "1" and not s.is_tapped,
        "VLLM_USE_RUST_FRONTEND is 1"),
    Check(Code("SD024", "info", "--disable-log-stats has no effect on the front end",
        "vLLM computes statistics if a stat-logger plugin is installed.",
        "To save their cost, use the tap (--scheduler-cls) and set VLLM_PLUGINS to a list without sidestep."),
        lambda s: s.engine is VLLM and "--disable-log-stats" in s.options and s.allows_plugin,
        "--disable-log-stats is set, and the plugin is installed"),
    Check(Code("SD025", "warning", "vLLM kills its processes before they can send their last items",
        "With several API servers, or with the tap, vLLM's default --shutdown-timeout 0 ends them within milliseconds of SIGTERM: the last items are lost.",
        "Start vLLM (0.18 or later) with --shutdown-timeout 30."),
        lambda s: s.engine is VLLM and why_killed(s), "{}, and --shutdown-timeout is 0"),
    Check(Code("SD026", "warning", "SGLang's tokenizer workers do not load the plugin",
        "With --tokenizer-worker-num above 1, latencies and the counts of ended requests are on SGLang's own page only.",
        "Start SGLang with one tokenizer worker, or scrape its page as well (--scrape)."),
        lambda s: s.engine is SGLANG and (n := s.options.get("--tokenizer-worker-num", "1")) != "1" and n,
        "--tokenizer-worker-num is {}"),
)
# fmt: on
CODES = sorted(codes(PACKAGES, ALLOWED, ENDPOINT, VARIABLES, MODE, OPTIONS))


def check() -> Iterator[Finding]:
    """Yield what is wrong with this process's packages, variables and endpoint."""
    subject = f"environment {sys.prefix}"
    yield from run(PACKAGES, sys.path, subject)
    for engine in installed(sys.path):
        yield from run((*ALLOWED, *MODE), Start(engine, os.environ), subject)
    yield from run((*ENDPOINT, *VARIABLES), os.environ, subject)
    if address := os.environ.get("SIDESTEP_ENDPOINT"):
        yield from endpoint.check(address)
