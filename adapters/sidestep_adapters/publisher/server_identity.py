"""Identity of the server that a process belongs to, the same in all of its processes.

Multiprocessing hands the main process's ``sys.argv`` and random ``authkey`` to all processes that
descend from it, spawned or forked: API servers, engine cores, schedulers. See
docs/decisions/0018-servers-of-one-host.md.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from sidestep.protocol.limits import printable

SEVERAL_TREES = frozenset(
    {
        "data-parallel-address",
        "data-parallel-backend",
        "data-parallel-size-local",
        "dist-init-addr",
        "dpa",
        "dpb",
        "dpl",
        "headless",
        "nnodes",
        "use-ray",
    }
)
"""Options of vLLM and SGLang with which a server's processes may have several main processes."""
_OPTION = re.compile(r"^([A-Za-z][\w-]*)[ \t]*:[ \t]*[\"']?([^\s\"'#]*)", re.MULTILINE)


def serving_port() -> str:
    """Return the port that the server's command line names; empty if not all processes know it."""
    options = _options(tuple(sys.argv))
    port = options.get("port", "")
    return port if port.isdecimal() and SEVERAL_TREES.isdisjoint(options) else ""


def server_key() -> str:
    """Return a key that this server's processes share, and no other; empty if not all do."""
    of_ray = Path(sys.argv[0]).name == "default_worker.py"
    if of_ray or not SEVERAL_TREES.isdisjoint(_options(tuple(sys.argv))):
        return ""
    secret = bytes(multiprocessing.current_process().authkey)
    return hashlib.blake2b(secret, digest_size=8, person=b"sidestep").hexdigest()


def process_name() -> str:
    """Return a name of this process for people."""
    return printable(f"process {os.getpid()} on {socket.gethostname()}")


@functools.cache
def _options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line, and those of its file of options, ``--config``."""
    found: dict[str, str] = {}
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=True):
        if argument.startswith("-"):
            name, has_value, value = argument.lstrip("-").partition("=")
            found[name.replace("_", "-")] = value if has_value else following
    return {**_options_of_file(found.get("config", "")), **found}


def _options_of_file(path: str) -> dict[str, str]:
    """Return the options at the first level of a YAML file; none if it cannot be read."""
    try:
        text = Path(path).read_text(errors="replace") if path else ""
    except OSError:
        return {}
    return {name.replace("_", "-"): value for name, value in _OPTION.findall(text)}
