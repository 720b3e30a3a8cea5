"""vLLM's Rust front end, which loads no plugin: the tap in the engine's core alone."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pages import Labels
from real_engines.comparison import (
    Page,
    assert_nothing_refused,
    report,
    settled_alone,
    value,
)
from real_engines.load import MAIN_ENVIRON, MAIN_FLAGS, Ask, Client, generated, reasons
from real_engines.sites import TAP, VllmSite, completions, without_streams

pytestmark = pytest.mark.engine

HOPS = ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds")
"""Latencies that end at the front end on its page, and in the core on ours."""
INFO = "vllm:cache_config_info"
"""Family that only the Python front end's page has."""
ENDED = "vllm:request_success"
HTTP = "http_requests"
LONG = 1900
"""Tokens with which a request ends by a stop string only, on a busy machine too."""
ENGINE: Labels = (("engine", "0"), ("model_name", "tiny"))


@pytest.fixture
def rust_front_end(vllm_python: Path) -> Path:
    """Return the program of the Rust front end, which tools/setup_vllm.sh takes from vLLM's wheel."""
    site = next((vllm_python.parents[1] / "lib").glob("python3*/site-packages"))
    program = Path(os.environ.get("SIDESTEP_VLLM_RS", site / "vllm/vllm-rs"))
    if not program.exists():
        pytest.skip("no Rust front end of vLLM; get one with tools/setup_vllm.sh")
    return program


def samples(text: str) -> dict[tuple[str, Labels], float]:
    """Return the samples of vLLM's families of a page.

    The Rust front end serves OpenMetrics, which names a counter's family without ``_total``:
    the samples of both pages have the same names, the families have not.
    """
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
        if sample.name.startswith("vllm:")
    }


async def test_the_tap_counts_what_the_rust_front_end_counts(
    rust_front_end: Path, vllm: VllmSite
) -> None:
    """All samples are equal but the latencies that end at the front end; stop strings are aborts."""
    environ = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": str(rust_front_end)}
    server = vllm.server(
        [*MAIN_FLAGS, *TAP, "--shutdown-timeout", "30"], MAIN_ENVIRON | environ, command=True
    )
    scrape = "--scrape", f"{server.base}/metrics,interval=0.5"
    async with vllm.with_exporter(server, *scrape) as exporter, Client(server.base) as client:
        # Until then vLLM's families on the page are those of its own page.
        await settled_alone(exporter, lambda page: value(page, "sidestep_streams") == 1)
        answers = await client.mixed(leave=False, stop_strings=False)
        ended = reasons(answers).total()
        served = sum(answer.status == 200 for answer in answers)

        def all_in(page: Page) -> bool:
            return value(page, ENDED) >= ended and value(page, HTTP, status="2xx") == served

        ours = await settled_alone(exporter, all_in)
        found, mine = samples(await server.page()), samples(await exporter.page())
        report("Rust front end", ours, answers)

        plain = {"ignore_eos": True}
        stop = {"stop": list("aeio"), **plain}
        stopped = await client.ask_all(Ask(client.text(30), LONG, options=stop) for _ in range(4))
        more = await completions(client, 2)
        aborted = await settled_alone(exporter, lambda page: value(page, ENDED) >= ended + 6)

        await server.stop()
        after = await without_streams(exporter)

    # Its page, in OpenMetrics, has what the tap cannot know; of vLLM's families that which ours lacks.
    assert value(ours, HTTP, status="2xx") == served
    assert value(ours, "sidestep_scrape_left_out_samples", reason="ours") > 300
    # It serves one sample per request: two that ask for two are refused, as one that is too long.
    assert [400] * 3 == [answer.status for answer in answers if answer.status != 200]
    common = found.keys() & mine.keys()
    assert len(common) > 350
    assert [] == [
        (key, mine[key], found[key])
        for key in sorted(common)
        if not key[0].startswith(HOPS) and not math.isclose(mine[key], found[key], rel_tol=1e-9)
    ]
    for name in HOPS:
        assert 0 < mine[f"{name}_sum", ENGINE] < found[f"{name}_sum", ENGINE]
        assert mine[f"{name}_count", ENGINE] == found[f"{name}_count", ENGINE]
    # Either page has counts of 0 that the other lacks; its page also has buckets for longer prompts.
    assert {key[0] for key in mine.keys() - found.keys() if mine[key]} == {INFO}
    rest = found.keys() - mine.keys()
    assert not [key for key in rest if found[key] and "le" not in dict(key[1])]
    assert value(ours, "vllm:generation_tokens") == generated(answers)
    assert value(ours, "vllm:num_preemptions") > 0

    # It searches for stop strings itself, and does not send them to its core.
    assert ["stop"] * 4 == [reason for answer in stopped for reason in answer.reasons]
    assert value(aborted, ENDED, finished_reason="abort") == len(stopped)
    assert value(aborted, ENDED) == ended + len(stopped) + len(more)
    assert value(after, "sidestep_engine_up") == 0
    assert_nothing_refused(aborted)
