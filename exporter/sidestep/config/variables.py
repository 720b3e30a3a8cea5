"""Environment variables that begin with ``SIDESTEP_`` but that nothing reads, such as misspelt ones.

Loads no settings, so that an engine's process can ask as well.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from sidestep.config.topics import is_section

PREFIX = "SIDESTEP_"
BESIDE_SETTINGS = (
    "SIDESTEP_ENDPOINT",
    "SIDESTEP_NAMESPACE",
    "SIDESTEP_REQUEST_IDENTITY",
    "SIDESTEP_REQUEST_IDENTITY_KEY",
    "SIDESTEP_STACKS",
    "SIDESTEP_VLLM_MODE",
    "SIDESTEP_SGLANG_MODE",
    "SIDESTEP_SERVER_KEY",
    "SIDESTEP_CLIENT_KEY",
    "SIDESTEP_TOP_PASSWORD",
    "SIDESTEP_DOCTOR_PASSWORD",
)
"""Variables that no setting of the exporter has: of engines' processes, of senders and of commands."""
_SERVICE = re.compile(
    r"SIDESTEP_(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_[A-Z]+(_(PROTO|PORT|ADDR))?)"
)
"""Variables that Kubernetes sets in every pod for a Service whose name begins with "sidestep"; ``..._PORT`` is a URL."""


def unknown(environ: Mapping[str, str], settings: Collection[str]) -> list[tuple[str, str]]:
    """Return the names of unknown variables, each with the nearest known one, or empty if none is near.

    The variables of other processes are known: containers of a pod may share a list of variables.

    Args:
        environ: The environment. An empty variable counts as unset.
        settings: Variables of the exporter's settings.
    """
    known = (*settings, *BESIDE_SETTINGS)
    return [
        (name, _nearest(name, known))
        for name, value in sorted(environ.items())
        if value and name.startswith(PREFIX) and name not in known and not _is_injected(name, value)
    ]


def unknown_to_engines(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the ``unknown`` variables in an engine's process; any in a section of settings is the exporter's."""
    return [
        (name, nearest)
        for name, nearest in unknown(environ, ())
        if not is_section(name.removeprefix(PREFIX).partition("_")[0].lower())
    ]


def description(found: Sequence[tuple[str, str]]) -> str:
    """Return the line about unknown variables."""
    names = ", ".join(f"{name} (did you mean {near}?)" if near else name for name, near in found)
    return f"unknown environment variables: {names}; docs/configuration.md lists the known ones"


def _nearest(name: str, known: Sequence[str]) -> str:
    # The common prefix would make all names similar.
    ends = [one.removeprefix(PREFIX) for one in known]
    found = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1)
    return f"{PREFIX}{found[0]}" if found else ""


def _is_injected(name: str, value: str) -> bool:
    return _SERVICE.fullmatch(name) is not None or (name.endswith("_PORT") and "://" in value)
