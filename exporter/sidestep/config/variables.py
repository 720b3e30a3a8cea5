"""Names of flags and environment variables: their topics, and variables that nothing reads.

It loads no settings, so that an engine's process can check its variables.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

PREFIX = "SIDESTEP_"
TOPICS = {
    "HTTP server": ("web",),
    "Connections of engines": ("ingest",),
    "Engines without the plugin": ("subscribe", "scrape", "triton", "engine"),
    "OpenTelemetry": ("otlp",),
    "Restarts": ("state", "shutdown"),
    "Exposed metrics": ("metrics", "histograms"),
    "Service-level objectives": ("slo",),
    "KV blocks": ("kv",),
    "Requests": ("requests", "tenants", "intervals"),
    "Prices": ("prices",),
    "Health of engines": ("health",),
    "Memory": ("limits",),
    "Log": ("log",),
    "Configuration file": ("config",),
}
"""Sections of flags by topic, in the order in which help and documents have them."""
TOPIC_BY_SECTION = {section: topic for topic, sections in TOPICS.items() for section in sections}
BESIDE_SETTINGS = (
    "SIDESTEP_ENDPOINT",
    "SIDESTEP_NAMESPACE",
    "SIDESTEP_REQUEST_IDENTITY",
    "SIDESTEP_REQUEST_IDENTITY_KEY",
    "SIDESTEP_STACKS",
    "SIDESTEP_VLLM_MODE",
    "SIDESTEP_VLLM_STATISTICS",
    "SIDESTEP_SGLANG_MODE",
    "SIDESTEP_SERVER_KEY",
    "SIDESTEP_CLIENT_KEY",
    "SIDESTEP_PASSWORD",
)
"""Variables of engines' processes, of senders and of commands."""
_SERVICE = re.compile(
    r"SIDESTEP_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for a Service whose name begins with "sidestep".
The variable ``..._PORT`` is a URL."""


def unknown(environ: Mapping[str, str], settings: Collection[str]) -> list[tuple[str, str]]:
    """Return the names of unknown variables, each with a similar known one or an empty text.

    The variables of other processes count as known, since containers of a pod may share a list. An
    empty variable counts as unset. ``settings`` are the variables of the exporter's settings.
    """
    known = (*settings, *BESIDE_SETTINGS)
    return [
        (name, _nearest(name, known))
        for name, value in sorted(environ.items())
        if value and name.startswith(PREFIX) and name not in known and not _is_injected(name, value)
    ]


def unknown_to_engines(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the ``unknown`` variables of an engine's process, without those in a section of settings."""
    return [
        (name, nearest)
        for name, nearest in unknown(environ, ())
        if name.removeprefix(PREFIX).partition("_")[0].lower() not in TOPIC_BY_SECTION
    ]


def description(found: Sequence[tuple[str, str]]) -> str:
    """Return the line about unknown variables."""
    names = ", ".join(f"{name} (did you mean {near}?)" if near else name for name, near in found)
    return f"unknown environment variables: {names}; docs/configuration.md lists the known ones"


def _nearest(name: str, known: Sequence[str]) -> str:
    # With their common prefix, all names would be similar.
    ends = [one.removeprefix(PREFIX) for one in known]
    found = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1)
    return f"{PREFIX}{found[0]}" if found else ""


def _is_injected(name: str, value: str) -> bool:
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and "://" in value)
