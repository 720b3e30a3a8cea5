"""Replays of recorded runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from exporters import recorded_run
from sidestep.app.exporter import Exporter
from sidestep_adapters.recording.replay import Replay


async def replay(exporter: Exporter | str, run: str | Path, namespace: str = "test") -> None:
    """Replay a run, or the recorded run of this name, to an exporter or an endpoint."""
    path = recorded_run(run) if isinstance(run, str) else run
    endpoint = exporter if isinstance(exporter, str) else exporter.endpoints[0]
    player = Replay(path, endpoint, realtime=False, namespace=namespace)
    await asyncio.to_thread(player.run)
