"""The dashboards: what a linter of dashboards would say, and that every metric in them exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools.boards.__main__ import BOARDS, GRAFANA, files

from boards import DASHBOARDS, dashboard, families, filled, panels, queries, variables
from exporters import page_of_engine
from pages import parse
from sidestep.catalog.buckets import DEFAULTS
from sidestep.engines.dialects import DIALECTS
from sidestep.telemetry.rows import BY_NAME

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
FAMILIES = {
    row.name: row.kind
    for dialect in DIALECTS.values()
    for row in dialect.rows
    if row.status != "hidden"
} | {name: row.kind for name, row in BY_NAME.items()}
OTHERS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Of Prometheus, and of the exporter's process."""
COUNTERS = {name for name, kind in FAMILIES.items() if kind == "counter"} | {
    "process_cpu_seconds_total"
}
SUCCESSORS = {
    "E2E request latency": {"vllm:e2e_request_latency_seconds"},
    "token throughput": {"vllm:prompt_tokens_total", "vllm:generation_tokens_total"},
    "inter-token latency": {"vllm:inter_token_latency_seconds"},
    "time per output token": {"vllm:request_time_per_output_token_seconds"},
    "scheduler state": {"vllm:num_requests_running", "vllm:num_requests_waiting"},
    "time to first token": {"vllm:time_to_first_token_seconds"},
    "cache utilisation": {"vllm:kv_cache_usage_perc"},
    "request prompt length": {"vllm:request_prompt_tokens"},
    "request generation length": {"vllm:request_generation_tokens"},
    "finish reason": {"vllm:request_success_total"},
    "queue time": {"vllm:request_queue_time_seconds"},
    "prefill and decode time": {
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
    },
    "longest generation": {"vllm:request_max_num_generation_tokens"},
}
"""What each panel of vLLM's own reference board is about."""

every_board = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def test_the_dashboards_are_those_of_the_boards() -> None:
    """Files are what ``make docs`` makes, and there is no other."""
    assert {path.name: path.read_text() for path in DASHBOARDS} == files()


def test_a_stale_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that differs, one that is missing and one of no board."""
    from tools.boards import __main__ as command  # noqa: PLC0415

    for path in DASHBOARDS:
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "fleet.json").write_text("{}")
    (tmp_path / "vllm.json").unlink()
    (tmp_path / "old.json").write_text("{}")
    monkeypatch.setattr(command, "GRAFANA", tmp_path)
    monkeypatch.setattr("sys.argv", ["boards", "--check"])

    assert command.main() == 1
    said = capsys.readouterr().err
    assert re.findall(r"grafana/(\w+).json", said) == ["old", "fleet", "vllm"]


def test_names_are_unique() -> None:
    """Of dashboards; and each has a place of its own in Grafana."""
    boards = [dashboard(path) for path in DASHBOARDS]

    assert len({board["uid"] for board in boards}) == len(boards) == len(BOARDS)
    assert len({board["title"] for board in boards}) == len(boards)
    assert all(len(board["uid"]) <= 40 for board in boards)


@every_board
def test_it_can_be_imported_by_file_and_provisioned(path: Path) -> None:
    """No inputs to fill in, no number of another Grafana, nobody's data source."""
    board = dashboard(path)
    text = path.read_text()

    assert not board.keys() & {"__inputs", "__requires", "id", "dashboard"}
    assert board["editable"] is False
    assert board["uid"] == f"sidestep-{path.stem}"
    # The dashboard's own, and that of its data source wherever one is asked for.
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {board["uid"], SOURCE["uid"]}
    assert text.count('"datasource": {') == text.count('"uid": "${datasource}"')
    assert "DS_" not in text


@every_board
def test_dashboards_lead_to_each_other(path: Path) -> None:
    """By tag, with the time and what is chosen."""
    board = dashboard(path)
    (link,) = board["links"]

    assert link["type"] == "dashboards"
    assert link["includeVars"]
    assert link["keepTime"]
    assert link["tags"] == ["sidestep"]
    assert "sidestep" in board["tags"]


@every_board
def test_variables_choose_among_our_series(path: Path) -> None:
    """A data source, job and instance; no label of another exporter's series is offered."""
    found = variables(dashboard(path))
    source = found.pop("datasource")

    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert {"job", "instance"} <= found.keys()
    for name, variable in found.items():
        asked = variable["query"]["query"]
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", asked, re.DOTALL).groups()  # type: ignore[union-attr]
        assert variable["datasource"] == SOURCE
        assert variable["label"]
        assert variable["refresh"] == 2
        if name in ("ttft", "itl", "e2e"):
            assert label == "le"
            assert not variable["multi"]
        else:
            assert label == name
            assert variable["multi"]
            assert variable["includeAll"]
            # Of all jobs there are, those of exporters; what a target always has is never empty.
            every = {"job": None, "instance": ".+"}.get(name, ".*")
            assert variable.get("allValue") == every
        # A pattern over prefixes names no family by itself.
        named = families(selector.replace("(vllm|sglang)", "vllm") + "[")
        assert named
        assert named <= FAMILIES.keys()


