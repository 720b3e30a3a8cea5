"""Text of ``sidestep why``: a report in ten lines, and the time line of a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sidestep_tools.formatting import duration, share
from sidestep_tools.request_records import Record
from sidestep_tools.why.analysis import Latency, Report
from sidestep_tools.why.timeline import EngineTimeline, phases_of, preemptions_of

MAX_PARTS = 4
MAX_CAUSES = 2
LEAST = 0.005
"""Share of a part, or of a limit, below which it has no word."""
MANY_ABORTED = 0.1
"""Share of aborted requests from which on there is a line about them, unless a cause takes as much."""
BAR = 30
"""Characters of the bar of a request's time."""


def report_lines(report: Report, others: Sequence[Report] = ()) -> Iterator[str]:
    """Yield the lines of a report on one engine, and one on all ``others``."""
    state = f" {report.problem}" if report.problem else ""
    model = f" ({report.model})" if report.model else ""
    requests = f"{report.requests:,} request{'' if report.requests == 1 else 's'} ended"
    numbers = f"{requests} and {report.steps:,} steps in {duration(report.seconds)}"
    if not report.requests + report.steps:
        numbers = "neither requests nor steps are known"
    yield f"engine {report.engine}{model}{state}: {numbers}"
    for name, latency in (("TTFT", report.ttft), ("e2e", report.e2e)):
        if latency is not None:
            yield _latency_line(name, latency)
    if report.limits:
        yield f"limits of admission, by time: {_shares(report.limits)}"
    for cause in report.causes[:MAX_CAUSES]:
        shares = f"{share(cause.e2e_share)} of e2e, {share(cause.ttft_share)} of TTFT"
        evidence = "; ".join([*([shares] if cause.e2e_share is not None else []), *cause.evidence])
        yield f"{cause.cause}: {cause.meaning} Evidence: {evidence}."
        yield f"  change: {cause.change} Not if {cause.unless}"
    slow = any((cause.e2e_share or 0.0) >= MANY_ABORTED for cause in report.causes)
    if not slow and report.aborted >= MANY_ABORTED * max(report.requests, 1):
        yield f"aborts: the clients of {report.aborted:,} requests left before the end: compare their timeouts with e2e"
    if not report.causes and not report.unseen and not report.problem:
        yield "nothing binds: the time goes to the work itself"
    if report.unseen:
        yield f"not seen: {'; '.join(report.unseen)}"
    if others:
        yield _others_line(others)


def _latency_line(name: str, latency: Latency) -> str:
    return (
        f"{name} p50 {duration(latency.p50)}, p95 {duration(latency.p95)}: {_shares(latency.parts)}"
    )


def _shares(shares: Mapping[str, float]) -> str:
    shown = [f"{share(each)} {name}" for name, each in shares.items() if each >= LEAST]
    return ", ".join(shown[:MAX_PARTS]) or "parts unknown"


def _others_line(others: Sequence[Report]) -> str:
    names = [
        f"{other.engine} {'+'.join(cause.cause for cause in other.causes)}"
        for other in others
        if other.causes
    ]
    quiet = len(others) - len(names)
    texts = [*names[:MAX_PARTS], *([f"{quiet} without a cause"] if quiet else [])]
    what = "other engine" if len(others) == 1 else "other engines"
    return f"{len(others)} {what} (--engine NAME): {', '.join(texts)}"


def joined_line(records: Sequence[Record]) -> str:
    """Return a line on a request that one engine has handed over to another; empty if these are none."""
    by_part = {record.transfer: record for record in records if record.arrival is not None}
    first, second = by_part.get("handed_over"), by_part.get("received")
    if first is None or second is None or first.arrival is None or second.arrival is None:
        return ""
    later = (second.arrival - first.arrival).total_seconds()
    remote, prefill = max(later, 0.0), first.e2e_seconds or 0.0
    parts = f"prefill_remote {duration(prefill)} on engine {first.engine}"
    if remote > prefill:
        parts += f", {duration(remote - prefill)} until it arrived on engine {second.engine}"
    elif later < 0.0:
        parts += (
            f", but by its clock it arrived on engine {second.engine} {duration(-later)} before"
        )
    ttft, e2e = (
        None if seconds is None else seconds + remote
        for seconds in (second.ttft_seconds, second.e2e_seconds)
    )
    return f"{second.name}: TTFT {duration(ttft)}, e2e {duration(e2e)} over both engines: {parts}"


def request_lines(engine: EngineTimeline, record: Record) -> Iterator[str]:
    """Yield the time line of a request: its phases, each with its parts."""
    phases = phases_of(record)
    arrived = f", arrived {record.arrival:%H:%M:%S.%f} UTC" if record.arrival is not None else ""
    part = f", {record.transfer.replace('_', ' ')}" if record.transfer else ""
    yield (
        f"{record.name} (engine {engine.engine}, {record.reason}{part}): TTFT {duration(record.ttft_seconds)},"
        f" e2e {duration(record.e2e_seconds)}, {record.prompt_tokens:,} prompt tokens"
        f" ({record.cached_tokens:,} cached), {record.output_tokens:,} output tokens{arrived}"
    )
    if not phases:
        yield "  its arrival is unknown"
        return
    begin, total = phases[0].start, max(phases[-1].end - phases[0].start, 1)
    for phase in phases:
        left = round(BAR * (phase.start - begin) / total)
        width = max(round(BAR * (phase.end - begin) / total) - left, 1)
        bar = f"{' ' * left}{'#' * width}"[:BAR]
        parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in phase.parts.items())
        yield (
            f"  {_at(phase.start - begin)}  {phase.name:<13} |{bar:<{BAR}}|"
            f" {duration((phase.end - phase.start) / 1e6):>7}  {parts}".rstrip()
        )
    for start, end in preemptions_of(record):
        yield f"  {_at(start - begin)}  preempted for {duration((end - start) / 1e6)}"


def _at(micros: int) -> str:
    return f"+{micros / 1e6:.3f}s".rjust(10)
