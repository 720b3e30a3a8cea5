"""Streams that a real SGLang publishes by itself, without the plugin and beside it."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path

import pytest

from exporters import until
from real_engines.comparison import (
    Page,
    assert_complete,
    assert_nothing_refused,
    count,
    parse,
    total,
    value,
)
from real_engines.load import Ask, Client
from real_engines.sglang_server import (
    STAND_INS,
    TWO_RANKS,
    TWO_RANKS_ENVIRON,
    Feeds,
    post,
    sglang_environ,
)
from real_engines.sites import SglangSite

pytestmark = pytest.mark.engine

DOCUMENT = Path(__file__).parents[2] / "docs" / "streams.md"
RANKS = 2
GAUGES = (
    "sidestep_kv_cache_resident_blocks",
    "sidestep_load_running_requests",
    "sidestep_forward_pass_scheduled_decode_requests",
)
"""A gauge of each kind of stream."""


def subscriptions(feeds: Feeds) -> list[str]:
    """Return flags that subscribe to every stream of both ranks."""
    given = (
        f"kv-events=tcp://127.0.0.1:{feeds.kv_port}-{feeds.kv_port + RANKS - 1}",
        f"load=tcp://127.0.0.1:{feeds.load_port}-{feeds.load_port + RANKS - 1}",
        f"forward-pass=ipc://{feeds.forward_pass_path}.0-{RANKS - 1}",
    )
    return [flag for one in given for flag in ("--subscribe", f"{one},model=tiny")]


def by_its_page(page: Page, rank: str) -> dict[str, float]:
    """Return a rank's values on SGLang's own page."""
    tokens = "sglang:realtime_tokens"
    return {
        "computed": value(page, tokens, mode="prefill_compute", dp_rank=rank),
        "cached": value(page, tokens, mode="prefill_cache", dp_rank=rank),
        "decoded": value(page, tokens, mode="decode", dp_rank=rank),
        "blocks": value(page, "sglang:kv_evictable_tokens", dp_rank=rank),
        "running": value(page, "sglang:num_running_reqs", dp_rank=rank),
    }


def by_the_streams(page: Page, rank: str) -> dict[str, float]:
    """Return a rank's values on the exporter's page."""
    passes = "sidestep_forward_pass_"
    return {
        "computed": value(page, f"{passes}tokens", phase="prefill", engine=rank),
        "cached": total(page, f"{passes}prefill_kv_tokens", engine=rank),
        "decoded": value(page, f"{passes}tokens", phase="decode", engine=rank),
        "blocks": value(page, "sidestep_kv_cache_resident_blocks", engine=rank),
        "running": value(page, "sidestep_load_running_requests", engine=rank),
    }


@pytest.mark.parametrize("plugin", [False, True], ids=["streams only", "with the plugin"])
async def test_streams_agree_with_its_page(plugin: bool, sglang: SglangSite) -> None:
    """Tokens, blocks and requests of both ranks are those of SGLang's page, and in one family each."""
    feeds = Feeds.chosen(sglang.home, RANKS)
    server = sglang.server([*TWO_RANKS, *feeds.flags], TWO_RANKS_ENVIRON, sends=plugin)
    async with sglang.with_exporter(server, *subscriptions(feeds)) as exporter:

        async def all_publish() -> bool:
            # Blocks are published only when they change; all are known after a flush.
            await post(f"{server.base}/flush_cache")
            page = parse(await exporter.page())
            return all(name in page and len(page[name].samples) >= RANKS for name in GAUGES)

        await until(all_publish, 60, "a message of every stream")
        before = parse(await server.page()), parse(await exporter.page())
        async with Client(server.base) as client:
            asks = [Ask(client.text(60), 24, stream=turn % 2 == 0) for turn in range(24)]
            answers = await client.ask_all(asks)
        found: list[tuple[dict[str, float], dict[str, float]]] = []

        async def agree() -> bool:
            found[:] = []
            after = parse(await server.page()), parse(await exporter.page())
            for rank in map(str, range(RANKS)):
                pair = []
                for page, then, read in zip(
                    after, before, (by_its_page, by_the_streams), strict=True
                ):
                    now, was = read(page, rank), read(then, rank)
                    counted = {k: now[k] - was[k] for k in ("computed", "cached", "decoded")}
                    pair.append({**now, **counted})
                found.append((pair[0], pair[1]))
            return all(theirs == ours for theirs, ours in found)

        with contextlib.suppress(AssertionError):
            await until(agree, 20)
        ours = parse(await exporter.page())
        code = await server.stop()

    assert_complete(answers)
    for theirs, mine in found:
        assert theirs == mine
        assert theirs["computed"] > 0
        assert theirs["decoded"] > 0
        assert theirs["blocks"] > 0
    assert count(ours, "sidestep_forward_pass_duration_seconds") > 0
    assert_nothing_refused(ours)
    assert value(ours, "sidestep_subscription_lost_messages") == 0
    assert value(ours, "sidestep_subscription_gaps") == 0
    assert any(name.startswith("sglang:") for name in ours) == plugin
    # Two engines of a stream keep their names where the plugin's scheduler has others.
    assert {dict(labels)["engine"] for _, labels in ours[GAUGES[0]].samples} == {"0", "1"}
    assert "origin" not in {
        name for f in ours.values() for _, ls in f.samples for name, v in ls if v
    }
    assert code == 0


RESOLVED = """
import json
import sys

from sglang.srt.disaggregation.kv_events import resolve_load_pub_range

for endpoint in sys.argv[2:]:
    found, _ = resolve_load_pub_range(
        kv_endpoint=sys.argv[1], replay_endpoint=None, dp_size=1, load_publish_endpoint=endpoint
    )
    print(json.dumps(found))
"""


def test_the_documented_endpoint_of_load_is_accepted(sglang: SglangSite) -> None:
    """SGLang binds the endpoint of docs/streams.md; a loopback address or a path it refuses."""
    flags = re.findall(
        r"--kv-events-config '(.*)' \\\n +--load-publish-endpoint (\S+)", DOCUMENT.read_text()
    )
    ((config, endpoint),) = flags
    given = [json.loads(config)["endpoint"], endpoint, "tcp://127.0.0.1:5657", "ipc:///load"]
    done = subprocess.run(
        [sglang.python, "-c", RESOLVED, *given],
        env={**sglang_environ(sglang.home), "PYTHONPATH": str(STAND_INS)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert [json.loads(line) for line in done.stdout.splitlines()] == [["*", 5657], None, None]
