"""The environment variables of an engine's process that configure the plugins."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from sidestep import __version__
from sidestep.config import variables
from sidestep.protocol.limits import printable
from sidestep.protocol.messages import VERSIONS
from sidestep.transport.addresses import checked_endpoint
from sidestep_adapters.publisher.server_identity import serving_port

log = logging.getLogger(__name__)

MODES = ("beside", "instead")
MAX_PREFIX_CHARS = 160
"""Maximum characters of namespace and model in an identity."""


def endpoint() -> str:
    """Return ``SIDESTEP_ENDPOINT``, the exporter's ingest endpoint; empty disables the plugins."""
    return os.environ.get("SIDESTEP_ENDPOINT", "")


@functools.cache
def usable_endpoint() -> bool:
    """Return whether ``SIDESTEP_ENDPOINT`` is a supported address.

    An invalid one is logged, once, and so are variables that nothing reads: one may be a misspelt
    ``SIDESTEP_ENDPOINT``.
    """
    if found := variables.unknown_to_engines(os.environ):
        log.warning("sidestep: %s", variables.description(found))
    if endpoint() and not endpoint().startswith(("ipc://", "tcp://")):
        log.error("SIDESTEP_ENDPOINT=%s: must begin with ipc:// or tcp://", endpoint())
        return False
    try:
        checked_endpoint(endpoint())
    except ValueError as error:
        log.error("SIDESTEP_ENDPOINT=%s: %s", printable(endpoint()), error)  # noqa: TRY400
        return False
    return bool(endpoint())


def choice(variable: str, options: Sequence[str]) -> str:
    """Return the value of ``variable``; the first option if it has none, or an unknown one, which is logged."""
    chosen = os.environ.get(variable) or options[0]
    if chosen not in options:
        allowed = ", ".join(options)
        log.warning("%s=%s: must be one of %s; taking %s", variable, chosen, allowed, options[0])
        return options[0]
    return chosen


def namespace(*, with_port: bool = True) -> str:
    """Return the prefix that distinguishes this deployment's engines at a shared exporter.

    It is the host's name, with the port if the server's command line names one, since several servers
    of one model may run on a host.

    Args:
        with_port: Whether all processes of the server have its command line.
    """
    given = os.environ.get("SIDESTEP_NAMESPACE")
    if given:
        return given
    port = serving_port() if with_port else ""
    return f"{socket.gethostname()}:{port}" if port else socket.gethostname()


def identity(namespace: str, model: str, suffix: str) -> str:
    """Join the parts into one printable identity.

    A long namespace and model are cut and end with a digest, so that identities stay unique.
    """
    prefix = f"{namespace}/{model}"
    if len(prefix) > MAX_PREFIX_CHARS:
        digest = hashlib.sha256(prefix.encode()).hexdigest()[:16]
        prefix = f"{prefix[:MAX_PREFIX_CHARS]}~{digest}"
    return printable(f"{prefix}/{suffix}")


def versions(engine: str) -> dict[str, dict[str, str]]:
    """Return the releases of the package ``engine`` and of sidestep, as info of an engine."""
    release = printable(getattr(sys.modules.get(engine), "__version__", "of an unknown release"))
    return {VERSIONS: {engine: release, "sidestep": __version__}}


def set_up_log(engine: str) -> None:
    """Attach the log handlers of the logger ``engine`` to the logger of this package.

    An engine's server may silence the root logger and configure its own logger only.
    """
    engine_log, own_log = logging.getLogger(engine), logging.getLogger("sidestep_adapters")
    if engine_log.handlers and not own_log.handlers:
        for handler in engine_log.handlers:
            own_log.addHandler(handler)
        own_log.setLevel(engine_log.getEffectiveLevel())
        own_log.propagate = False
    _log_own_path()


@functools.cache
def _log_own_path() -> None:
    """Log, once, that PYTHONPATH has only this package's directory.

    It may have replaced a PYTHONPATH of the image, which a process in the container cannot see.
    """
    own = str(Path(__file__).parents[2])
    if list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))) == [own]:
        log.info(
            "sidestep: PYTHONPATH is only %s: a PYTHONPATH of the engine's image does not apply;"
            " repeat it in the manifest",
            own,
        )
