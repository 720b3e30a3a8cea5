"""What the environment of an engine's process asks of us."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import socket

from sidestep_adapters.publisher.translate import printable

log = logging.getLogger(__name__)

MODES = ("beside", "instead")
MAX_WHOLE = 160
"""Characters of namespace and model in an identity."""


def endpoint() -> str:
    """Where the exporter listens; empty: do nothing at all."""
    return os.environ.get("SIDESTEP_ENDPOINT", "")


@functools.cache
def usable_endpoint() -> bool:
    """Whether there is an endpoint of a form that can be connected to; else say so, once."""
    if endpoint() and not endpoint().startswith(("ipc://", "tcp://")):
        log.error("SIDESTEP_ENDPOINT=%s: must begin with ipc:// or tcp://", endpoint())
        return False
    return bool(endpoint())


def mode(variable: str) -> str:
    """``beside`` or ``instead``; an unknown word is said aloud and read as ``beside``."""
    chosen = os.environ.get(variable) or "beside"
    if chosen not in MODES:
        log.warning("%s=%s: must be one of %s; taking beside", variable, chosen, MODES)
        return "beside"
    return chosen


def namespace() -> str:
    """What tells this deployment's engines from others' that feed the same exporter."""
    return os.environ.get("SIDESTEP_NAMESPACE") or socket.gethostname()


def identity(namespace: str, model: str, what: str) -> str:
    """All three in one; a long model is cut, never what tells two apart."""
    whole = f"{namespace}/{model}"
    if len(whole) > MAX_WHOLE:
        digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
        whole = f"{whole[:MAX_WHOLE]}~{digest}"
    return printable(f"{whole}/{what}")


def log_as(engine: str) -> None:
    """Use an engine's log handlers: its server mutes the root logger, and configures its own alone."""
    theirs, ours = logging.getLogger(engine), logging.getLogger("sidestep_adapters")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
