"""The ``make screens`` command: draw every dashboard from recorded engines.

Exporters of all recorded engines run for a minute and a half, a real Prometheus scrapes them, and
a headless browser draws the answers to the panels' queries as docs/images/dashboards/*.png.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.boards.colors import PARTS, STATES
from tools.screens.answers import Span
from tools.screens.charts import COLORS, THRESHOLDS
from tools.screens.page import WIDTH, Page, page
from tools.screens.png import smaller

from boards import DASHBOARDS, ROOT, dashboard
from dcgm import dcgm_exporter
from fleet import fleet
from prometheus_server import BINARIES, Prometheus, prometheus
from rulefiles import RULE_FILES

IMAGES = ROOT / "docs" / "images" / "dashboards"
BEFORE = 20.0
"""Seconds of scrapes before the shown range, for the windows of rates."""

KEPT = [
    (int(c[1:3], 16), int(c[3:5], 16), int(c[5:7], 16))
    for c in (*COLORS, *THRESHOLDS.values(), *STATES.values(), *PARTS.values())
]


def main() -> int:
    """Play the recordings, query Prometheus and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="how much time is shown")
    parser.add_argument("--into", type=Path, default=IMAGES, help="where the pictures go")
    given = parser.parse_args()
    browser = shutil.which("chromium")
    binary = next((binary for binary in BINARIES.values() if binary), None)
    if browser is None or binary is None:
        sys.stderr.write("screens need chromium and prometheus: run `make tools`\n")
        return 2
    given.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        server, span = asyncio.run(play(directory, binary, given.seconds, stack))
        for path in DASHBOARDS:
            drawn = page(server, dashboard(path), span)
            picture = given.into / f"{path.stem}.png"
            draw(drawn, picture, browser, directory)
            print(
                f"{picture.name}: {picture.stat().st_size // 1024} kB, empty: {drawn.empty or 'none'}"
            )
    return 0


async def play(
    directory: Path, binary: str, seconds: float, stack: contextlib.ExitStack
) -> tuple[Prometheus, Span]:
    """Run exporters with recordings, and return the Prometheus that scraped them."""
    async with fleet(directory) as made:
        gpus = {"vllm-4": stack.enter_context(dcgm_exporter())}
        targets = {"sidestep": made.urls, "dcgm": gpus}
        server = stack.enter_context(
            prometheus(binary, directory, targets, interval="2s", rules=RULE_FILES)
        )
        await asyncio.to_thread(server.scraped, len(made.urls) + len(gpus), time.time())
        playing = asyncio.create_task(made.live(BEFORE + seconds))
        # Stop before the publishers close, so that no series ends in the picture.
        await asyncio.sleep(BEFORE + seconds - 3)
        end = float(int(time.time()))
        await playing
        return server, Span(end - seconds, end, 1.0)


def draw(drawn: Page, picture: Path, browser: str, directory: Path) -> None:
    """Take a picture of the whole page."""
    source = directory / f"{picture.stem}.html"
    source.write_text(drawn.html)
    subprocess.run(
        [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--hide-scrollbars", "--disable-lcd-text", f"--user-data-dir={directory}/browser-{picture.stem}",
            f"--window-size={WIDTH},{drawn.height}", f"--screenshot={picture}", f"file://{source}",
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    picture.write_bytes(smaller(picture.read_bytes(), KEPT))


if __name__ == "__main__":
    sys.exit(main())
