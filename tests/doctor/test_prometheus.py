"""`sidestep doctor --prometheus`: what is wrong with a real Prometheus, and with queries that it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from aiohttp import web

from boards import DASHBOARDS
from command_line import sidestep
from exporters import MAIN_RUN, Start, page_of_engine
from growing_page import growing_page
from ports import free_port
from prometheus_server import BINARIES, Prometheus
from rulefiles import RULE_FILES
from sidestep.app import Exporter
from sidestep_adapters.recording.replay import Replay
from web_servers import server

pytestmark = pytest.mark.timeout(180)

NATIVE = "--enable-feature=native-histograms"
BUILD = '# TYPE sidestep_build_info gauge\nsidestep_build_info{version="1"} 1\n'
ENGINE = page_of_engine("page_main")
OTHERS = ("sglang", "triton")
"""Dashboards for engines that are not those of the test."""
RATE = "sum(rate(vllm:generation_tokens_total[5m]))"


@pytest.fixture(params=BINARIES)
def binary(request: pytest.FixtureRequest) -> str:
    """Return the binary of each major version that is installed."""
    found = BINARIES[request.param]
    if found is None:
        pytest.skip(f"there is no Prometheus {request.param} (make tools)")
    return found


@contextlib.contextmanager
def running(
    binary: str,
    directory: Path,
    *targets: Mapping[str, str],
    rules: list[str] | None = None,
    interval: str = "500ms",
    flags: tuple[str, ...] = (),
) -> Iterator[Prometheus]:
    """Run a Prometheus that has scraped targets: ``url``, and further labels such as ``job``."""
    jobs: dict[str, list[dict[str, Any]]] = {}
    for target in targets:
        url, labels = (
            urlsplit(target["url"]),
            {k: v for k, v in target.items() if k not in ("url", "job")},
        )
        labels["__metrics_path__"] = url.path or "/metrics"
        jobs.setdefault(target.get("job", "a"), []).append(
            {"targets": [url.netloc], "labels": labels}
        )
    times = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), interval)
    config = {
        "global": times,
        "rule_files": rules or [],
        "scrape_configs": [{"job_name": job, "static_configs": each} for job, each in jobs.items()],
    }
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    one = Prometheus(binary, path, f"--storage.tsdb.path={directory}/tsdb", *flags)
    try:
        one.start()
        one.until("count(count_over_time(up[1h]) > 1)", lambda n: n.get("", 0) == len(targets))
        yield one
    finally:
        one.stop()


def doctor(*arguments: str) -> list[tuple[str, str, str]]:
    """Return code, severity and text of all findings."""
    done = sidestep("doctor", "--json", *arguments)
    assert done.stderr == ""
    found = json.loads(done.stdout)["findings"]
    return [(each["code"], each["severity"], each["text"]) for each in found]


def codes(one: Prometheus) -> list[str]:
    """Return the codes of all findings of a Prometheus."""
    return [code for code, _, _ in doctor("--prometheus", one.url)]


async def play(exporter: Exporter) -> None:
    """Replay a recorded run of vLLM."""
    player = Replay(MAIN_RUN, exporter.endpoints[0], realtime=False, namespace="test")
    await asyncio.to_thread(player.run)


async def test_a_good_setup(start: Start, tmp_path: Path, binary: str) -> None:
    """Nothing is wrong, and nothing but what is not in use with the queries of our own boards and rules."""
    files = [
        *(f"--dashboard={path}" for path in DASHBOARDS if path.stem not in OTHERS),
        *(f"--rules={path}" for path in RULE_FILES),
    ]
    async with start() as exporter:
        await play(exporter)

        def check() -> None:
            rules = [str(path) for path in RULE_FILES]
            with running(
                binary, tmp_path, {"url": exporter.url}, rules=rules, flags=(NATIVE,)
            ) as one:
                assert doctor("--prometheus", one.url) == []
                found = doctor("--prometheus", one.url, *files)
                assert [each for each in found if each[1] != "info"] == []
                assert found != []

        await asyncio.to_thread(check)


async def test_both_views_in_one_job(start: Start, tmp_path: Path, binary: str) -> None:
    """Every sum is doubled."""
    async with start() as exporter:
        await play(exporter)

        def check() -> None:
            pod = {"url": f"{exporter.url}/pod", "instance": "pod"}
            with running(binary, tmp_path, {"url": exporter.url}, pod) as one:
                found = doctor("--prometheus", one.url)
            assert [code for code, _, _ in found] == ["SD304", "SD308"]
            assert found[0][2].endswith("(job a) are two views of an exporter")

        await asyncio.to_thread(check)


@pytest.mark.parametrize(("job", "code"), [("a", "SD304"), ("b", "SD305")])
def test_an_engine_scraped_twice(tmp_path: Path, binary: str, job: str, code: str) -> None:
    """Its own page and the exporter's have the same counters."""
    with (
        growing_page(ENGINE) as own,
        growing_page(ENGINE + BUILD) as exporter,
        running(binary, tmp_path, {"url": own}, {"url": exporter, "job": job}) as one,
    ):
        found = doctor("--prometheus", one.url)
    assert [each for each, _, _ in found] == [code, "SD308"]
    assert found[0][2].endswith("are an exporter's page and its engine's own")


