"""Two servers of one model on one host, and one exporter."""

from __future__ import annotations

import socket
from functools import partial

import pytest

from real_engines.comparison import assert_nothing_refused, parse, value
from real_engines.replicas import agreed, ask, assert_series_continue
from real_engines.sites import TAP, VllmSite

pytestmark = pytest.mark.engine

TOKENS = "vllm:generation_tokens"
TTFT = "vllm:time_to_first_token_seconds"


@pytest.mark.parametrize("flags", [[], TAP], ids=["plugin", "tap"])
async def test_two_servers_on_one_host(flags: list[str], vllm: VllmSite) -> None:
    """Each has series of its own, which go on when it is killed and started again."""
    first = partial(vllm.server, flags, command=True)
    second = partial(vllm.server, [*flags, "--api-server-count", "2"], command=True)
    async with vllm.exporter("--state.dir", str(vllm.home / "state")) as exporter:
        await exporter.started()
        page, origins, servers = await assert_series_continue(exporter, [TOKENS], first, second)
        log = exporter.output

    (origin,) = origins[TOKENS].keys() - {""}
    assert origin in {f"{socket.gethostname()}:{each.port}/tiny/0" for each in servers}
    assert value(page, "sidestep_identity_conflicts") == 0
    assert value(page, "sidestep_streams") == (5 if flags else 3)
    assert_nothing_refused(page)
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
            await ask(first, 3)
            await ask(second, 5)
            tokens = (await agreed(exporter, [TOKENS], [first, second], {}))[TOKENS]
            page = parse(await exporter.page())
            one = value(parse(await first.page()), TOKENS)
        log = exporter.output

    assert "ns~2/tiny/0" in tokens
    # A front end sends the latencies, its core the tokens.
    counts = {
        dict(labels).get("origin", ""): number
        for (name, labels), number in page[TTFT].samples.items()
        if name.endswith("_count")
    }
    assert counts == {name: 3 if number == one else 5 for name, number in tokens.items()}
    assert "two living processes claim the ids of stream ns/tiny/engine0" in log
