"""The demo beside a real Prometheus with the shipped rules: what it stages fires the alerts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from exporters import Start
from pages import get
from prometheus_server import BINARIES, Prometheus, prometheus
from rulefiles import RULE_FILES
from sidestep.app.demo import Player
from sidestep.app.demo_schedule import ROUND, RUNS, Clock, Run, Window
from sidestep.app.exporter import Exporter
from sidestep.metrics import saturation

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * ROUND)]

Alert = tuple[str, str]
"""Name of an alert, and the model for which it fires."""
FIRE: set[Alert] = {
    ("InferenceEngineStalled", "vllm-hangs"),
    ("InferenceSaturated", "vllm-full"),
    ("InferenceKVCachePressure", "vllm-cache"),
}
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
FASTER = 20.0
"""Speed of the short form."""
HANG = Window(10.0, 65.0)
"""Of the short form: how long an engine has been stalled is no duration of a rule."""
GREEN = 0.3
"""Least share of a round in which the verdict has nothing to complain about."""


def faster(path: Path, directory: Path) -> Path:
    """Write a copy of a rule file whose durations are shorter, and return its path."""

    def shorter(found: re.Match[str]) -> str:
        return f"{1000 * int(found[1]) * UNITS[found[2]] / FASTER:.0f}ms"

    copy = directory / path.name
    copy.write_text(re.sub(r"\b(\d+)([smhd])\b", shorter, path.read_text()))
    return copy


def shortened(run: Run) -> Run:
    """Return a run with a shorter window."""
    window = run.window and Window(run.window.start / FASTER, run.window.end / FASTER)
    return run._replace(window=window, hang=run.hang and HANG)


@asynccontextmanager
async def played(exporter: Exporter, runs: Sequence[Run], length: float) -> AsyncIterator[None]:
    """Play the rounds of the demo."""
    stop, clock = threading.Event(), Clock(length)
    players = [Player(run, exporter.endpoints[0], clock, realtime=True) for run in runs]
    # The loop's own threads render the pages.
    with ThreadPoolExecutor(len(players)) as threads:
        playing = [threads.submit(each.run, once=False, stop=stop) for each in players]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*map(asyncio.wrap_future, playing))


def firing(server: Prometheus) -> set[Alert]:
    """Return the alerts that fire."""
    return {
        (alert["labels"]["alertname"], alert["labels"].get("model_name", ""))
        for alert in server.get("alerts")["alerts"]
        if alert["state"] == "firing"
    }


async def watch(
    server: Prometheus, seconds: float, enough: set[Alert], exporter: Exporter | None = None
) -> tuple[dict[Alert, float], list[str]]:
    """Return when alerts fired first, and an exporter's verdicts, until ``enough`` have fired."""
    start = time.monotonic()
    fired: dict[Alert, float] = {}
    levels = []
    while (now := time.monotonic() - start) < seconds and not enough <= fired.keys():
        for alert in await asyncio.to_thread(firing, server):
            if alert not in fired:
                print(f"{now:.0f} s: {alert}", flush=True)  # noqa: T201
            fired.setdefault(alert, now)
        if exporter is not None:
            # On a busy machine an answer may be missing.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                live = await get(f"{exporter.url.removesuffix('/metrics')}/api/v1/live")
                levels.append(json.loads(live)["verdict"]["level"])
        await asyncio.sleep(1.0)
    return fired, levels


async def test_what_is_staged_fires_the_alerts(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With windows, rules and the memory of the saturation twenty times shorter."""
    monkeypatch.setattr(saturation, "MEMORY", saturation.MEMORY / FASTER)
    monkeypatch.setattr(saturation, "MIN_SECONDS", saturation.MIN_SECONDS / FASTER)
    rules = [faster(path, tmp_path) for path in RULE_FILES]
    runs = [shortened(run) for run in RUNS]
    length = ROUND / FASTER
    async with start() as exporter, played(exporter, runs, length):
        targets = {"sidestep": {"demo-0": exporter.url}}
        with prometheus(str(BINARIES["3"]), tmp_path / "server", targets, rules=rules) as server:
            fired, _ = await watch(server, length, FIRE)

    assert fired.keys() >= FIRE


async def test_a_round_in_real_time(start: Start, tmp_path: Path) -> None:
    """With the rules as they are: the alerts fire, none where nothing is staged, and a third of the round is green."""
    async with start() as exporter, played(exporter, RUNS, ROUND):
        targets = {"sidestep": {"demo-0": exporter.url}}
        with prometheus(
            str(BINARIES["3"]), tmp_path, targets, rules=RULE_FILES, interval="5s"
        ) as server:
            fired, levels = await watch(server, ROUND, {("never", "")}, exporter)

    assert len(levels) > ROUND / 2
    green = levels.count("ok") / len(levels)
    print(f"green {green:.0%}")  # noqa: T201
    assert fired.keys() >= FIRE
    # Triton's recorded models miss objectives though nothing is staged for them.
    others = {model for name, model in fired if name != "InferenceSLOBurn"}
    assert others <= {run.name for run in RUNS if run.act}
    assert green >= GREEN