def test_bounds_to_begin_with_are_buckets_of_both_engines() -> None:
    """As they are written on the page; any other would leave panels empty."""
    found = variables(dashboard(GRAFANA / "latency.json"))
    buckets = {row.name: row.buckets for dialect in DIALECTS.values() for row in dialect.rows}

    for name in ("ttft", "itl", "e2e"):
        bound = found[name]["current"]["value"]
        (family,) = re.findall(r":(\w+)_bucket", found[name]["query"]["query"])
        assert bound == str(float(bound))
        for dialect in ("vllm", "sglang"):
            assert float(bound) in DEFAULTS[buckets[f"{dialect}:{family}"]]


@every_board
def test_panels_say_what_they_show(path: Path) -> None:
    """A title, what the numbers mean, the metrics' names, a unit, and why there may be nothing."""
    for panel in panels(dashboard(path)):
        asked = {name for target in panel["targets"] for name in families(target["expr"])}
        text, _, last = panel["description"].rpartition("\n\n")
        assert panel["title"]
        assert text.endswith("."), panel["title"]
        assert set(re.findall(r"`([^`]+)`", last)) == asked, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"].endswith("."), panel["title"]


@every_board
def test_panels_ask_the_chosen_source(path: Path) -> None:
    """Panels and their targets."""
    for panel in panels(dashboard(path)):
        assert panel["datasource"] == SOURCE
        assert {json.dumps(target["datasource"]) for target in panel["targets"]} == {
            json.dumps(SOURCE)
        }
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters)) > 0


@every_board
def test_units_are_those_of_the_names(path: Path) -> None:
    """What a name says to be seconds, bytes or a share is shown as such."""
    base = {
        "seconds": {"s"},
        "bytes": {"bytes", "Bps"},
        "ratio": {"percentunit"},
        "perc": {"percentunit"},
    }
    for panel in panels(dashboard(path)):
        if panel["type"] not in ("timeseries", "heatmap", "stat"):
            continue
        exprs = [target["expr"] for target in panel["targets"]]
        if any(re.search(r"count|/|_total|== bool|_count\b", expr) for expr in exprs):
            continue
        for expr in exprs:
            for name in families(expr):
                expected = base.get(name.rpartition("_")[2], set())
                unit = panel["fieldConfig"]["defaults"]["unit"]
                assert not expected or unit in expected, (panel["title"], name, unit)


@every_board
def test_every_metric_is_in_the_catalogue(path: Path) -> None:
    """Or is what Triton's own page has beside statistics."""
    known = FAMILIES.keys() | OTHERS | parse(page_of_engine("page_triton")).keys()

    assert {name for asked in queries(path) for name in families(asked.expr)} - known == set()


@every_board
def test_rates_are_over_the_rate_interval(path: Path) -> None:
    """No fixed window: it would miss scrapes, or average over much more than is shown."""
    for asked in queries(path):
        assert set(re.findall(r"\[[^\]]*\]", asked.expr)) <= {"[$__rate_interval]"}, asked


@every_board
def test_counters_are_rated_and_added_up(path: Path) -> None:
    """None is shown as it is, none is rated without a sum: one line for each series is no panel."""
    for asked in queries(path):
        for name in COUNTERS & families(asked.expr):
            for found in re.finditer(rf"(?<![\w:]){name}(?=[{{\"|])", asked.expr):
                before = asked.expr[: found.start()]
                rated = re.search(
                    r"(?:sum|max)(?: (?:by|without) \([^()]*\))? \(rate\([^()]*$", before
                )
                assert rated, (name, asked)


@every_board
def test_what_several_series_tell_counts_once(path: Path) -> None:
    """Ranks of a replica that tell the same, and all requests beside those of each priority."""
    rows = [row for row in DIALECTS["sglang"].rows if row.kind != "histogram"]
    for asked in queries(path):
        for row in rows:
            for found in re.finditer(rf"(?<![\w:]){row.name}(?=[{{|\"])", asked.expr):
                before, after = asked.expr[: found.start()], asked.expr[found.start() :]
                selector = after.partition("}")[0]
                if "priority" in row.labels and row.kind == "gauge":
                    assert 'priority=""' in selector, asked
                if row.mirrored:
                    one = re.search(
                        r"(?:max|avg)(?: (?:by|without) \([^()]*\))? \((?:rate\()?[^()]*$", before
                    )
                    assert one or 'tp_rank="0"' in selector, asked


