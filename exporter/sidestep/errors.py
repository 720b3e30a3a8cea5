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
        detail: The rest of the text.
    """

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause
        self.detail = detail

    def without_frames(self) -> PollError:
        """Return a copy to store: a raised error keeps all frames that it passed, and a body in them."""
        return PollError(self.cause, self.detail)


class CatalogueError(SidestepError):
    """Invalid catalogue row, a bug in sidestep: the exporter does not start."""


class ConfigError(SidestepError):
    """Invalid configuration: one line on standard error, exit code 2."""


class RunError(SidestepError):
    """Failure of the environment at run time (a peer, a disk): one line, exit code 1."""


def drop_frames(error: BaseException | None) -> None:
    """Drop the frames of a handled error and of its causes.

    aiohttp stores some of them in objects that the frames hold: a cycle, which keeps what was read.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
