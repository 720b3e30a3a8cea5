"""A frozen core or scheduler is down, although other processes of its engine still send."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from exporters import until
from real_engines.comparison import Page, parse, value
from real_engines.load import Ask, Client
from real_engines.processes import ExporterProcess, Server
from real_engines.sites import TAP, SglangSite, VllmSite

pytestmark = pytest.mark.engine


@contextlib.contextmanager
def frozen(server: Server, title: str) -> Iterator[None]:
    """Stop the only process of ``server`` with this title until the end of the block."""
    (pid,) = server.titled(title)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def page_with(exporter: ExporterProcess, condition: Callable[[Page], bool]) -> Page:
    """Return the exporter's page as soon as it meets ``condition``."""
    page = Page()

    async def met() -> bool:
        nonlocal page
        page = parse(await exporter.page())
        return condition(page)

    await until(met, 90.0)
    return page


async def test_a_frozen_core_of_vllm_is_down(vllm: VllmSite) -> None:
    """The engine's gauges go though its API server still sends; all return with the core."""

    def whole(page: Page) -> bool:
        """Return whether both streams are open, and the tokens of the last flush are there."""
        names = "sidestep_engine_up", "sidestep_streams", "vllm:generation_tokens"
        return [value(page, name) for name in names] == [1, 2, 20]

    async with vllm.with_exporter(server := vllm.server(TAP)) as exporter:
        async with Client(server.base) as client:
            await client.ask_all([Ask(client.text(20), 20)])
        before = await page_with(exporter, whole)
        with frozen(server, "EngineCore"):
            during = await page_with(exporter, lambda page: value(page, "sidestep_engine_up") == 0)
        after = await page_with(exporter, whole)

    assert value(during, "sidestep_streams") == 1
    gauge = "vllm:num_requests_running"
    assert [True, False, True] == [gauge in page for page in (before, during, after)]
    assert value(during, "vllm:generation_tokens") == value(after, "vllm:generation_tokens") == 20


async def test_a_frozen_scheduler_of_sglang_is_down(sglang: SglangSite) -> None:
    """The scheduler's gauges go though the tokenizer still sends; all return with the scheduler."""

    def up(page: Page) -> list[float]:
        return [
            found
            for (_, labels), found in page["sidestep_engine_up"].samples.items()
            if "/sglang/scheduler/" in dict(labels)["engine"]
        ]

    async with sglang.with_exporter(server := sglang.server()) as exporter:
        async with Client(server.base) as client:
            await client.ask_all([Ask(client.text(20), 20)])
        before = await page_with(exporter, lambda page: up(page) == [1])
        with frozen(server, "sglang::scheduler"):
            during = await page_with(exporter, lambda page: up(page) == [0])
        after = await page_with(exporter, lambda page: up(page) == [1])

    gauge = "sglang:num_used_tokens"
    assert [True, False, True] == [gauge in page for page in (before, during, after)]
    assert value(during, "sidestep_streams") == value(before, "sidestep_streams") - 1
