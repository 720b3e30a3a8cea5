"""All checks of an environment: of the engines that run, or of this process where none does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sidestep.config.variables import unknown_to_engines
from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor import endpoint
from sidestep_tools.doctor.checks import Check, codes, run
from sidestep_tools.doctor.endpoint import current_user
from sidestep_tools.doctor.environment import packages, processes
from sidestep_tools.doctor.environment.packages import ENGINES, OWN, SGLANG, VLLM, InstalledEngine
from sidestep_tools.doctor.environment.processes import Process

TAP = "sidestep_adapters.vllm.scheduler.SidestepScheduler"
VALUES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((each.mode for each in ENGINES), ("beside", "instead")),
    "SIDESTEP_STACKS": ("on", "off"),
}
"""Variables with a choice of values."""
OWN_SUBJECT = "this environment"
_PREFIXES = ("SIDESTEP_", "VLLM_PLUGINS", "SGLANG_PLUGINS", "PROMETHEUS_")


class Start(NamedTuple):
    """How an engine is started, or would be.

    Attributes:
        options: Options by name, with dashes; a switch has an empty value.
    """

    engine: InstalledEngine
    environ: Mapping[str, str]
    options: Mapping[str, str] = {}

    @property
    def is_tapped(self) -> bool:
        """True if vLLM runs sidestep's scheduler."""
        return self.options.get("--scheduler-cls") == TAP

    @property
    def allows_plugin(self) -> bool:
        """True if the engine may load the plugin; SGLang takes an empty list for none."""
        given = self.environ.get(self.engine.allowed)
        if self.engine is SGLANG:
            return not given or "sidestep" in map(str.strip, given.split(","))
        return given is None or "sidestep" in given.split(",")


def _killed(start: Start) -> str:
    # Of data parallelism vLLM starts one API server for each rank.
    options = start.options
    servers = options.get("--api-server-count", options.get("--data-parallel-size", "1"))
    is_patient = options.get("--shutdown-timeout", "0") != "0"
    if is_patient or not (servers != "1" or start.is_tapped):
        return ""
    return "the tap is configured" if servers == "1" else f"it has {servers} API servers"


