"""`sidestep doctor --dashboard --rules`: queries that never have a result, and why."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path

import pytest
import yaml

from boards import DASHBOARDS
from command_line import sidestep
from ports import free_port
from rulefiles import RULE_FILES
from sidestep.catalog.page_reader import Samples, samples
from sidestep_tools.doctor.queries.files import Query
from sidestep_tools.doctor.queries.problems import problems
from sidestep_tools.doctor.queries.reasons import reason

DATA = Path(__file__).parents[1] / "data"
LEGACY = "vllm:gpu_cache_usage_perc"


def board(path: Path, *queries: str, **more: object) -> str:
    """Write a dashboard with a panel per query, named by its number; return its path."""
    panels = [
        {"title": f"panel {number}", "targets": [{"expr": query}]}
        for number, query in enumerate(queries)
    ]
    path.write_text(json.dumps({"panels": panels, **more}))
    return str(path)


def findings(*arguments: str) -> list[tuple[str, str]]:
    """Return code and text of all findings."""
    done = sidestep("doctor", "--json", *arguments)
    assert done.stderr == ""
    return [(each["code"], each["text"]) for each in json.loads(done.stdout)["findings"]]


def codes(query: str, there: Samples | None = None) -> list[str]:
    """Return the codes of a query's problems."""
    why = functools.partial(reason, there=there)
    return [problem.code.code for problem in problems(Query("", query), why)]


@pytest.fixture
def page(tmp_path: Path) -> str:
    """Return the file of a real vLLM's page."""
    path = tmp_path / "vllm.txt"
    path.write_bytes(gzip.decompress((DATA / "page_main.txt.gz").read_bytes()))
    return str(path)


OWN = [
    *(f"--dashboard={path}" for path in DASHBOARDS),
    *(f"--rules={path}" for path in RULE_FILES),
]
NAMES = {
    LEGACY: "SD421",
    "vllm:time_per_output_token_seconds_bucket": "SD421",
    "vllm:num_preemptions": "SD405",
    "vllm_num_requests_running": "SD405",
    "sglang_num_running_reqs": "SD405",
    "sglang:engine_startup_time": "SD405",
    "vllm:request_succes_total": "SD406",
    "sidestep_requests_running": "SD415",
    "sidestep_slo_requests_total": "SD415",
    "sidestep_tenant_requests_total": "SD415",
    "my:recorded:rate5m": "SD416",
    'vllm:num_requests_running{finished_reason="stop"}': "SD407",
    'vllm:time_to_first_token_seconds_sum{le="1"}': "SD407",
    "histogram_quantile(0.9, sum(rate(vllm:e2e_request_latency_seconds_bucket[5m])))": "SD409",
    "histogram_quantile(0.9, sum by (model_name) (rate(vllm:e2e_request_latency_seconds_bucket[5m])))": (
        "SD409"
    ),
    "histogram_quantile(0.9, rate(vllm:e2e_request_latency_seconds_sum[5m]))": "SD409",
    "sum(vllm:num_preemptions) or vector(0)": "SD417",
    "sum(vllm:num_requests_running": "SD403",
}


@pytest.mark.parametrize("query", NAMES)
def test_without_a_page(query: str) -> None:
    """The catalogue alone tells what is wrong with a name, a label or a function."""
    assert codes(query) == [NAMES[query]]


GOOD = (
    "vllm:num_requests_running",
    'vllm:request_success_total{finished_reason=~"stop|length",pod="a"}',
    "sum by (pod, finished_reason) (rate(vllm:request_success_total[5m]))",
    'vllm:num_requests_running{finished_reason=~".*",le=""} offset -5m',
    "vllm:num_preemptions or vllm:num_preemptions_total",
    "absent(vllm:num_preemptions)",
    "vllm:num_requests_running unless vllm:num_preemptions",
    "histogram_quantile(0.9, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[5m])))",
    "histogram_quantile(0.9, sum without (engine) (rate(vllm:e2e_request_latency_seconds_bucket[5m])))",
    "histogram_quantile(0.9, sum by (model_name) (rate(vllm:e2e_request_latency_seconds[5m])))",
    'sum by (x) (label_replace(vllm:num_requests_running, "x", "$1", "pod", "(.*)"))',
    "DCGM_FI_DEV_GPU_UTIL + on (pod) kube_pod_info",
    "avg(vllm:kv_cache_usage_perc)",
    "avg_over_time(vllm:kv_cache_usage_perc[1h])",
    "avg(rate(vllm:prompt_tokens_total[5m]) / 60)",
    "avg(rate(vllm:prompt_tokens_total[5m]) / rate(vllm:generation_tokens_total[5m]) > bool 2)",
    "sum(rate(vllm:prefix_cache_hits_total[5m])) / sum(rate(vllm:prefix_cache_queries_total[5m]))",
    "max(rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m]))",
    "rate(vllm:time_to_first_token_seconds_bucket[5m])",
    "sum by (le) (increase(vllm:time_to_first_token_seconds_bucket[5m]))",
    "avg without (engine) (rate(vllm:time_to_first_token_seconds_bucket[5m]))",
    'sum(rate(vllm:time_to_first_token_seconds_bucket{le="0.5"}[5m])) / sum(rate(vllm:time_to_first_token_seconds_count[5m]))',
    "count(vllm:time_to_first_token_seconds_bucket)",
    "avg(sum by (engine) (rate(vllm:prompt_tokens_total[5m]) * vllm:num_requests_running))",
    'up{job="vllm"}',
    "max_over_time(vllm:kv_cache_usage_perc[1h:5m] offset 1d @ end())",
)


