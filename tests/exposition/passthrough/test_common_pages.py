"""Scraped families under common names, on constructed pages of their servers."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlencode

import pytest

from exporters import Start, until
from llama_servers import LlamaServer, llama_server, recorded, recording
from pages import get, parse
from polled import page, polled
from sidestep.app.exporter import Exporter
from sidestep.catalog.engine_pages import COMMON_NAMES, CommonName
from sidestep.engines.common_names import FAMILIES
from trtllm_page import made_page

OK = "sidestep_scrape_polls_total"
DYNAMO = """\
# TYPE dynamo_frontend_time_to_first_token_seconds histogram
dynamo_frontend_time_to_first_token_seconds_bucket{model="m",le="0.1"} 2
dynamo_frontend_time_to_first_token_seconds_bucket{model="m",le="+Inf"} 3
dynamo_frontend_time_to_first_token_seconds_sum{model="m"} 0.5
dynamo_frontend_time_to_first_token_seconds_count{model="m"} 3
# TYPE dynamo_frontend_input_sequence_tokens histogram
dynamo_frontend_input_sequence_tokens_bucket{model="m",le="+Inf"} 3
dynamo_frontend_input_sequence_tokens_sum{model="m"} 90
dynamo_frontend_input_sequence_tokens_count{model="m"} 3
# TYPE dynamo_frontend_output_sequence_tokens histogram
dynamo_frontend_output_sequence_tokens_bucket{model="m",le="+Inf"} 3
dynamo_frontend_output_sequence_tokens_sum{model="m"} 30
dynamo_frontend_output_sequence_tokens_count{model="m"} 3
# TYPE dynamo_frontend_queued_requests gauge
dynamo_frontend_queued_requests{model="m"} 4
"""
LMCACHE = """\
# TYPE lmcache:num_lookup_tokens_total counter
lmcache:num_lookup_tokens_total{model_name="m",worker_id="0"} 100
# TYPE lmcache:num_lookup_hits_total counter
lmcache:num_lookup_hits_total{model_name="m",worker_id="0"} 40
"""
TGI = """\
# TYPE tgi_queue_size gauge
tgi_queue_size 2
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 5
# TYPE tgi_request_duration summary
tgi_request_duration_sum 1
tgi_request_duration_count 1
# TYPE sidestep_requests_waiting gauge
sidestep_requests_waiting 99
"""


async def samples(exporter: Exporter) -> dict[str, float]:
    """Return the samples under common names, with their labels."""
    names = {family.name.removesuffix("_total") for family in FAMILIES}
    return {
        " ".join((name, *(f"{key}={text}" for key, text in labels))): value
        for family, found in parse(await get(exporter.url)).items()
        if family in names
        for (name, labels), value in found.samples.items()
    }


async def test_they_have_the_common_names_too(start: Start) -> None:
    """Values, bounds and labels are the page's; a model has the label model_name."""
    async with (
        polled(page(DYNAMO + LMCACHE + TGI)) as server,
        start(scrape=(f"{server.url},interval=0.05,label.pod=p",), metrics_common=True) as exporter,
    ):
        await until(lambda: exporter.metrics.value(OK, server.url, "ok") > 0)
        found = await samples(exporter)
        whole = await get(exporter.url)

    ttft, usage = "gen_ai_server_time_to_first_token_seconds", "gen_ai_client_token_usage"
    assert found[f"{ttft}_bucket le=0.1 model_name=m pod=p"] == 2
    assert found[f"{ttft}_sum model_name=m pod=p"] == 0.5
    assert found[f"{usage}_sum gen_ai_token_type=input model_name=m pod=p"] == 90
    assert found[f"{usage}_sum gen_ai_token_type=output model_name=m pod=p"] == 30
    looked_up = "sidestep_prefix_cache_looked_up_tokens_total"
    assert found[f"{looked_up} model_name=m pod=p worker_id=0"] == 100
    assert found["sidestep_prefix_cache_found_tokens_total model_name=m pod=p worker_id=0"] == 40
    assert found["sidestep_requests_running pod=p"] == 5
    # The page's own family of that name is left out, and so are families of another kind or meaning.
    waiting = {name: n for name, n in found.items() if "requests_waiting" in name}
    assert waiting == {"sidestep_requests_waiting pod=p": 2}
    assert "gen_ai_server_request_duration_seconds" not in whole
    assert 'dynamo_frontend_queued_requests{model="m",pod="p"} 4' in whole


async def test_tensorrt_llm_has_them(start: Start, golden: Callable[[str, str], None]) -> None:
    """Of a gauge that each process of the server has, the highest counts; its own families stay."""
    names = urlencode([("name[]", family.name) for family in FAMILIES])
    async with (
        polled(page(made_page())) as server,
        start(scrape=(f"{server.url},interval=0.05",), metrics_common=True) as exporter,
    ):
        await until(lambda: exporter.metrics.value(OK, server.url, "ok") > 0)
        golden("common_trtllm.prom", await get(f"{exporter.url}?{names}"))
        whole = await get(exporter.url)

    for pid, value in (("14986", 16), ("14987", 66)):
        labels = f'engine_type="pytorch",model_name="Qwen3-8B",pid="{pid}"'
        assert f"trtllm_num_requests_running{{{labels}}} {value}.0\n" in whole


async def test_an_engine_of_the_exporter_has_the_names(start: Start) -> None:
    """One family cannot come from an engine and from a page: the page is valid, with the engine's."""
    async with polled(page(TGI)) as server, llama_server() as other:
        load(other)
        flags = {
            "scrape": (f"{server.url},interval=0.05",),
            "engine": (f"llamacpp={other.url},interval=0.05",),
        }
        async with start(metrics_common=True, **flags) as exporter:
            name = f"llamacpp={other.url}"
            polls = "sidestep_engine_polls_total"
            await until(lambda: exporter.metrics.value(polls, name, "ok") > 0)
            await until(lambda: exporter.metrics.value(OK, server.url, "ok") > 0)
            found = await samples(exporter)

    (waiting,) = (name for name in found if name.startswith("sidestep_requests_waiting"))
    assert f"engine={other.url.removeprefix('http://')}" in waiting


def load(server: LlamaServer) -> None:
    """Answer with the first recorded response of each path."""
    for each in reversed(recording("load")["pages"]):
        server.answers[each["path"]] = recorded(each)


@pytest.mark.parametrize("row", COMMON_NAMES, ids=lambda row: row.source)
def test_each_row_names_a_common_family(row: CommonName) -> None:
    """With the label of token types where the family has it, and where it was read."""
    known = {family.name: family for family in FAMILIES}
    closed = known[row.name].closed

    assert row.read_from
    assert row.token_type in closed if closed else not row.token_type
    assert row.source.endswith("_total") == row.name.endswith("_total")
