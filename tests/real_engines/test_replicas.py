"""Two servers of one model on one host, and one exporter."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import pytest

from real_engines.comparison import assert_nothing_refused, parse, value
from real_engines.replicas import agreed, ask, assert_series_continue
from real_engines.sites import TAP, Site, VllmSite

pytestmark = pytest.mark.engine

TOKENS = "vllm:generation_tokens"
TTFT = "vllm:time_to_first_token_seconds"
OF_BOTH_PROCESSES = ("sglang:generation_tokens", "sglang:realtime_tokens")
"""Families of SGLang's tokenizer and of its scheduler."""


@pytest.mark.parametrize(
    ("site", "flags", "families", "origin", "streams"),
    [
        ("vllm", [], [TOKENS], "tiny/0", 3),
        ("vllm", TAP, [TOKENS], "tiny/0", 5),
        # A tokenizer, a scheduler and a detokenizer of each.
        ("sglang", [], OF_BOTH_PROCESSES, "tiny/sglang/", 6),
    ],
    indirect=["site"],
    ids=["vllm-plugin", "vllm-tap", "sglang"],
)
async def test_two_servers_on_one_host(
    site: Site, flags: list[str], families: list[str], origin: str, streams: int
) -> None:
    """Each has series of its own, which go on when it is killed and started again."""
    of_vllm: dict[str, Any] = {"command": True} if isinstance(site, VllmSite) else {}
    several = ["--api-server-count", "2"] if of_vllm else []
    first = partial(site.server, flags, **of_vllm)
    second = partial(site.server, [*flags, *several], **of_vllm)
    async with site.exporter("--state.dir", str(site.home / "state")) as exporter:
        await exporter.started()
        page, origins, servers = await assert_series_continue(exporter, families, first, second)
        log = exporter.output

    prefixes = tuple(f"{socket.gethostname()}:{each.port}/{origin}" for each in servers)
    for found in origins.values():
        (other,) = found.keys() - {""}
        assert other.startswith(prefixes)
    assert value(page, "sidestep_identity_conflicts") == 0
    assert value(page, "sidestep_streams") == streams
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
