"""The row of panels about the states of engines, which several dashboards share."""

from __future__ import annotations

from collections.abc import Sequence

from tools.boards import reasons
from tools.boards.colors import STATES
from tools.boards.dashboard import Annotation, Row
from tools.boards.panels import DrillDown, LivePage, Panel, Query
from tools.boards.queries import ENGINE, ENGINE_NAME, WINDOW, Scope, grouped, grown, most, total
from tools.boards.shapes import lines

STATE = "sidestep_engine_state"
ENGINES = (
    "Engines that exporters know, silent ones included, as on the live page: each core of vLLM, each process"
    " of SGLang, each server that is polled."
)
"""Meaning of the number of engines, the same on all dashboards."""


def engine_events(of: Scope, **matched: str) -> Sequence[Annotation]:
    """Return the restarts and stalls of the engines that ``of`` selects and whose labels match."""
    restarts = grown(of("sidestep_engine_restarts_total", **matched), ENGINE)
    # A stall can be shorter than the step of the query.
    stalls = f"max_over_time({of('sidestep_engine_stalled_seconds', **matched)}{WINDOW})"
    return (
        Annotation("Engine restarted", restarts, ENGINE_NAME, "blue"),
        Annotation(
            "Engine stalled",
            f"{grouped('max', (*ENGINE, 'reason'), stalls)} > 0",
            f"{{{{reason}}}} {ENGINE_NAME}",
            "red",
        ),
    )


def engine_health(of: Scope, links: Sequence[DrillDown], **matched: str) -> Row:
    """Return the row for the engines that ``of`` selects and whose labels match.

    ``links`` lead from an engine's state to other dashboards.
    """
    states = " or ".join(
        f"{number} * {of(STATE, state=state, **matched)}"
        for number, state in enumerate(STATES, start=1)
    )
    return Row(
        "Engine health",
        (
            Panel(
                title="State",
                says=(
                    "State of each engine over time. Stalled: it has unfinished requests and makes no progress. "
                    "Unreachable: it is silent, without a goodbye."
                ),
                empty=reasons.STATES,
                kind="state-timeline",
                width=24,
                queries=[Query(grouped("max", ENGINE, states), ENGINE_NAME)],
                states=STATES,
                links=[*links, LivePage()],
            ),
            lines(
                "Engines by state",
                "Number of engines in each state.",
                reasons.STATES,
                Query(total(of(STATE, **matched), "state"), "{{state}}"),
                width=6,
                stacked=True,
                colors=STATES,
            ),
            lines(
                "Stalled for",
                (
                    "Seconds without progress of engines that are stalled, by reason. The runbook of "
                    "InferenceEngineStalled describes what to do."
                ),
                reasons.NOT_STALLED,
                Query(
                    most(of("sidestep_engine_stalled_seconds", **matched), (*ENGINE, "reason")),
                    f"{{{{reason}}}} {ENGINE_NAME}",
                ),
                unit="s",
                width=6,
            ),
            lines(
                "Step age",
                "Seconds since the oldest open step of an engine began; 0 between steps.",
                reasons.PROGRESS,
                Query(most(of("sidestep_engine_step_age_seconds", **matched), ENGINE), ENGINE_NAME),
                unit="s",
                width=6,
            ),
            lines(
                "Unfinished requests",
                "Requests that an engine has accepted and not finished.",
                reasons.PROGRESS,
                Query(
                    total(of("sidestep_engine_unfinished_requests", **matched), ENGINE), ENGINE_NAME
                ),
                width=6,
            ),
        ),
    )
