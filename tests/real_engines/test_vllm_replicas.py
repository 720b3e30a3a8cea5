"""Two servers of one model on one host, and one exporter."""

from __future__ import annotations

import signal
import socket

import pytest

from real_engines.comparison import (
    Page,
    assert_nothing_refused,
    labels_of,
    parse,
    settled_alone,
    value,
)
from real_engines.load import Client
from real_engines.processes import ExporterProcess, VllmServer
from real_engines.sites import TAP, VllmSite, completions

pytestmark = pytest.mark.engine

TOKENS = "vllm:generation_tokens"
TTFT = "vllm:time_to_first_token_seconds"


async def tokens(server: VllmServer) -> float:
    """Return the tokens of the server's own page."""
    return value(parse(await server.page()), TOKENS)


async def asked(server: VllmServer, count: int) -> float:
    """Ask for completions, and return the tokens of the server's own page."""
    async with Client(server.base) as client:
        assert all(answer.status == 200 for answer in await completions(client, count))
    return await tokens(server)


async def shown(exporter: ExporterProcess, *expected: float) -> Page:
    """Wait until the series of two servers have these tokens."""

    def is_shown(page: Page) -> bool:
        series = [value(page, TOKENS, **labels) for labels in labels_of(page, TOKENS)]
        return sorted(series) == sorted(expected)

    return await settled_alone(exporter, is_shown)


def by_origin(page: Page) -> dict[str, float]:
    """Return the tokens of each server by the label ``origin``."""
    family = page[TOKENS]
    return {dict(labels).get("origin", ""): found for (_, labels), found in family.samples.items()}


@pytest.mark.parametrize("flags", [[], TAP], ids=["plugin", "tap"])
async def test_two_servers_on_one_host(flags: list[str], vllm: VllmSite) -> None:
    """Each has series of its own, which go on when it is killed and started again."""
    state = "--state.dir", str(vllm.home / "state")
    async with vllm.exporter(*state) as exporter:
        await exporter.started()
        async with (
            vllm.server(flags, command=True) as first,
            vllm.server([*flags, "--api-server-count", "2"], command=True) as second,
        ):
            await first.started()
            await second.started()
            one, two = await asked(first, 3), await asked(second, 5)
            before = by_origin(await shown(exporter, one, two))
            await first.stop(signal.SIGKILL)
            first.kill()
            async with vllm.server(flags, command=True, port=first.port) as again:
                await again.started()
                more = await asked(again, 2)
                after = await shown(exporter, one + more, two)
        log = exporter.output

    assert sorted(before.values()) == sorted([one, two])
    (origin,) = before.keys() - {""}
    assert origin in {f"{socket.gethostname()}:{s.port}/tiny/0" for s in (first, second)}
    assert by_origin(after) == {k: v + (more if v == one else 0.0) for k, v in before.items()}
    assert value(after, "sidestep_identity_conflicts") == 0
    assert value(after, "sidestep_streams") == (5 if flags else 3)
    assert_nothing_refused(after)
    assert "claim" not in log


async def test_two_servers_with_one_name_are_both_counted(vllm: VllmSite) -> None:
    """The processes of each server feed one engine, and the exporter names the others."""
    environ = {"SIDESTEP_NAMESPACE": "ns"}
    async with vllm.exporter() as exporter:
        await exporter.started()
        async with (
            vllm.server(TAP, environ, command=True) as first,
            vllm.server(TAP, environ) as second,
        ):
            await first.started()
            await second.started()
            one, two = await asked(first, 3), await asked(second, 5)
            page = await shown(exporter, one, two)
        log = exporter.output

    found = by_origin(page)
    assert sorted(found.values()) == sorted([one, two])
    assert "ns~2/tiny/0" in found
    # A front end sends the latencies, its core the tokens.
    counts = {
        dict(labels).get("origin", ""): n
        for (name, labels), n in page[TTFT].samples.items()
        if name.endswith("_count")
    }
    assert counts == {name: 3 if number == one else 5 for name, number in found.items()}
    assert "two living processes claim the ids of stream ns/tiny/engine0" in log