@pytest.mark.parametrize(
    "counter", ["llamacpp:tokens_predicted_total", "trtllm_generation_tokens_total"]
)
def test_a_polled_engine_scraped_twice(tmp_path: Path, binary: str, counter: str) -> None:
    """Its own page and the exporter's have the same counter, with other labels."""
    own, polled = f"{counter} 700\n", f'{counter}{{engine="a:8080",model_name="m"}} 700\n'
    with (
        growing_page(f"# TYPE {counter} counter\n{own}") as engine,
        growing_page(f"# TYPE {counter} counter\n{polled}{BUILD}") as exporter,
        running(binary, tmp_path, {"url": engine}, {"url": exporter}) as one,
    ):
        found = doctor("--prometheus", one.url)
    assert "SD304" in [code for code, _, _ in found]


def test_two_engines_on_one_host(tmp_path: Path, binary: str) -> None:
    """Their counters differ."""
    other = re.sub(
        r"^(vllm:generation_tokens_total.*) \S+", r"\1 99999", ENGINE, flags=re.MULTILINE
    )
    with (
        growing_page(other) as own,
        growing_page(ENGINE + BUILD) as exporter,
        running(binary, tmp_path, {"url": own}, {"url": exporter}) as one,
    ):
        assert codes(one) == ["SD308"]


@pytest.mark.parametrize(
    ("host", "why"),
    [("127.0.0.1", "the same page"), ("localhost", "one exporter under two addresses")],
)
def test_one_page_in_two_jobs(tmp_path: Path, binary: str, host: str, why: str) -> None:
    """The same process is in two jobs, by one address or by two."""
    with growing_page(ENGINE + BUILD) as url:
        again = {"url": url.replace("127.0.0.1", host), "job": "b"}
        with running(binary, tmp_path, {"url": url}, again) as one:
            found = doctor("--prometheus", one.url)
    assert [code for code, _, _ in found] == ["SD305", "SD308"]
    assert found[0][2].endswith(f"(job a, b) are {why}")


def test_no_exporter_and_a_target_that_is_down(tmp_path: Path, binary: str) -> None:
    """The error is Prometheus's own."""
    down = f"http://127.0.0.1:{free_port()}"
    with growing_page(ENGINE) as url, running(binary, tmp_path, {"url": url}, {"url": down}) as one:
        found = doctor("--prometheus", one.url)
    assert [code for code, _, _ in found] == ["SD302", "SD303", "SD308"]
    assert "connection refused" in found[1][2]


RULES = [
    {"record": "engine:x:rate5s", "expr": "rate(vllm:generation_tokens_total[900ms])"},
    {
        "record": "engine:x:sum",
        "expr": "vllm:request_success_total * on (engine) vllm:request_success_total",
    },
    {"alert": "X", "expr": "engine:other:sum > 0"},
]


