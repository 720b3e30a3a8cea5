"""Replays of recorded runs to an exporter of the same process."""

from __future__ import annotations

import asyncio
from pathlib import Path

from exporters import recorded_run
from sidestep.app.exporter import Exporter
from sidestep_adapters.recording.replay import Replay


async def replay(exporter: Exporter, run: str | Path, namespace: str = "test") -> None:
    """Replay a run, or the recorded run of this name."""
    path = recorded_run(run) if isinstance(run, str) else run
    player = Replay(path, exporter.endpoints[0], realtime=False, namespace=namespace)
    await asyncio.to_thread(player.run)
