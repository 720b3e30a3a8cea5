"""Report of all targets, which ``sidestep top --json`` prints and the terminal view shows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidestep.exposition.live.answers import EngineRow, Verdict
from sidestep.exposition.live.verdict import evaluate


class TargetReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One target at one moment.

    Attributes:
        url: As the user gave it, without a password.
        error: Reason why its numbers are missing or old, in one line; None: it answered.
        engines: Its engines; after an error, those of its last answer.
        age: Seconds since its last answer; None: it never answered.
    """

    url: str
    error: str | None = None
    engines: list[EngineRow] = []
    age: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """All targets at the Unix time ``time``."""

    time: float
    verdict: Verdict
    targets: list[TargetReport]


def report(targets: Sequence[TargetReport], time: float) -> Report:
    """Return the report of ``targets`` at a Unix time; engines of those that answered are evaluated."""
    failed = [target for target in targets if target.error is not None]
    answered = [target for target in targets if target.error is None]
    rows, verdict = evaluate(row for target in answered for row in target.engines)
    if failed:
        text = f"{failed[0].url} does not answer: {failed[0].error}"
        if len(targets) > 1:
            text = f"{len(failed)} of {len(targets)} targets failed: {text}"
        if rows:
            text += f"; {verdict.text}"
        verdict = Verdict("critical", text, verdict.engine)
    evaluated = iter(rows)
    return Report(
        time=time,
        verdict=verdict,
        targets=[
            target
            if target.error is not None
            else msgspec.structs.replace(target, engines=[next(evaluated) for _ in target.engines])
            for target in targets
        ],
    )
