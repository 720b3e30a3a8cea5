"""One run of a fault: warm up, fault, drain, compare."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

from chaos import disk
from chaos.cores import waited
from chaos.faults import FAULTS
from chaos.stage import PATIENCE, Options, Stage
from chaos.verdict import Result, broken_promises, compare
from chaos.watch import total
from sidestep.telemetry.rows import BY_NAME

WARM_UP = 2.0
STARVED = 0.1
"""Share of a run for which threads have waited for a core, from which on the machine counts as too busy."""
FOLDED = "sidestep_folded_items_total"


def run(name: str, options: Options) -> Result:
    """Run fault ``name``.

    Raises:
        Skip: The fault is not possible here.
        RuntimeError: A required process does not run.
    """
    fault = FAULTS[name]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        small = name == "disk-full" and options.state
        mounted = small and stack.enter_context(disk.small(folder / "state"))
        stage = stack.enter_context(Stage(folder, options, proxied=fault.proxied))
        stage.disk = mounted
        started = time.monotonic()
        stage.wait(WARM_UP)
        stage.engine.resident += stage.engine.growth
        stage.growth = 0
        stage.engine.ask(f"phase {fault.phase}")
        fault.run(stage)
        return _finish(name, stage, time.monotonic() - started)


def _finish(name: str, stage: Stage, seconds: float) -> Result:
    """Stop pushing, wait for the last item, and compare the page with what was pushed."""
    stage.engine.ask("pause")
    stage.revive()
    if not stage.wait_for(stage.drained):
        stage.broken.append(f"not all had arrived {PATIENCE:.0f} s after the last push")
    report = stage.engine.report()
    page, text = stage.fresh_page(), stage.watch.text
    lacked = stage.waited + stage.engine.waiting + waited(stage.exporter.pid)
    starved = lacked >= STARVED * seconds
    pushed = dict(stage.expected)
    for series, value in report["totals"].items():
        pushed[series] = pushed.get(series, 0.0) + value
    folded = int(total(text, FOLDED))
    counted = int(report["dropped"])
    missing = bool(folded or counted or stage.reset)
    comparison = compare(pushed, page, derived_apart=missing)
    monotony = stage.watch.monotony
    broken = [
        *stage.broken,
        *broken_promises(
            comparison,
            monotony.decreases,
            counted,
            reset=stage.reset,
            folds=FOLDED in BY_NAME,
            starved=starved,
        ),
    ]
    notes = list(stage.notes)
    if stage.unsent:
        notes.append(
            f"items of {', '.join(f'{one:.3f}' for one in stage.unsent)} s died with an engine"
        )
    if longest := report["longest"]:
        notes.append(
            "longest push: " + ", ".join(f"{what} {value:.3f} s" for what, value in longest.items())
        )
    notes += [f"{d.series}: {d.pushed:g} pushed, {d.shown:g} shown" for d in comparison.worst[:1]]
    notes += [
        f"went back: {d.series} from {d.before:g} to {d.after:g}" for d in monotony.examples[:1]
    ]
    if comparison.derived:
        notes.append(f"{comparison.derived} series of intervals differ, as some were cut through")
    if report["errors"]:
        broken.append(f"{report['errors']} records could not be sent")
    stage.engine.stop()
    return Result(
        fault=name,
        transport=stage.options.transport,
        rounds=stage.rounds,
        items=stage.items + int(report["pushed"]),
        seconds=round(seconds, 1),
        comparison=comparison,
        counted=counted,
        folded=folded,
        duplicates=int(total(text, "sidestep_duplicates_total")),
        reset=stage.reset,
        decreases=monotony.decreases,
        reset_pages=monotony.pages,
        scrapes=stage.watch.scrapes,
        scrape_errors=stage.watch.errors,
        phases=report["phases"],
        ring_peak=int(report["held_peak"]),
        queue_peak=int(report["queued_peak"]),
        recovery=max(stage.recoveries, default=None),
        growth=stage.growth,
        waited=lacked,
        starved=starved,
        publisher_cpu=float(report["publisher_cpu"]),
        broken=tuple(broken),
        notes=tuple(notes),
    )
