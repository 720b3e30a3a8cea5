"""The cost of ``sidestep top``, which reads engines' pages every second.

The peer parses the same pages as a whole, with prometheus_client's parser, and computes nothing.
"""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Mapping

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.summary.rows import Figure, Row, Topic
from benchmarks.summary.topics import ROOT
from sidestep.catalog.page_reader import read_page
from sidestep_tools.top.targets import Targets

PAGES = 16
PAGE = ROOT / "tests" / "data" / "page_main.txt.gz"
"""Page of a real vLLM."""
POLLED = f"sidestep top, {PAGES} pages of vLLM every second"
PEER = "prometheus_client's parser, pages without HTTP"


def measure(quick: bool) -> Mapping[str, Figure]:
    """Return percent of a core."""
    return {POLLED: Figure(*asyncio.run(_costs(3 if quick else 20)))}


async def _costs(rounds: int) -> tuple[float, float]:
    text = gzip.decompress(PAGE.read_bytes()).decode()
    read_page(text)
    answered = 0.0

    async def answer(_: web.Request) -> web.Response:
        nonlocal answered
        began_at = time.process_time()
        found = web.Response(text=text)
        answered += time.process_time() - began_at
        return found

    app = web.Application()
    app.add_routes([web.get("/metrics", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    urls = [f"http://127.0.0.1:{port}/metrics?page={number}" for number in range(PAGES)]
    async with Targets(urls).connected() as targets:
        await targets.poll()
        began_at, answered = time.process_time(), 0.0
        for _ in range(rounds):
            await targets.poll()
        ours = time.process_time() - began_at - answered
    await runner.cleanup()
    began_at = time.process_time()
    for _ in range(PAGES * rounds):
        for _family in text_string_to_metric_families(text):
            pass
    theirs = time.process_time() - began_at
    return 100 * ours / rounds, 100 * theirs / rounds


TOP = Topic("sidestep top", (Row(POLLED, "% of a core", PEER, limit=3),), measure)
