"""Two servers of one model on one host, and one exporter."""

from __future__ import annotations

import signal
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import pytest

from exporters import until
from real_engines.comparison import SETTLE, Page, assert_nothing_refused, parse, value
from real_engines.load import Client
from real_engines.processes import ExporterProcess, Server
from real_engines.sites import TAP, Site, VllmSite, completions

Origins = dict[str, dict[str, float]]
"""Values of families by the label ``origin``, which only one of two replicas has."""


class Starts(Protocol):
    """A server of a test's site, started at a free port or at that of an earlier one."""

    def __call__(self, *, port: int = 0) -> Server:
        """Start it."""


async def ask(server: Server, count: int) -> None:
    """Ask for completions."""
    async with Client(server.base) as client:
        assert all(answer.status == 200 for answer in await completions(client, count))


def by_origin(page: Page, family: str) -> dict[str, float]:
    """Return the sum of a family's samples for each ``origin``."""
    found: dict[str, float] = defaultdict(float)
    for (_, labels), number in page[family].samples.items() if family in page else ():
        found[dict(labels).get("origin", "")] += number
    return dict(found)


async def agreed(
    exporter: ExporterProcess,
    families: Sequence[str],
    servers: Sequence[Server],
    earlier: Mapping[str, float],
) -> Origins:
    """Wait until the series of each server have the values of its own page, and return them.

    A killed predecessor of the first server had counted the values ``earlier``, by family.
    """
    ours: Origins = {}
    theirs: dict[str, list[float]] = {}

    async def agree() -> bool:
        page = parse(await exporter.page())
        own = [parse(await each.page()) for each in servers]
        ours.update({family: by_origin(page, family) for family in families})
        for family in families:
            theirs[family] = [value(each, family) for each in own]
            theirs[family][0] += earlier.get(family, 0.0)
        return all(sorted(ours[each].values()) == sorted(theirs[each]) for each in families)

    try:
        await until(agree, SETTLE)
    except AssertionError:
        raise AssertionError(f"the exporter has {ours}, the servers {theirs}") from None
    return ours


async def assert_series_continue(
    exporter: ExporterProcess, families: Sequence[str], first: Starts, second: Starts
) -> tuple[Page, Origins, list[Server]]:
    """Assert that each of two servers has series of its own, which go on after a kill of the first."""
    async with first() as one, second() as other:
        await one.started()
        await other.started()
        await ask(one, 3)
        await ask(other, 5)
        before = await agreed(exporter, families, [one, other], {})
        page = parse(await one.page())
        earlier = {family: value(page, family) for family in families}
        await one.stop(signal.SIGKILL)
        one.kill()
        async with first(port=one.port) as again:
            await again.started()
            await ask(again, 2)
            after = await agreed(exporter, families, [again, other], earlier)
            last = parse(await exporter.page())
    for family in families:
        (killed,) = [key for key, number in before[family].items() if number == earlier[family]]
        assert after[family].pop(killed) > before[family][killed]
        assert after[family].items() < before[family].items(), family
    return last, before, [one, other]


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
