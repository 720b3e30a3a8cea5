"""Check of the directory in which several processes of an engine share their metrics."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.endpoint import User

# fmt: off
MISSING = Code("SD030", "error", "PROMETHEUS_MULTIPROC_DIR does not exist",
    "prometheus_client cannot make its files in a directory that does not exist, so the engine does not start.",
    "Make the directory before the engine starts, or unset the variable: vLLM and SGLang make their own.")
NOT_WRITABLE = Code("SD031", "error", "PROMETHEUS_MULTIPROC_DIR is not writable",
    "The engine's user may not make files in it, so the engine does not start.",
    "Give the directory to the engine's user, or unset the variable.")
STALE = Code("SD032", "warning", "PROMETHEUS_MULTIPROC_DIR has files of ended processes",
    "The engine's own page adds up the files of all processes, also those of earlier runs: its counters are too high. sidestep's page does not read them.",
    "Empty the directory before each start, or unset the variable.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))

_FILE = re.compile(r"\w+?_(\d+)\.db")


def check(environ: Mapping[str, str], user: User, subject: str) -> Iterator[Finding]:
    """Yield what is wrong with the directory that ``environ`` names."""
    named = environ.get("PROMETHEUS_MULTIPROC_DIR")
    if not named:
        return
    directory = Path(named)
    try:
        is_missing = not directory.is_dir()
    except PermissionError:
        yield NOT_WRITABLE.on(
            subject, f"user {user.uid} may not enter a directory above {directory}"
        )
        return
    if is_missing:
        yield MISSING.on(subject, f"{directory} does not exist")
        return
    if user.uid and not user.may(directory.stat(), os.W_OK | os.X_OK):
        yield NOT_WRITABLE.on(subject, f"user {user.uid} may not write to {directory}")
        return
    files = filter(None, (_FILE.fullmatch(each.name) for each in directory.iterdir()))
    ended = {found[1] for found in files if not Path("/proc", found[1]).exists()}
    if ended:
        listed = ", ".join(sorted(ended, key=int)[:5])
        yield STALE.on(subject, f"{directory} has files of {len(ended)} ended processes: {listed}")
