"""Two servers of one model on one host, and one exporter."""

from __future__ import annotations

import socket

import pytest

from real_engines.comparison import assert_nothing_refused, value
from real_engines.replicas import assert_series_continue
from real_engines.sites import SglangSite

pytestmark = pytest.mark.engine

FAMILIES = ("sglang:generation_tokens", "sglang:realtime_tokens")
"""Families of a tokenizer and of a scheduler."""


async def test_two_servers_on_one_host(sglang: SglangSite) -> None:
    """The processes of each have series of their own, which go on when it is killed and restarted."""
    async with sglang.exporter("--state.dir", str(sglang.home / "state")) as exporter:
        await exporter.started()
        page, origins, servers = await assert_series_continue(
            exporter, FAMILIES, sglang.server, sglang.server
        )
        log = exporter.output

    prefixes = [f"{socket.gethostname()}:{each.port}/tiny/sglang/" for each in servers]
    for found in origins.values():
        (origin,) = found.keys() - {""}
        assert origin.startswith(tuple(prefixes))
    assert value(page, "sidestep_identity_conflicts") == 0
    # A tokenizer, a scheduler and a detokenizer of each.
    assert value(page, "sidestep_streams") == 6
    assert_nothing_refused(page)
    assert "claim" not in log
