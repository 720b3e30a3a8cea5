"""Checks of the variables of an engine's process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sidestep.config.variables import unknown_to_engines
from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.environment.packages import SGLANG, VLLM, Engine

# fmt: off
NO_ENDPOINT = Code("SD010", "error", "SIDESTEP_ENDPOINT is not set",
    "The plugin and the tap do nothing without it.",
    "Start the engine with SIDESTEP_ENDPOINT set to the exporter's --ingest.endpoint; a variable of your shell must be exported, one of a container named in its manifest.")
BAD_VALUE = Code("SD011", "warning", "A variable has an unknown value",
    "The plugin logs it and takes the default.",
    "Set one of the named values.")
BESIDE = Code("SD012", "info", "The engine computes its own metrics as well",
    "In the mode `beside`, the default, the engine's loop still pays for its own metrics.",
    "Set the mode to `instead`, and scrape the exporter instead of the engine; or keep both, and scrape one of the two pages only.")
UNKNOWN = Code("SD013", "warning", "A variable is unknown",
    "Nothing reads a variable of this name, so its value has no effect: it is probably misspelt.",
    "Correct the name; docs/configuration.md lists the known ones.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))

MODES: Mapping[Engine, str] = {VLLM: "SIDESTEP_VLLM_MODE", SGLANG: "SIDESTEP_SGLANG_MODE"}
VALUES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(MODES.values(), ("beside", "instead")),
    "SIDESTEP_STACKS": ("on", "off"),
}


def check(environ: Mapping[str, str], subject: str) -> Iterator[Finding]:
    """Yield what is wrong with names and values."""
    for name, nearest in unknown_to_engines(environ):
        yield UNKNOWN.on(subject, f"{name} (did you mean {nearest}?)" if nearest else name)
    for name, allowed in VALUES.items():
        value = environ.get(name)
        if value and value not in allowed:
            yield BAD_VALUE.on(subject, f"{name} is {value!r}", f"Set {' or '.join(allowed)}.")


def check_endpoint(environ: Mapping[str, str], subject: str) -> Iterator[Finding]:
    """Yield a finding if the plugin has no endpoint."""
    if not environ.get("SIDESTEP_ENDPOINT"):
        yield NO_ENDPOINT.on(subject, "SIDESTEP_ENDPOINT is not set")


def check_mode(engine: Engine, environ: Mapping[str, str], subject: str) -> Iterator[Finding]:
    """Yield a finding if the engine computes its own metrics as well."""
    if environ.get("SIDESTEP_ENDPOINT") and environ.get(MODES[engine]) != "instead":
        yield BESIDE.on(subject, f"{MODES[engine]} is {environ.get(MODES[engine]) or 'not set'}")
