"""Several servers of one model on one host: requests to them, and their series at one exporter."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

from exporters import until
from real_engines.comparison import SETTLE, Page, parse, value
from real_engines.load import Client
from real_engines.processes import ExporterProcess, Server
from real_engines.sites import completions

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
    """Assert that each of two servers has series of its own, which go on after a kill of the first.

    Returns:
        The last page, the first values, and the two servers.
    """
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
