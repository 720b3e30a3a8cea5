"""The commands ``sidestep why`` and ``sidestep timeline``: they read an exporter or a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from sidestep.errors import ConfigError
from sidestep_tools.formatting import show, show_json
from sidestep_tools.request_records import Record
from sidestep_tools.web_client.access import Access
from sidestep_tools.why.analysis import GRAVE, NO_ROW, Report, Row, report
from sidestep_tools.why.evidence import CurvePoint
from sidestep_tools.why.sources import Exporter, from_file
from sidestep_tools.why.text import joined_line, report_lines, request_lines
from sidestep_tools.why.timeline import EngineTimeline, Phase, Timeline, phases_of
from sidestep_tools.why.trace import trace

EXPORTER = "http://127.0.0.1:9857"


class Reports(msgspec.Struct, frozen=True):
    """The JSON of ``sidestep why --json``: all engines, the one with the largest cause first."""

    engines: list[Report]


class RequestTimeline(msgspec.Struct, frozen=True):
    """One request: its record, and its phases in microseconds since 1970."""

    engine: str
    record: Record
    phases: list[Phase]


class RequestTimelines(msgspec.Struct, frozen=True):
    """The JSON of ``sidestep why --json`` for requests."""

    requests: list[RequestTimeline]


class Question(NamedTuple):
    """Options that choose the report.

    Attributes:
        engine: Name or identity of the only engine to look at; empty: all.
        request: Id of a request, or what its parts on several engines have in common; empty: none.
        slowest: Number of requests to show, the slowest first; 0: none.
    """

    engine: str = ""
    request: str = ""
    slowest: int = 0


async def why(
    sources: Sequence[str | Path],
    question: Question,
    access: Access,
    *,
    minutes: int,
    as_json: bool,
) -> None:
    """Say why requests are slow, or where the time of some of them went.

    ``sources`` are exporters' addresses, or a file; several only for requests. ``minutes`` is how many of an
    exporter's last minutes to look at.

    Raises:
        ConfigError: The file cannot be read, or there is no such engine or request.
        RunError: The exporter does not answer.
    """
    wants_requests = bool(question.request or question.slowest)
    engines: list[EngineTimeline] = []
    reports: list[Report] = []
    for source in sources:
        if isinstance(source, Path):
            reports += _reports(timeline := _only(from_file(source), question.engine))
        else:
            async with access.with_password().session() as session:
                exporter = Exporter(session, source)
                timeline = _only(await exporter.timeline(minutes), question.engine)
                curves = {} if wants_requests else await exporter.curves()
                rows = {} if wants_requests else await exporter.rows()
            reports += [] if wants_requests else _reports(timeline, curves, rows)
        engines += timeline.engines
    if wants_requests:
        _show_requests(_chosen(engines, question), as_json=as_json)
    elif as_json:
        show_json(Reports(reports))
    elif reports:
        show(report_lines(reports[0], reports[1:]))
    else:
        show(["no engine has sent anything yet"])


async def write_trace(
    source: str | Path, engine: str, access: Access, *, minutes: int, output: Path
) -> None:
    """Write steps and requests as a trace for Perfetto and Chrome.

    Raises:
        ConfigError: A file cannot be read or written, or there is no such engine.
        RunError: The exporter does not answer.
    """
    if isinstance(source, Path):
        timeline = from_file(source)
    else:
        async with access.with_password().session() as session:
            timeline = await Exporter(session, source).timeline(minutes)
    made = trace(_only(timeline, engine))
    _write(output, msgspec.json.encode(made), source)
    show([f"wrote {len(made['traceEvents'])} events to {output}: open it at ui.perfetto.dev"])


def _write(path: Path, data: bytes, source: str | Path) -> None:
    if isinstance(source, Path) and path.exists() and path.samefile(source):
        raise ConfigError(f"cannot write {path}: it is the file that was read")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _only(timeline: Timeline, name: str) -> Timeline:
    """Return the timeline of the engine of this name or identity, or of all without a name.

    Replicas have the same label ``engine``: their name is their identity, as on the live page.
    """
    named = Counter(each.engine for each in timeline.engines)
    known = [
        each if named[each.engine] == 1 else msgspec.structs.replace(each, engine=each.id)
        for each in timeline.engines
    ]
    engines = [each for each in known if name in ("", each.engine, each.id)]
    if name and not engines:
        ids = ", ".join(each.id for each in known[:10]) or "none"
        raise ConfigError(f"--engine {name}: there is no such engine; known: {ids}")
    return Timeline(engines=engines, limits=timeline.limits)


def _reports(
    timeline: Timeline,
    curves: Mapping[str, Sequence[CurvePoint]] = {},
    rows: Mapping[str, Row] = {},
) -> list[Report]:
    """Return a report on each engine: first those that serve nobody, then by the largest cause."""
    _share_limits(timeline.engines)
    found = [
        report(engine, timeline.limits, curves.get(engine.id, ()), _row(engine, rows))
        for engine in timeline.engines
    ]
    return sorted(
        found,
        key=lambda each: (
            each.attention not in GRAVE,
            -max((cause.seconds for cause in each.causes), default=-1.0),
            not each.problem,
            -each.requests,
            -(rows.get(each.id, NO_ROW).finished or 0.0),
        ),
    )


def _row(engine: EngineTimeline, rows: Mapping[str, Row]) -> Row:
    """Return the live numbers of an engine; without a live page, only whether it serves nobody."""
    if engine.id in rows or engine.state not in GRAVE:
        return rows.get(engine.id, NO_ROW)
    reason = f" ({engine.reason})" if engine.reason else ""
    cause = engine.state if engine.state == "stalled" else None
    problem = f"is {engine.state}{reason}"
    return Row(engine.id, attention=engine.state, problem=problem, cause=cause)


def _share_limits(engines: Sequence[EngineTimeline]) -> None:
    """Give engines without limits those of their model's others: an SGLang scheduler's to its tokenizer."""
    counted = [(each.dialect, each.model, dict(each.limit_seconds)) for each in engines]
    for engine in engines:
        if engine.requests and not engine.steps.end and not engine.limit_seconds:
            for dialect, model, limits in counted:
                if (dialect, model) == (engine.dialect, engine.model):
                    for limit, seconds in limits.items():
                        known = engine.limit_seconds.get(limit, 0.0)
                        engine.limit_seconds[limit] = known + seconds


def _chosen(
    engines: Sequence[EngineTimeline], question: Question
) -> list[tuple[EngineTimeline, Record]]:
    """Return the requests of which the question asks: of one request all parts, in their order."""
    known = [(engine, record) for engine in engines for record in engine.requests]
    if question.request:
        named = [
            record
            for _, record in known
            if question.request in (record.key, *(key for _, key in record.join_keys))
        ]
        keys = set[tuple[str, str]]().union(*(record.join_keys for record in named))
        known = [each for each in known if each[1] in named or each[1].join_keys & keys]
        if not known:
            raise ConfigError(
                f"request {question.request}: none with this id or key has ended in this time; engines send"
                " ids only if their administrator allows it (docs/requests.md), --slowest N shows keys"
            )
        return sorted(known, key=lambda each: each[1].arrival or each[1].time)
    known.sort(key=lambda each: -(each[1].e2e_seconds or 0.0))
    return known[: question.slowest or None]


def _show_requests(requests: Sequence[tuple[EngineTimeline, Record]], *, as_json: bool) -> None:
    if as_json:
        found = [
            RequestTimeline(engine.id, record, phases_of(record)) for engine, record in requests
        ]
        show_json(RequestTimelines(found))
    elif not requests:
        show(["no request has ended in this time"])
    elif joined := joined_line([record for _, record in requests]):
        show([joined])
    for engine, record in () if as_json else requests:
        show(request_lines(engine, record))
