"""What ``sidestep top --json`` prints and the terminal view shows."""

from __future__ import annotations

import msgspec

from sidestep.exposition.live.rows import EngineRow, Verdict


class TargetReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One target at one moment.

    Attributes:
        url: As the user gave it, without a password.
        error: Why its numbers are missing or old, in one line; None: it answered.
        engines: Its engines; after an error, those of its last answer.
        age: Seconds since its last answer; None: it never answered.
    """

    url: str
    error: str | None = None
    engines: list[EngineRow] = []
    age: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All targets at one moment.

    Attributes:
        time: Unix time.
    """

    time: float
    verdict: Verdict
    targets: list[TargetReport]
