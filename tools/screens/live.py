"""Pictures of the live page and of ``sidestep top``, taken of the demo at two moments of its first round.

``PYTHONPATH=tests/support python -m tools.screens.live`` takes five minutes.
"""

from __future__ import annotations

import asyncio
import shutil
import time

from playwright.async_api import Browser, async_playwright

from boards import ROOT
from command_line import serving
from sidestep_tools.top.app import TopApp
from sidestep_tools.top.targets import Targets
from sidestep_tools.web_client.access import Access

IMAGES = ROOT / "docs" / "images"
STALLED, WAITS = 160.0, 290.0
"""Seconds of the demo at which an engine has hung for a minute, and at which another one waits for adapters."""
WIDTH, HEIGHT = 1280, 900
TERMINAL = 132, 32
"""Columns and lines."""
SETTLE = 10.0
"""Seconds in which a page or a terminal gets its first rates."""


async def main() -> None:
    """Start the demo, and wait for the moments."""
    begun = time.monotonic()
    async with (
        serving("demo", "--web.listen-address", "127.0.0.1:0") as (_, url),
        async_playwright() as driver,
    ):
        base = url.removesuffix("/metrics")
        browser = await driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        await asyncio.sleep(begun + STALLED - time.monotonic())
        await picture(browser, base, "live-stalled.png", HEIGHT * 2 // 3)
        await terminal(browser, base)
        await asyncio.sleep(begun + WAITS - time.monotonic())
        await picture(browser, base, "live.png", HEIGHT)
        await browser.close()


async def picture(browser: Browser, base: str, name: str, height: int) -> None:
    """Take a picture of the first screen."""
    page = await browser.new_page(viewport={"width": WIDTH, "height": height})
    await page.goto(base)
    await asyncio.sleep(SETTLE)
    await page.screenshot(path=IMAGES / name)
    await page.close()


async def terminal(browser: Browser, base: str) -> None:
    """Take a picture of the terminal view."""
    targets = Targets([base], Access())
    async with targets.connected():
        app = TopApp(targets)
        async with app.run_test(size=TERMINAL):
            await asyncio.sleep(SETTLE)
            drawn = app.export_screenshot(title="sidestep top")
    page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    await page.set_content(f"<style>body {{ margin: 0 }} svg {{ display: block }}</style>{drawn}")
    await page.locator("svg").screenshot(path=IMAGES / "top.png")
    await page.close()


if __name__ == "__main__":
    asyncio.run(main())