@pytest.mark.parametrize("query", GOOD)
def test_good_queries(query: str) -> None:
    """Nothing is wrong with what may have a result."""
    assert codes(query) == []


ON_PAGE = {
    LEGACY: "SD405",
    "vllm:num_preemptions": "SD405",
    'vllm:request_success_total{finished_reason="stopped"}': "SD408",
    'vllm:num_requests_running{le="1"}': "SD407",
    "vllm:spec_decode_num_drafts_total": "SD410",
    "sidestep_engines": "SD414",
    "sidestep_requests_running": "SD410",
    "sglang:num_running_reqs": "SD411",
    "vllm:lora_requests_info": "SD412",
    "rate(vllm:time_to_first_token_seconds[5m])": "SD413",
    "DCGM_FI_DEV_GPU_UTIL": "SD414",
    '{__name__=~"vllm:foo.*"}': "SD412",
}


@pytest.mark.parametrize("query", ON_PAGE)
def test_on_a_page(query: str) -> None:
    """A page tells what is missing there."""
    page = gzip.decompress((DATA / "page_main.txt.gz").read_bytes()).decode()
    assert codes(query, samples(page)) == [ON_PAGE[query]]


def test_polled_engines_are_on_the_exporters_page() -> None:
    """A family of theirs that has no sample yet is of no other engine; one that is not exposed is not unknown."""
    there = samples(
        'sidestep_build_info{version="1"} 1\nllamacpp:n_decode_total{model_name="m"} 1\n'
    )
    by_position = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"

    assert codes(f"rate({by_position}[5m])", there) == ["SD412"]
    assert codes("trtllm_num_requests_running", there) == ["SD411"]
    assert codes("llamacpp:prompt_tokens_seconds") == []


def test_successors(tmp_path: Path, page: str) -> None:
    """Whatever has another name is shown with it, and all panels that use it."""
    given = board(
        tmp_path / "board.json",
        LEGACY,
        f"avg({LEGACY})",
        "sglang:num_running_reqs",
        '{__name__=~"none:.*"}',
    )
    found = findings("--dashboard", given, "--engine-page", page)
    assert found == [
        (
            "SD405",
            f"{LEGACY} -> vllm:kv_cache_usage_perc: its last release is 0.11 (panel 0, panel 1)",
        ),
        (
            "SD411",
            "sglang:num_running_reqs -> vllm:num_requests_running: nothing is of SGLang (panel 2)",
        ),
        ("SD412", '__name__=~"none:.*": no name is like it (panel 3)'),
    ]


def test_names_of_an_older_engine(tmp_path: Path) -> None:
    """A page of an older release has the former name."""
    (tmp_path / "page.txt").write_text(f'# TYPE {LEGACY} gauge\n{LEGACY}{{model_name="m"}} 0.5\n')
    given = board(tmp_path / "board.json", "vllm:kv_cache_usage_perc")
    found = findings("--dashboard", given, "--engine-page", str(tmp_path / "page.txt"))
    assert found == [
        ("SD405", f"vllm:kv_cache_usage_perc -> {LEGACY}: it has another name here (panel 0)")
    ]


