"""All checks of an environment: of the engines that run, or of this process where none does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from sidestep.diagnosis.finding import Finding
from sidestep_tools.doctor import endpoint
from sidestep_tools.doctor.endpoint import User, current_user
from sidestep_tools.doctor.environment import multiprocess, packages, processes, variables
from sidestep_tools.doctor.environment.packages import ENGINES, OWN
from sidestep_tools.doctor.environment.processes import Process

CODES = (
    *packages.CODES,
    *variables.CODES,
    *processes.CODES,
    *multiprocess.CODES,
)
OWN_SUBJECT = "this environment"
_PREFIXES = ("SIDESTEP_", "VLLM_PLUGINS", "SGLANG_PLUGINS", "PROMETHEUS_")


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
    yield from packages.check(process.packages, process.engine)
    yield from processes.check(process)
    environ = process.environ
    if environ is None:
        return
    if not processes.is_tapped(process.options):
        yield from packages.check_allowed(process.engine, environ, process.subject)
    yield from variables.check_endpoint(environ, process.subject)
    yield from variables.check_mode(process.engine, environ, process.subject)
    yield from _environ(environ, process.user, process.subject)


def check_own(*, is_alone: bool) -> Iterator[Finding]:
    """Yield what is wrong with this process's environment; ``is_alone``: no engine runs here."""
    if is_alone:
        yield from packages.check(OWN)
        yield from variables.check_endpoint(os.environ, OWN_SUBJECT)
    for engine in ENGINES:
        if OWN.find(engine.package) is not None:
            yield from packages.check_allowed(engine, os.environ, OWN_SUBJECT)
            yield from variables.check_mode(engine, os.environ, OWN_SUBJECT)
    yield from _environ(os.environ, current_user(), OWN_SUBJECT)


def _environ(environ: Mapping[str, str], user: User, subject: str) -> Iterator[Finding]:
    yield from variables.check(environ, subject)
    yield from multiprocess.check(environ, user, subject)
    if address := environ.get("SIDESTEP_ENDPOINT"):
        yield from endpoint.check(address, environ, user)


def _relevant(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
