"""What the environment of a vLLM process asks of us."""

from __future__ import annotations

import functools
import logging
import os

log = logging.getLogger(__name__)

MODES = ("beside", "instead")


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


def mode() -> str:
    """``beside`` or ``instead``; an unknown word is said aloud and read as ``beside``."""
    chosen = os.environ.get("SIDESTEP_VLLM_MODE") or "beside"
    if chosen not in MODES:
        log.warning("SIDESTEP_VLLM_MODE=%s: must be one of %s; taking beside", chosen, MODES)
        return "beside"
    return chosen


def log_as_vllm() -> None:
    """Use vLLM's log handlers: its server mutes the root logger, and configures its own alone."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("sidestep_adapters")
    if theirs.handlers and not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.getEffectiveLevel())
        ours.propagate = False