@every_board
def test_queries_are_filtered(path: Path) -> None:
    """Every selector has what the variables choose of a target."""
    for asked in queries(path):
        selectors = re.findall(r"\{([^{}]*)\}", asked.expr)
        assert selectors, asked
        for selector in selectors:
            assert 'job=~"$job"' in selector, asked
            assert 'instance=~"$instance"' in selector, asked
    named = variables(dashboard(path)).keys() | {"__rate_interval"}
    used = {name for asked in queries(path) for name in re.findall(r"\$(\w+)", asked.expr)}
    assert used - named == set()
    assert named - used - {"datasource"} == set()


@every_board
def test_panels_have_their_own_place(path: Path) -> None:
    """Ids are unique, no two panels overlap, and none is beyond the edge."""
    taken: set[tuple[int, int]] = set()
    everything = dashboard(path)["panels"]
    for panel in everything:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
    ids = [panel["id"] for panel in everything]

    assert len(ids) == len(set(ids))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@every_board
def test_every_query_parses(path: Path, tmp_path: Path) -> None:
    """As Prometheus reads it."""
    rules = [
        {"record": f"q{number}", "expr": filled(asked.expr)}
        for number, asked in enumerate(queries(path))
    ]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [str(shutil.which("promtool")), "check", "rules", file],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout


RATES = {
    "sglang:prefill_effective_tokens_total": {
        "input": 60,
        "device_hit": 20,
        "host_hit": 15,
        "storage_hit": 5,
    },
    "sglang:realtime_tokens_total": {"prefill_compute": 60, "prefill_cache": 40, "decode": 20},
    "sglang:scheduler_stage_seconds_total": {"true": 30, "false": 15},
    "sidestep_slo_requests_total": {"good": 90, "bad": 10},
}
"""What each rank of a replica counts in a minute, by the value of the label that divides it."""
DIVIDED = {
    "sglang:scheduler_stage_seconds_total": 'category="run_batch",forward_overlap',
    "sidestep_slo_requests_total": 'slo="queue",result',
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("board", "title", "family", "expected"),
    [
        ("fleet", "Prefix cache hits", "sglang:prefill_effective_tokens_total", {"m": 0.4}),
        ("kv-cache", "Found in the prefix cache", "sglang:prefill_effective_tokens_total", 0.4),
        ("sglang", "Prompt tokens", "sglang:realtime_tokens_total", 2 * 100 / 60),
        ("sglang", "What the scheduler does", "sglang:scheduler_stage_seconds_total", 45 / 60),
        ("latency", "Objectives met, by model", "sidestep_slo_requests_total", {"m": 0.9}),
        ("latency", "Objectives missed", "sidestep_slo_requests_total", {"m": 2 * 10 / 60}),
    ],
)
def test_ranks_count_once_and_all_else_adds_up(
    tmp_path: Path, board: str, title: str, family: str, expected: float | dict[str, float]
) -> None:
    """Two replicas of two ranks, asked by Prometheus: what a family is divided by is no rank."""
    (expr,) = (
        filled(asked.expr)
        for asked in queries(GRAFANA / f"{board}.json")
        if asked.panel == title and family in families(asked.expr)
    )
    label = DIVIDED.get(family, "mode")
    common = 'job="j",model_name="m",engine_type="unified",pp_rank="0"'
    series = [
        {
            "series": f'{family}{{{common},instance="{instance}",tp_rank="{rank}",{label}="{value}"}}',
            "values": f"0+{count}x10",
        }
        for instance in "ab"
        for rank in "01"
        for value, count in RATES[family].items()
    ]
    values = expected if isinstance(expected, dict) else {"": expected}
    tests = [
        {
            "interval": "1m",
            "input_series": series,
            "promql_expr_test": [
                # promtool compares digits, so both sides are rounded.
                {
                    "expr": f"sum by (model_name) (round({expr.replace('[1m]', '[5m]')}, 0.0001))",
                    "eval_time": "10m",
                    "exp_samples": [
                        {
                            "labels": f'{{model_name="{model}"}}' if model else "{}",
                            "value": round(value, 4),
                        }
                        for model, value in values.items()
                    ],
                }
            ],
        }
    ]
    file = tmp_path / "test.json"
    file.write_text(json.dumps({"rule_files": [], "tests": tests}))
    done = subprocess.run(
        [str(shutil.which("promtool")), "test", "rules", file],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("what", SUCCESSORS)
def test_panels_of_the_reference_board_have_successors(what: str) -> None:
    """On the dashboard of a vLLM engine, in one panel."""
    shown: list[dict[str, Any]] = panels(dashboard(GRAFANA / "vllm.json"))

    assert any(
        SUCCESSORS[what] <= {n for target in panel["targets"] for n in families(target["expr"])}
        for panel in shown
    )


@pytest.mark.parametrize("name", ["latency", "kv-cache", "vllm", "sglang"])
def test_latencies_and_lives_have_heatmaps(name: str) -> None:
    """A quantile does not say where all the others are."""
    kinds = {panel["type"] for panel in panels(dashboard(GRAFANA / f"{name}.json"))}

    assert "heatmap" in kinds
