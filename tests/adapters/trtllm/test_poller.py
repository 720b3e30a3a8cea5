"""The exporter and a constructed trtllm-serve over sockets."""

from __future__ import annotations

from typing import Any

import pytest

from exporters import Start, until
from pages import Labels, get, parse
from sidestep.app import Exporter
from sidestep.exposition.text_page import render
from sidestep_adapters.trtllm.iterations import IterationReader, decode
from trtllm_servers import (
    ITERATIONS,
    MODELS,
    PAGE,
    TrtllmServer,
    made_page,
    old_page,
    trtllm_server,
)


@pytest.fixture(autouse=True)
def _all_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sidestep")


def engine(server: TrtllmServer, *options: str) -> tuple[str, ...]:
    """Return the flag."""
    return (",".join((f"trtllm={server.url}", "interval=0.05", *options)),)


def samples(exporter: Exporter, prefix: str = "trtllm_") -> dict[tuple[str, Labels], float]:
    """Return the series whose names begin with ``prefix``."""
    return {
        key: value
        for family in parse(render(exporter.registry).decode()).values()
        for key, value in family.samples.items()
        if key[0].startswith(prefix)
    }


def value(exporter: Exporter, name: str, **labels: str) -> float | None:
    """Return the sum of the series of this name with these labels; None if there is none."""
    found = [
        number
        for (sample, own), number in samples(exporter, name).items()
        if sample == name and labels.items() <= dict(own).items()
    ]
    return sum(found) if found else None


def polls(exporter: Exporter, server: TrtllmServer, outcome: str = "ok") -> float:
    """Return how many polls had ``outcome``."""
    name = f"trtllm={server.url}"
    return exporter.metrics.value("sidestep_engine_polls_total", name, outcome)


async def polled_again(exporter: Exporter, server: TrtllmServer, outcome: str = "ok") -> None:
    """Wait until two more polls have ended: one may have begun before."""
    before = polls(exporter, server, outcome)
    await until(lambda: polls(exporter, server, outcome) >= before + 2)


def folded(text: str) -> dict[tuple[str, Labels], float]:
    """Return the samples of a page as they should be here: the highest of all processes."""
    found: dict[tuple[str, Labels], float] = {}
    for family in parse(text).values():
        for (name, labels), number in family.samples.items():
            own = tuple(pair for pair in labels if pair[0] != "pid")
            found[name, own] = max(found.get((name, own), number), number)
    return found