# fmt: off
VARIABLES: Sequence[Check[Mapping[str, str]]] = (
    Check(Code("SD011", "warning", "A variable has an unknown value",
        "The plugin logs it and takes the default.",
        "Set one of the named values."),
        lambda environ: [f"{name} is {value!r}, not {' or '.join(allowed)}" for name, allowed in VALUES.items()
            if (value := environ.get(name)) and value not in allowed]),
    Check(Code("SD013", "warning", "A variable is unknown",
        "Nothing reads a variable of this name, so its value has no effect: it is probably misspelt.",
        "Correct the name; docs/configuration.md lists the known ones."),
        lambda environ: [f"{name} (did you mean {nearest}?)" if nearest else name for name, nearest in unknown_to_engines(environ)]),
)
ENDPOINT: Sequence[Check[Mapping[str, str]]] = (
    Check(Code("SD010", "error", "SIDESTEP_ENDPOINT is not set",
        "The plugin and the tap do nothing without it.",
        "Start the engine with SIDESTEP_ENDPOINT set to the exporter's --ingest.endpoint; a variable of your shell must be exported, one of a container named in its manifest."),
        lambda environ: not environ.get("SIDESTEP_ENDPOINT"), "SIDESTEP_ENDPOINT is not set"),
)
ALLOWED: Sequence[Check[Start]] = (
    Check(Code("SD003", "error", "The engine may not load the plugin",
        "The list of allowed plugins (`VLLM_PLUGINS`, `SGLANG_PLUGINS`) does not contain `sidestep`. vLLM compares names as they are, spaces included.",
        "Add sidestep to the list, without spaces, or unset the variable. With vLLM's tap (--scheduler-cls) the plugin is not needed."),
        lambda s: not (s.is_tapped or s.allows_plugin) and f"{s.engine.allowed} is {s.environ[s.engine.allowed]!r}"),
)
MODE: Sequence[Check[Start]] = (
    Check(Code("SD012", "info", "The engine computes its own metrics as well",
        "In the mode `beside`, the default, the engine's loop still pays for its own metrics.",
        "Set the mode to `instead`, and scrape the exporter instead of the engine; or keep both, and scrape one of the two pages only."),
        lambda s: s.environ.get("SIDESTEP_ENDPOINT") and s.environ.get(s.engine.mode) != "instead"
            and f"{s.engine.mode} is {s.environ.get(s.engine.mode) or 'not set'}"),
)
OPTIONS: Sequence[Check[Start]] = (
    Check(Code("SD021", "error", "The tap's path is wrong",
        "vLLM's --scheduler-cls names a class of sidestep that does not exist, so vLLM does not start.",
        f"Write --scheduler-cls {TAP}."),
        lambda s: not s.is_tapped and "sidestep" in (named := s.options.get("--scheduler-cls", "")) and named,
        "--scheduler-cls is {}"),
    Check(Code("SD022", "error", "SGLang runs without --enable-metrics",
        "Without --enable-metrics SGLang makes no collectors, and the plugin has nothing to send.",
        "Start SGLang with --enable-metrics; SIDESTEP_SGLANG_MODE=instead removes what it costs."),
        # A file that cannot be read may have it.
        lambda s: s.engine is SGLANG and s.options.keys().isdisjoint({"--enable-metrics", "--config"}),
        "--enable-metrics is not set"),
    Check(Code("SD023", "error", "vLLM's Rust front end loads no plugins",
        "VLLM_USE_RUST_FRONTEND is set and the tap is not configured, so nothing is sent.",
        f"Add the tap: --scheduler-cls {TAP}."),
        lambda s: s.engine is VLLM and s.environ.get("VLLM_USE_RUST_FRONTEND") == "1" and not s.is_tapped,
        "VLLM_USE_RUST_FRONTEND is 1"),
    Check(Code("SD024", "info", "--disable-log-stats has no effect on the front end",
        "vLLM computes statistics if a stat-logger plugin is installed, even with --disable-log-stats.",
        "To save their cost, use the tap (--scheduler-cls) and set VLLM_PLUGINS to a list without sidestep."),
        lambda s: s.engine is VLLM and "--disable-log-stats" in s.options and s.allows_plugin,
        "--disable-log-stats is set, and the plugin is installed"),
    Check(Code("SD025", "warning", "vLLM kills its processes before they can send their last items",
        "With several API servers, or with the tap, and vLLM's default --shutdown-timeout 0, SIGTERM kills them within milliseconds: items of the last moments are lost.",
        "Start vLLM with --shutdown-timeout 30."),
        lambda s: s.engine is VLLM and _killed(s), "{}, and --shutdown-timeout is 0"),
    Check(Code("SD026", "warning", "SGLang's tokenizer workers do not load the plugin",
        "With --tokenizer-worker-num above 1, TTFT, inter-token and end-to-end latency and the counts of ended requests are on SGLang's own page only.",
        "Start SGLang with one tokenizer worker, or scrape its page as well (--scrape)."),
        lambda s: s.engine is SGLANG and (n := s.options.get("--tokenizer-worker-num", "1")) != "1" and n,
        "--tokenizer-worker-num is {}"),
)
NOT_READABLE = Code("SD020", "info", "An engine's variables cannot be read",
    "The engine's process belongs to another user, so only its command line was checked.",
    "Run the command as the engine's user, or as root.")
# fmt: on
_ROWS = codes(packages.CHECKS, ALLOWED, ENDPOINT, VARIABLES, MODE, OPTIONS)
CODES = sorted((NOT_READABLE, *_ROWS))


def check() -> list[Finding]:
    """Return what is wrong with the engines' environments, or with this one if no engine runs."""
    engines = list(processes.find())
    found = [each for engine in engines for each in check_process(engine)]
    # A shell in the engine's container has the engine's variables; those of others count if set.
    own = _relevant(os.environ)
    if not engines or (own and own not in [_relevant(each.environ or {}) for each in engines]):
        found += check_own(is_alone=not engines)
    return found


def check_process(process: Process) -> Iterator[Finding]:
    """Yield what is wrong with a running engine."""
    environ, subject = process.environ, process.subject
    start = Start(process.engine, environ or {}, process.options)
    yield from packages.check(process.packages._replace(running=process.engine))
    if environ is None:
        yield NOT_READABLE.on(subject, f"user {process.user.uid} runs it")
        yield from run(OPTIONS, start, subject)
        return
    yield from run((*OPTIONS, *ALLOWED, *MODE), start, subject)
    yield from run((*ENDPOINT, *VARIABLES), environ, subject)
    if address := environ.get("SIDESTEP_ENDPOINT"):
        yield from endpoint.check(address, environ, process.user)


def check_own(*, is_alone: bool) -> Iterator[Finding]:
    """Yield what is wrong with this process's environment; ``is_alone``: no engine runs here."""
    if is_alone:
        yield from packages.check(OWN)
        yield from run(ENDPOINT, os.environ, OWN_SUBJECT)
    for engine in OWN.engines:
        yield from run((*ALLOWED, *MODE), Start(engine, os.environ), OWN_SUBJECT)
    yield from run(VARIABLES, os.environ, OWN_SUBJECT)
    if address := os.environ.get("SIDESTEP_ENDPOINT"):
        yield from endpoint.check(address, os.environ, current_user())


def _relevant(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
