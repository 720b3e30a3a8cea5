"""Topics of settings, by the part of a flag before its dot: the groups of ``--help`` and of docs/configuration.md.

Loads nothing: an engine's process asks which environment variables are an exporter's.
"""

from __future__ import annotations

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
_BY_SECTION = {section: topic for topic, sections in TOPICS.items() for section in sections}


def topic_of(flag: str) -> str:
    """Return the topic of a setting's flag, given without its dashes."""
    return _BY_SECTION[flag.partition(".")[0]]


def is_section(name: str) -> bool:
    """Return whether flags begin with ``name``."""
    return name in _BY_SECTION