async def test_the_page_is_the_servers(start: Start) -> None:
    """Every sample of a constructed page is here, under its name and labels, without the label pid."""
    async with (
        trtllm_server(made_page()) as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        ours = samples(exporter)

    expected = folded(made_page())
    assert len(expected) > 200
    assert ours.keys() == expected.keys()
    assert ours == pytest.approx(expected)
    assert set(server.asked) == {PAGE}


async def test_common_names_and_objectives_are_fed(start: Start) -> None:
    """Histograms move to the common bounds, and count for objectives."""
    async with (
        trtllm_server(made_page()) as server,
        start(engine=engine(server), metrics_common=True, slo=("ttft=1s", "e2e=10s")) as exporter,
    ):
        await polled_again(exporter, server)
        theirs = folded(made_page())
        shared: Labels = (("engine_type", "pytorch"), ("model_name", "Qwen3-8B"))

        def common(name: str) -> float | None:
            return value(exporter, name)

        assert common("sidestep_requests_running") == theirs["trtllm_num_requests_running", shared]
        assert common("sidestep_requests_waiting") == theirs["trtllm_num_requests_waiting", shared]
        usage = theirs["trtllm_kv_cache_utilization", shared]
        assert common("sidestep_kv_cache_usage_ratio") == usage
        looked_up = theirs["trtllm_prompt_tokens_total", shared]
        assert common("sidestep_prefix_cache_looked_up_tokens_total") == looked_up
        found = theirs["trtllm_prompt_cached_tokens_total", shared]
        assert common("sidestep_prefix_cache_found_tokens_total") == found
        for ours, name in (
            ("gen_ai_server_time_to_first_token_seconds", "time_to_first_token_seconds"),
            ("gen_ai_server_time_per_output_token_seconds", "time_per_output_token_seconds"),
            ("gen_ai_server_request_duration_seconds", "e2e_request_latency_seconds"),
            ("sidestep_request_queue_seconds", "request_queue_time_seconds"),
        ):
            for end in ("count", "sum"):
                expected = theirs[f"trtllm_{name}_{end}", shared]
                assert common(f"{ours}_{end}") == pytest.approx(expected)
        bucket = (*shared, ("le", "1.0"))
        good = theirs["trtllm_time_to_first_token_seconds_bucket", tuple(sorted(bucket))]
        slo = "sidestep_slo_requests_total"
        assert value(exporter, slo, slo="ttft", result="good") == good


async def test_an_old_release_has_the_new_names(start: Start) -> None:
    """Families without a prefix get it, the model its served name; the type of engine stays unknown."""
    async with (
        trtllm_server(old_page(3)) as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        found = samples(exporter)

    success = ("trtllm_request_success_total", "stop", "Qwen3-8B")
    assert {
        (n, dict(own).get("finished_reason"), dict(own).get("model_name")) for n, own in found
    } >= {success}
    assert {dict(own).get("engine_type") for _, own in found} <= {None, ""}
    assert set(server.asked) == {PAGE, MODELS}


async def test_a_label_can_be_given(start: Start) -> None:
    """A given name needs no request, and replaces any."""
    async with (
        trtllm_server(old_page(3)) as server,
        start(engine=engine(server, "model=m", "label.pod=p")) as exporter,
    ):
        await polled_again(exporter, server)
        assert value(exporter, "trtllm_request_success_total", model_name="m", pod="p") == 3
        assert MODELS not in server.asked


async def test_bounds_are_the_pages(start: Start) -> None:
    """A server may have been given other bounds than the default: its buckets stay as they are."""
    async with (
        trtllm_server(old_page(3)) as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        name = "trtllm_time_to_first_token_seconds_bucket"
        bounds = {dict(own)["le"]: n for (_, own), n in samples(exporter, name).items()}

    assert bounds == {"0.001": 0, "0.1": 3, "+Inf": 3}


async def test_counters_continue_over_restarts(start: Start) -> None:
    """A lower count is a restart."""
    async with (
        trtllm_server(old_page(3)) as server,
        start(engine=engine(server)) as exporter,
    ):
        for requests in (5, 2, 4):
            await polled_again(exporter, server)
            server.serve(old_page(requests))
        await polled_again(exporter, server)

        assert value(exporter, "trtllm_request_success_total") == 5 + 4
        assert value(exporter, "trtllm_time_to_first_token_seconds_count") == 9
        assert value(exporter, "sidestep_trtllm_resets_total") == 1


async def test_a_server_without_a_page_says_what_to_set(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Without return_perf_metrics the path does not exist."""
    async with (
        trtllm_server() as server,
        start(engine=engine(server)) as exporter,
    ):
        await until(lambda: polls(exporter, server, "no_metrics") > 1)

    assert "return_perf_metrics: true" in caplog.text


async def test_a_page_before_the_first_request_is_empty(start: Start) -> None:
    """The server is up, with the model that it serves."""
    async with (
        trtllm_server("") as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        (known,) = exporter.registry.engines.values()
        assert known.labels["model_name"] == "Qwen3-8B"
        server.serve(old_page(2))
        await polled_again(exporter, server)
        assert value(exporter, "trtllm_request_success_total") == 2


async def test_two_models_on_a_page_are_refused(start: Start) -> None:
    """Files of an earlier server are in its directory, whose counts would be added."""
    async with (
        trtllm_server(old_page(2, "a") + old_page(3, "b")) as server,
        start(engine=engine(server)) as exporter,
    ):
        await until(lambda: polls(exporter, server, "bad_answer") > 1)
        assert not exporter.registry.engines


def iteration(number: int, **fields: Any) -> dict[str, Any]:
    """Return the statistics of one iteration."""
    return {
        "iter": number,
        "timestamp": "",
        "iterLatencyMS": 20.0,
        "numActiveRequests": 3,
        "numQueuedRequests": 1,
        "maxNumActiveRequests": 8,
        "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 25, "cacheHitRate": 0.5},
        "inflightBatchingStats": {"numScheduledRequests": 2, "numCtxTokens": 64},
        "specDecodingStats": None,
        **fields,
    }


async def test_iterations_are_taken_only_when_asked_for(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading them takes them from others, which a warning at the start says."""
    async with (
        trtllm_server(old_page(1)) as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        assert ITERATIONS not in server.asked
    assert "away from all other readers" not in caplog.text

    async with trtllm_server(old_page(1)) as server:
        server.iterations += [iteration(1), iteration(2), iteration(5, iterSuspendedRequests=2)]
        flags: dict[str, Any] = {"engine": engine(server, "iterations=true")}
        async with start(metrics_common=True, **flags) as exporter:
            await polled_again(exporter, server)
            assert value(exporter, "sidestep_trtllm_iteration_duration_seconds_count") == 3
            total = value(exporter, "sidestep_trtllm_iteration_duration_seconds_sum")
            assert total == pytest.approx(0.06)
            assert value(exporter, "sidestep_trtllm_iteration_requests_sum") == 6
            assert value(exporter, "sidestep_trtllm_iteration_context_tokens_sum") == 192
            assert value(exporter, "sidestep_trtllm_lost_iterations_total") == 2
            assert value(exporter, "sidestep_preemptions_total") == 2
            assert value(exporter, "trtllm_num_requests_running") == 3
            assert value(exporter, "trtllm_kv_cache_utilization") == 0.25
    assert "away from all other readers" in caplog.text


async def test_iterations_need_no_page(start: Start) -> None:
    """A server without return_perf_metrics has them; the poll tells of the missing page."""
    async with trtllm_server() as server:
        server.iterations.append(iteration(1))
        async with start(engine=engine(server, "iterations=true")) as exporter:
            await until(lambda: polls(exporter, server, "no_metrics") > 1)
            await until(lambda: value(exporter, "trtllm_num_requests_running") == 3)


async def test_pauses_are_rises_where_nothing_is_told() -> None:
    """A request that stays paused counts once."""
    reader = IterationReader()
    counts = []
    for number, paused in enumerate((0, 2, 2, 3, 0, 1)):
        batch = f'{{"numPausedRequests": {paused}}}'
        body = f'[{{"iter": {number}, "inflightBatchingStats": {batch}}}]'.encode()
        families = {family.name: family for family in reader.families(decode(body))}
        counts.append(families["sidestep_trtllm_pauses_total"].samples[0].value)

    assert counts == [0, 2, 0, 1, 0, 1]


async def test_the_live_page_has_it(start: Start) -> None:
    """The engine has a row with its model and dialect."""
    async with (
        trtllm_server(made_page()) as server,
        start(engine=engine(server)) as exporter,
    ):
        await polled_again(exporter, server)
        live = (await get(exporter.url.replace("/metrics", "/api/v1/live"))).replace(" ", "")

    assert '"dialect":"trtllm"' in live
    assert '"model":"Qwen3-8B"' in live
    assert '"running":66' in live


async def test_health_is_never_asked(start: Start) -> None:
    """A server with a fatal error ends when it is."""
    async with (
        trtllm_server(made_page()) as server,
        start(engine=engine(server, "iterations=true")) as exporter,
    ):
        await polled_again(exporter, server)
        assert set(server.asked) == {PAGE, ITERATIONS}


async def test_a_scrape_of_the_statistics_is_refused(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """One request finds out that it is JSON; then it is asked seldom, and an error says why."""
    async with trtllm_server(made_page()) as server:
        server.iterations.append(iteration(1))
        flags = (f"{server.url},interval=0.05",)
        async with start(scrape=flags) as exporter:
            await until(lambda: "polled again in 10 s only" in caplog.text)
            server.iterations.append(iteration(2))
            name = f"{server.url}/metrics"
            assert exporter.metrics.value("sidestep_scrape_polls_total", name, "json") == 1
            other = f"{server.url}{PAGE}"
        async with start(scrape=(f"{other},interval=0.05",)) as exporter:
            counted = "sidestep_scrape_polls_total"
            await until(lambda: exporter.metrics.value(counted, other, "ok") > 3)

        assert server.asked.count(ITERATIONS) == 1
        assert len(server.iterations) == 1


def event(number: int, kind: str, **data: Any) -> dict[str, Any]:
    """Return a KV cache event."""
    return {"event_id": number, "window_size": 4096, "data": {"type": kind, **data}}


def stored(number: int, *hashes: int, level: int = 0) -> dict[str, Any]:
    """Return an event of stored blocks, with their tokens."""
    tokens = [{"token_id": 7, "token_extra_id": 0}]
    blocks = [
        {"block_hash": each, "tokens": tokens, "cache_level": level, "priority": 35}
        for each in hashes
    ]
    return event(number, "stored", parent_hash=None, blocks=blocks)


async def test_kv_cache_events_are_the_residency_of_streams(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """Stored, moved and removed blocks count by medium; after a lost event nothing is known to be resident."""
    moved = {"type": "event_diff", "old_value": 0, "new_value": 1}
    async with trtllm_server(made_page()) as server:
        server.events += [
            event(0, "created", num_blocks_per_cache_level=[100, 50]),
            stored(1, 11, 12, 13),
            event(2, "updated", block_hash=12, cache_level=moved, priority=None),
            event(3, "removed", block_hashes=[11]),
        ]
        flags: dict[str, Any] = {"engine": engine(server, "kv-events=true")}
        async with start(kv_sample_rate="1", **flags) as exporter:
            await polled_again(exporter, server)
            resident = "sidestep_kv_cache_resident_blocks"
            gpu = {"medium": "GPU", "engine": "0", "model_name": "Qwen3-8B"}
            assert value(exporter, resident, **gpu) == 1
            assert value(exporter, resident, medium="CPU") == 1
            assert value(exporter, "sidestep_kv_cache_stored_blocks_total") == 4
            assert value(exporter, "sidestep_kv_cache_removed_blocks_total") == 2
            lifetimes = "sidestep_kv_cached_block_lifetime_seconds_count"
            assert value(exporter, lifetimes, medium="GPU") == 2

            server.events.append(event(4, "removed", block_hashes=[12]))
            await polled_again(exporter, server)
            assert value(exporter, resident, medium="CPU") == 0

            server.events.append(stored(9, 20))
            await polled_again(exporter, server)
            assert value(exporter, resident) is None
            assert value(exporter, "sidestep_kv_cache_stored_blocks_total") == 5

            server.events += [event(0, "created"), stored(1, 30)]
            await polled_again(exporter, server)
            assert value(exporter, resident, **gpu) == 1
    assert "kv-events=true takes the events" in caplog.text


async def test_windows_have_blocks_of_their_own(start: Start) -> None:
    """Caches of several windows store one prefix once each."""
    async with trtllm_server(made_page()) as server:
        other = {**stored(3, 11), "window_size": 1024}
        server.events += [event(0, "created"), event(1, "created"), stored(2, 11), other]
        flags: dict[str, Any] = {"engine": engine(server, "kv-events=true")}
        async with start(kv_sample_rate="1", **flags) as exporter:
            await polled_again(exporter, server)
            assert value(exporter, "sidestep_kv_cached_tracked_blocks") == 2
