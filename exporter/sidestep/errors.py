"""Error types by cause: sender, polled server, catalogue, operator or environment."""

from __future__ import annotations


class SidestepError(Exception):
    """Base of all errors raised on purpose; any other exception is a bug."""


class WireError(SidestepError):
    """Invalid input from a sender: count it by ``reason``, drop the input and continue.

    Attributes:
        reason: One of a small fixed set, used as a label value.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class PollError(SidestepError):
    """Failure to get a usable response from a polled server.

    Attributes:
        cause: ``unreachable``, ``slow``, ``truncated``, ``bad_answer``, ``http_STATUS``, ``json``: it
            is JSON and should not be, or ``unreadable``: a local file that the request needs.
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class CatalogueError(SidestepError):
    """Invalid catalogue row, a bug in sidestep: the exporter does not start."""


class ConfigError(SidestepError):
    """Invalid configuration: one line on standard error, exit code 2."""


class RunError(SidestepError):
    """Failure of the environment at run time (a peer, a disk): one line, exit code 1."""