def test_rules(tmp_path: Path, binary: str) -> None:
    """A short window, a rule that fails, and one that reads what none records are named."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": RULES}]}))
    with (
        growing_page(ENGINE + BUILD) as url,
        running(binary, tmp_path, {"url": url}, rules=[str(rules)]) as one,
    ):
        one.evaluated()
        found = doctor("--prometheus", one.url)
    assert [code for code, _, _ in found] == ["SD309", "SD310", "SD306"]
    assert found[0][2].startswith("engine:x:sum: ")
    assert found[1][2] == "X reads engine:other:sum"
    assert found[2][2] == "[900ms] of engine:x:rate5s, but scrapes are 0.5 s apart"


def test_labels_and_clocks(tmp_path: Path, binary: str) -> None:
    """A label of the target renames the page's; an exporter's times are in Prometheus's future."""
    ahead = 'sidestep_engine_last_seen_timestamp_seconds{engine="0"} 4e9\n'
    with (
        growing_page(ENGINE + BUILD + ahead) as url,
        running(binary, tmp_path, {"url": url, "model_name": "m"}) as one,
    ):
        found = doctor("--prometheus", one.url)
    assert [code for code, _, _ in found] == ["SD311", "SD312", "SD308"]
    assert found[0][2] == "series have the label exported_model_name"


async def test_other_servers() -> None:
    """A server that is no Prometheus, and none, are each named."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    nobody = f"http://127.0.0.1:{free_port()}"
    found = await asyncio.to_thread(doctor, "--prometheus", nobody)
    assert found == [("SD301", "error", "cannot connect: Connection refused")]
    async with server(page, "/{path:.*}") as url:
        found = await asyncio.to_thread(doctor, "--prometheus", url)
    assert [(code, text[:40]) for code, _, text in found] == [
        ("SD301", "/api/v1/query is no answer of Prometheus")
    ]


QUERIES: dict[str, list[str]] = {
    RATE: [],
    "sum(vllm:num_preemptions) or vector(0)": ["SD417"],
    "vllm:gpu_cache_usage_perc": ["SD405"],
    'vllm:num_requests_running{pod="other"}': ["SD408"],
    'vllm:num_requests_running{namespace="llm"}': ["SD408"],
    'vllm:num_requests_running{finished_reason="stop"}': ["SD407"],
    "sum by (model_name) (vllm:num_requests_running": ["SD404"],
    "vllm:num_requests_running * on (pod) group_left () vllm:request_success_total": ["SD404"],
    "vllm:num_requests_running + on (version) vllm:num_requests_waiting": [],
    "vllm:num_requests_running + sidestep_build_info": ["SD420"],
    "vllm:num_requests_running > 1e9": [],
    # With a value of the variable it is a good query.
    'vllm:num_requests_running * on (pod) group_left () vllm:request_success_total{a=~"$a"}': [],
    'count({job=~"$job"})': [],
    "sum(vllm:num_requests_running{job=~'$job'": ["SD404"],
    "sum by (service) (vllm:num_requests_running)": ["SD419"],
    "sum by (service, pod, model_name) (vllm:num_requests_running)": [],
    "sum by (modle_name, pod) (vllm:num_requests_running)": ["SD419"],
    "my:recorded:sum": ["SD416"],
    "DCGM_FI_DEV_GPU_UTIL": ["SD414"],
}


def test_queries(tmp_path: Path, binary: str) -> None:
    """Every query is run; one without a result is named with the reason."""
    panels = [{"title": f"<{query}>", "targets": [{"expr": query}]} for query in QUERIES]
    (tmp_path / "board.json").write_text(json.dumps({"panels": panels}))
    with (
        growing_page(ENGINE + BUILD) as url,
        running(binary, tmp_path, {"url": url, "pod": "p"}) as one,
    ):
        found = doctor("--prometheus", one.url, "--dashboard", str(tmp_path / "board.json"))
    named = {query: [code for code, _, text in found if f"<{query}>" in text] for query in QUERIES}
    assert named == QUERIES


def test_queries_without_an_answer(tmp_path: Path) -> None:
    """Where Prometheus does not answer, the catalogue judges the queries."""
    (tmp_path / "board.json").write_text('{"expr": "vllm:gpu_cache_usage_perc"}')
    url = f"http://127.0.0.1:{free_port()}"
    found = doctor("--prometheus", url, "--dashboard", str(tmp_path / "board.json"))
    assert [code for code, _, _ in found] == ["SD301", "SD421"]
