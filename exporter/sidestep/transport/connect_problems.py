"""Texts about a connection that cannot be made: the cause, and what the operator can check."""

from __future__ import annotations

import errno
import os
import socket

KEYS = (
    "check the keys, which both ends need or neither: SIDESTEP_SERVER_KEY and SIDESTEP_CLIENT_KEY"
    " here, --ingest.curve-key and --ingest.authorized-keys there"
)
HANDSHAKE_FAILED = "the handshake fails"
UNANSWERED = "no answer to the handshake: is this an ingest endpoint?"
_NETWORK = "check the address, and the network's rules"
_REMEDIES = {
    errno.ENOENT: "is it running, and is the socket's directory mounted here?",
    errno.ECONNREFUSED: "is it running?",
    errno.EHOSTUNREACH: _NETWORK,
    errno.ENETUNREACH: _NETWORK,
    errno.ETIMEDOUT: _NETWORK,
}


def describe(error: OSError) -> str:
    """Return the system's text for ``error``, and what to check."""
    cause = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f"{cause}: check the host's name"
    if error.errno == errno.EACCES:
        return (
            f"{cause}: user {os.getuid()} may not open the socket;"
            " an exporter opens it to a group with --ingest.ipc-group"
        )
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{cause}: {remedy}" if remedy else cause


def describe_number(number: int) -> str:
    """Return the same for an error number."""
    return describe(OSError(number, os.strerror(number)))
