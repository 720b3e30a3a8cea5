"""Error types, split by whose fault it is."""

from __future__ import annotations


class SidestepError(Exception):
    """Everything raised on purpose; any other exception is a bug."""


class WireError(SidestepError):
    """The sender's fault: count it by ``reason``, drop what it names, go on.

    Attributes:
        reason: One of a small fixed set, used as a label value.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class PollError(SidestepError):
    """The polled server's fault, or of what is between: no answer that can be used.

    Attributes:
        cause: ``unreachable``, ``slow``, ``truncated``, ``bad_answer``, ``http_STATUS``, or
            ``unreadable``: a file of ours that a question needs.
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class CatalogueError(SidestepError):
    """Our fault: a catalogue row that cannot work; refuse to start."""


class ConfigError(SidestepError):
    """The operator's fault: one line on standard error, exit code 2."""


class RunError(SidestepError):
    """The surroundings' fault while running (a peer, a disk): one line, exit code 1."""