def test_variables(tmp_path: Path, page: str) -> None:
    """A variable is never a fault, but the query that finds its values may be."""
    given = board(
        tmp_path / "board.json",
        'sum by ($by) (rate(vllm:prompt_tokens_total{model_name=~"$model", pod="[[pod]]"}[$window]))',
        "topk($n, vllm:${gauge}{engine='${engine:raw}'})",
        "$metric",
        "histogram_quantile($q / 100, rate(vllm:e2e_request_latency_seconds_bucket[${__rate_interval}]))",
        templating={
            "list": [
                {"name": "model", "type": "query", "query": {"query": "label_values(model_name)"}},
                {"name": "bad", "type": "query", "query": f"label_values({LEGACY}, pod)"},
            ]
        },
    )
    (found,) = findings("--dashboard", given, "--engine-page", page)
    assert found[1].endswith("(bad)")


def test_wrappers(tmp_path: Path) -> None:
    """Queries are found in ConfigMaps, API answers, nested rows, annotations, and objects."""
    inner = {"panels": [{"type": "row", "panels": [{"title": "a", "targets": [{"expr": LEGACY}]}]}]}
    inner["annotations"] = {"list": [{"name": "b", "expr": LEGACY}]}  # type: ignore[assignment]
    rules = {"groups": [{"name": "g", "rules": [{"alert": "c", "expr": LEGACY}]}]}
    loki = {"title": "x", "datasource": {"type": "loki"}, "targets": [{"expr": '{app="x"} |= "y"'}]}
    objects = [
        {"kind": "ConfigMap", "data": {"board.json": json.dumps(inner)}},
        {"dashboard": {"panels": [{"title": "d", "targets": [{"expr": LEGACY}]}, loki]}},
        {"kind": "PrometheusRule", "spec": rules},
        {
            "kind": "List",
            "items": [{"kind": "GrafanaDashboard", "spec": {"json": json.dumps(inner)}}],
        },
    ]
    path = tmp_path / "all.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    found = findings("--rules", str(path))
    assert [text[-12:] for _, text in found] == ["(a, b, d, c)"]


def test_recorded_names(tmp_path: Path) -> None:
    """A name that a given rule records is there."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "groups: [{name: a, rules: [{record: 'my:recorded:sum', expr: 'vllm:num_requests_running'}]}]"
    )
    given = board(tmp_path / "board.json", "my:recorded:sum", "other:recorded:sum")
    (found,) = findings("--dashboard", given, "--rules", str(rules))
    assert found == ("SD416", "other:recorded:sum: no rule records it (panel 1)")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Each is named with the reason."""
    (tmp_path / "chart.yaml").write_text("a: {{ include }}\nb: [")
    (tmp_path / "other.json").write_text('{"panels": []}')
    (tmp_path / "page.txt").write_text("<html>\n")
    nobody = f"http://127.0.0.1:{free_port()}/metrics"
    done = sidestep(
        "doctor", "--dashboard", "missing.json", "--dashboard", str(tmp_path / "chart.yaml"),
        "--rules", str(tmp_path / "other.json"), "--engine-page", str(tmp_path / "page.txt"),
        "--engine-page", nobody,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("SD")]
    assert [line.rpartition("/")[2] for line in lines] == [
        "metrics: cannot connect: Connection refused",
        "page.txt: <html> has no number where its value should be",
        "SD401 error: missing.json: No such file or directory",
        "chart.yaml: line 3: is not YAML: did not find expected node content",
        "other.json: it has no PromQL query",
    ]
    assert done.returncode == 2


def test_our_own_boards_and_rules() -> None:
    """Nothing is wrong with them but what --slo brings."""
    found = findings(*OWN)
    assert {code for code, _ in found} == {"SD415"}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("page_main", {"sglang", "triton"}),
        ("page_sglang", {"vllm", "triton"}),
        ("page_triton", {"vllm", "sglang", "kv-cache", "latency", "service", "tenants", "why"}),
    ],
)
def test_our_own_boards_on_a_page(name: str, others: set[str], tmp_path: Path) -> None:
    """On a page of one engine, only the boards of other engines are named; a missing option is no fault."""
    page = gzip.decompress((DATA / f"{name}.txt.gz").read_bytes())
    (tmp_path / "page.txt").write_bytes(page + b"sidestep_build_info 1\n")
    done = sidestep("doctor", "--json", *OWN, "--engine-page", tmp_path / "page.txt")
    found = {
        (each["code"], Path(each["subject"]).stem)
        for each in json.loads(done.stdout)["findings"]
        if each["severity"] != "info"
    }

    # No engine of the pages has a role.
    assert found - {("SD408", "service")} == {("SD411", board) for board in others}
