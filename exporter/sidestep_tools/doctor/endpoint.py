"""Check of an exporter's ingest endpoint, by a real connection to it."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from sidestep.diagnosis.finding import Code, Finding
from sidestep.errors import ConfigError
from sidestep.transport.access import is_loopback
from sidestep.transport.addresses import IPC, IPC_PATH_CHARS, TCP, host_and_port, is_host
from sidestep.transport.connect_problems import KEYS, UNANSWERED
from sidestep.transport.curve_connection import CurveConnection
from sidestep.transport.keys import Keys, keys_for
from sidestep.transport.plain_connection import HANDSHAKE_TIMEOUT, PlainConnection

# fmt: off
MALFORMED = Code("SD160", "error", "The endpoint is malformed",
    "It is neither ipc:// with an absolute path nor tcp://HOST:PORT. `ipc://run/x` is relative, `ipc:///run/x` is not.",
    "Write it as the exporter prints it at its start, the same at both ends.")
NO_SOCKET = Code("SD161", "error", "There is no such socket",
    "No exporter has been started with this path, it has ended, or engine and exporter are in two containers without a common volume there.",
    "Start the exporter with --ingest.endpoint set to the same path. In containers, mount one volume at its directory in both.")
DENIED = Code("SD162", "error", "The socket's permissions deny access",
    "The engine's user may not enter the socket's directory or write to the socket. By default only the exporter's own user may.",
    "Run both as the same user, or give the exporter --ingest.ipc-group with a group that the engine's user is in.")
REFUSED = Code("SD163", "error", "The connection is refused",
    "The exporter has ended, or it listens on another port.",
    "Start the exporter, and compare the endpoint with its --ingest.endpoint.")
UNREACHABLE = Code("SD164", "error", "The exporter's host is unknown or cannot be reached",
    "The host's name does not resolve here, there is no route, or a firewall or a NetworkPolicy drops the packets.",
    "Check the name, the port and the network's rules.")
NO_HANDSHAKE = Code("SD165", "error", "The peer is no exporter's ingest endpoint",
    "It does not answer as an exporter does: it is another program, the exporter's web port, or an exporter that hangs.",
    "Give the exporter's --ingest.endpoint, not its --web.listen-address.")
KEYS_DENIED = Code("SD166", "error", "The keys do not fit",
    "One end needs keys and the other has none, SIDESTEP_SERVER_KEY is not the exporter's public key, or the public key of SIDESTEP_CLIENT_KEY is not authorized.",
    "Set both variables for the engine, and put its public key into the directory of --ingest.authorized-keys; see security.md.")
BAD_KEYS = Code("SD167", "error", "A key cannot be used",
    "One of SIDESTEP_SERVER_KEY and SIDESTEP_CLIENT_KEY is missing, or its file cannot be read, holds no key, or is a secret key that other users can read. Nothing is sent.",
    "Write a pair by `sidestep keygen`; a secret key has the mode 600.")
NO_KEYS = Code("SD168", "warning", "Records cross the network without keys",
    "The endpoint is on another host: the records are not encrypted.",
    "Set SIDESTEP_SERVER_KEY and SIDESTEP_CLIENT_KEY, unless the network itself is closed; see security.md.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))
CONNECT_TIMEOUT = 3.0


def check(endpoint: str, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Connect to an endpoint as an engine with ``environ`` does, and yield what is wrong."""
    if reason := _malformed(endpoint):
        yield MALFORMED.on(endpoint, reason)
        return
    try:
        keys = keys_for(endpoint, environ)
    except ConfigError as error:
        yield BAD_KEYS.on(endpoint, str(error))
        return
    path = Path(endpoint.removeprefix(IPC)) if endpoint.startswith(IPC) else None
    if path is None and keys is None and not is_loopback(endpoint):
        yield NO_KEYS.on(endpoint, "neither SIDESTEP_SERVER_KEY nor SIDESTEP_CLIENT_KEY is set")
    try:
        _connect(endpoint)
    except OSError as error:
        yield _failure(endpoint, error, path)
        return
    if reason := _handshake(endpoint, keys):
        code = KEYS_DENIED if KEYS in reason else NO_HANDSHAKE
        yield code.on(endpoint, reason)


def _malformed(endpoint: str) -> str:
    path = endpoint.removeprefix(IPC)
    if endpoint.startswith(IPC) and not path.startswith("/"):
        return f"the path {path!r} is not absolute: write ipc:///{path.lstrip('@*')}"
    if endpoint.startswith(IPC):
        is_long = len(os.fsencode(path)) > IPC_PATH_CHARS
        return f"the path is longer than {IPC_PATH_CHARS} bytes" if is_long else ""
    if not endpoint.startswith(TCP):
        return "it must begin with ipc:// or tcp://"
    host, port = host_and_port(endpoint)
    if not is_host(host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return "it must be tcp://HOST:PORT"
    return "* is an address to listen on, not to connect to" if host == "*" else ""


def _connect(endpoint: str) -> None:
    if endpoint.startswith(IPC):
        with socket.socket(socket.AF_UNIX) as opened:
            opened.settimeout(CONNECT_TIMEOUT)
            opened.connect(endpoint.removeprefix(IPC))
        return
    host, port = host_and_port(endpoint)
    socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()


def _failure(endpoint: str, error: OSError, path: Path | None) -> Finding:
    cause = error.strerror or str(error) or "no answer"
    match error:
        case FileNotFoundError() | NotADirectoryError():
            if path and not path.parent.is_dir():
                cause = f"the directory {path.parent} does not exist"
            return NO_SOCKET.on(endpoint, cause)
        case PermissionError():
            return DENIED.on(endpoint, (path and _closed(path)) or cause)
        case ConnectionRefusedError():
            return REFUSED.on(endpoint, cause)
    return UNREACHABLE.on(endpoint, cause)


def _closed(path: Path) -> str:
    """Return which part of ``path`` is closed to this process; empty if none is."""
    for part in (*reversed(path.parents), path):
        needed = os.W_OK if part == path else os.X_OK
        if part.exists() and not os.access(part, needed, effective_ids=True):
            found = part.stat()
            mode = f"{stat.filemode(found.st_mode)} of user {found.st_uid}, group {found.st_gid}"
            return f"{part} is {mode}; this process runs as user {os.geteuid()}"
    return ""


def _handshake(endpoint: str, keys: Keys | None) -> str:
    """Return why the handshake of an engine fails; empty: it succeeds."""
    now = time.monotonic()
    deadline = now + HANDSHAKE_TIMEOUT + 1.0
    connection = (
        PlainConnection(endpoint, now) if keys is None else CurveConnection(endpoint, keys, now)
    )
    try:
        while now < deadline and not connection.ready and not connection.problem:
            connection.wait(0.05)
            now = time.monotonic()
            connection.advance(now)
        return "" if connection.ready else connection.problem or UNANSWERED
    finally:
        connection.close()
