"""The dashboards: structure, conventions, and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.boards import reasons
from tools.boards.__main__ import GRAFANA

from boards import (
    DASHBOARDS,
    dashboard,
    data_links,
    everything,
    families,
    filled,
    panels,
    queries,
    variables,
)
from promtool import assert_query, needs_promtool
from rulefiles import rules
from sidestep.engines.dialects import DIALECTS
from sidestep.telemetry.rows import BY_NAME
from trtllm_page import made_families

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
FAMILIES: dict[str, str] = {
    row.name: row.kind
    for dialect in DIALECTS.values()
    for row in dialect.rows
    if row.status != "hidden"
}
FAMILIES |= {name: row.kind for name, row in BY_NAME.items()}
FAMILIES |= {name: each.kind for name, each in made_families().items()}
FEATURES = {row.name: row.feature for dialect in DIALECTS.values() for row in dialect.rows}
COUNTERS = {name for name, kind in FAMILIES.items() if kind == "counter"} | {
    "process_cpu_seconds_total"
}
BY_UID = {board["uid"]: board for board in map(dashboard, DASHBOARDS)}
TARGET = ("cluster", "namespace", "pod", "job", "instance")

every_board = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


@every_board
def test_dashboards_can_be_imported_and_provisioned(path: Path) -> None:
    """A dashboard asks for nothing at import and has no data source but its variable's.

    It names the plugins that it needs, as grafana.com requires.
    """
    board = dashboard(path)
    text = path.read_text()

    needed = {(each["type"], each["id"]) for each in board["__requires"]}
    kinds = {panel["type"] for panel in everything(board)} - {"row"}
    assert (board["__inputs"], board["__elements"], board["id"]) == ([], {}, None)
    assert needed == {
        ("grafana", "grafana"),
        ("datasource", "prometheus"),
        *(("panel", kind) for kind in kinds),
    }
    assert all(each["name"] and "version" in each for each in board["__requires"])
    assert "dashboard" not in board
    assert board["editable"] is False
    assert board["uid"] == f"sidestep-{path.stem}"
    # The dashboard's own uid, and the data source variable everywhere else.
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {board["uid"], SOURCE["uid"]}
    assert text.count('"datasource": {') == text.count('"uid": "${datasource}"')
    assert "DS_" not in text


@pytest.mark.parametrize(
    ("file", "onward"),
    [
        ("fleet", {"vllm", "sglang", "why", "latency"}),
        ("vllm", {"latency"}),
        ("sglang", {"latency"}),
    ],
)
def test_drill_downs_lead_from_the_fleet_to_engines_and_latency(
    file: str, onward: set[str]
) -> None:
    """Links lead from the fleet to engines, and from both to latency: at the top, and on values."""
    board = dashboard(GRAFANA / f"{file}.json")
    top = {link["url"] for link in board["links"]}
    on_values = {link["url"].partition("?")[0] for _, link in data_links(board)}

    assert {f"/d/sidestep-{each}" for each in onward} <= top
    assert {f"/d/sidestep-{each}" for each in onward} == {
        url for url in on_values if url.startswith("/d/")
    }


@every_board
def test_drill_downs_keep_filters_and_time(path: Path) -> None:
    """Data links set only variables of their dashboard: from here, or from what was clicked."""
    board = dashboard(path)
    links = [(panel, link) for panel, link in data_links(board) if link["url"].startswith("/d/")]
    for panel, link in links:
        place, _, query = link["url"].partition("?")
        *params, time = query.split("&")
        kept = re.findall(r"\$\{(\w+):queryparam\}(?=&)", query)
        given = dict(re.findall(r"var-(\w+)=\$\{__([\w.]+):percentencode\}(?=&)", query))
        there = variables(BY_UID[place.removeprefix("/d/")])

        assert time == "${__url_time_range}"
        assert len({*kept, *given}) == len(params)
        assert {*kept, *given} <= there.keys()
        assert {*kept, *given} >= {"datasource", *TARGET, "model_name"}
        assert set(kept) <= variables(board).keys()
        for label, source in given.items():
            if panel["type"] == "table":
                columns = panel["transformations"][1]["options"]["renameByName"]
                assert source == f"data.fields.{columns[label]}"
            else:
                assert source == f"field.labels.{label}"
            for target in panel["targets"]:
                assert re.search(rf" by \([^()]*\b{label}\b", target["expr"]), (label, target)


@every_board
def test_variables_list_labels_of_sidesteps_series(path: Path) -> None:
    """Variables list the labels of sidestep's series only."""
    found = variables(dashboard(path))
    source = found.pop("datasource")

    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    assert tuple(found)[:5] == TARGET
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
            # ``job`` lists exporters only, so all is no pattern; labels of a target are never empty.
            every = {"job": None, "instance": ".+"}.get(name, ".*")
            assert variable.get("allValue") == every
        # Replace the pattern of prefixes by one of them.
        named = families(selector.replace("(vllm|sglang)", "vllm") + "[")
        assert named
        assert named <= FAMILIES.keys()


@every_board
def test_panels_are_described(path: Path) -> None:
    """A panel has a title, a description with its metrics, a unit, and a text for no data."""
    for panel in panels(dashboard(path)):
        asked = {name for target in panel["targets"] for name in families(target["expr"])}
        text, _, last = panel["description"].rpartition("\n\n")
        assert panel["title"]
        assert text.endswith("."), panel["title"]
        assert set(re.findall(r"`([^`]+)`", last)) == asked, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["noValue"].endswith("."), panel["title"]


@every_board
def test_a_text_names_the_tap_alone_where_nothing_else_sends_the_metrics(path: Path) -> None:
    """Requests' events come from the plugin in mode ``instead``, too."""
    for panel in panels(dashboard(path)):
        if panel["fieldConfig"]["defaults"]["noValue"] == reasons.TAP:
            asked = {name for target in panel["targets"] for name in families(target["expr"])}
            assert {FEATURES[name] for name in asked} == {"engine_core"}, panel["title"]


@every_board
def test_panels_without_a_time_axis_show_the_present(path: Path) -> None:
    """Over a range, Grafana takes the last value in it: that of an engine that left an hour ago."""
    for panel in panels(dashboard(path)):
        instant = panel["type"] not in ("timeseries", "heatmap", "state-timeline")
        asked = {(target["instant"], target["range"]) for target in panel["targets"]}
        assert asked == {(instant, not instant)}, panel["title"]


@every_board
def test_engines_of_one_exporter_are_apart(path: Path) -> None:
    """Two models on a host, and two replicas of a model, have equal values of ``engine``.

    Only the information on caches has no model.
    """
    for asked in queries(path):
        for by in re.findall(r" by \(([^()]*)\)", asked.expr):
            labels = {*by.split(", ")}
            if "engine" in labels and "vllm:cache_config_info" not in asked.expr:
                assert {"model_name", "origin"} <= labels, asked


@every_board
def test_rates_are_over_the_rate_interval(path: Path) -> None:
    """Rates use ``$__rate_interval``, which fits scrape interval and resolution."""
    for asked in queries(path):
        assert set(re.findall(r"\[[^\]]*\]", asked.expr)) <= {"[$__rate_interval]"}, asked


@every_board
def test_counters_are_rated_and_added_up(path: Path) -> None:
    """Counters are shown as rates, summed over series, or as increases."""
    for asked in queries(path):
        for name in COUNTERS & families(asked.expr):
            for found in re.finditer(rf"(?<![\w:]){name}(?=[{{\"|])", asked.expr):
                before = asked.expr[: found.start()]
                rated = re.search(
                    r"(?:sum|max)(?: (?:by|without) \([^()]*\))? \((?:rate|increase)\([^()]*$",
                    before,
                )
                assert rated, (name, asked)


@every_board
def test_repeated_values_count_once(path: Path) -> None:
    """Values that several series repeat, by rank or by priority, count once."""
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
    """Every selector has the target's variables, and every variable is used."""
    for asked in queries(path):
        selectors = re.findall(r"(\w*)\{([^{}]*)\}", asked.expr)
        assert selectors, asked
        for name, selector in selectors:
            # dcgm-exporter is a target of its own.
            for label in TARGET[:3] if name.startswith("DCGM") else TARGET:
                assert f'{label}=~"${label}"' in selector, asked
    named = variables(dashboard(path)).keys() | {"__rate_interval"}
    used = {name for asked in queries(path) for name in re.findall(r"\$(\w+)", asked.expr)}
    assert used - named == set()
    assert named - used - {"datasource"} == set()


@every_board
def test_series_of_one_target_name_their_pod(path: Path) -> None:
    """Queries by instance are by cluster, namespace and pod as well, and so are legends and columns."""
    places = {"cluster", "namespace", "pod"}
    for panel in panels(dashboard(path)):
        for target in panel["targets"]:
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            if panel["type"] == "table":
                shown |= set(panel["transformations"][1]["options"]["renameByName"])
            for group in re.findall(r" by \(([^()]*)\)", target["expr"]):
                if "instance" in (labels := set(group.split(", "))):
                    assert places <= labels, target["expr"]
                    assert places <= shown or "instance" not in shown, target["expr"]


@every_board
def test_panels_do_not_overlap(path: Path) -> None:
    """Panels have unique ids, do not overlap, and stay within the grid."""
    board = dashboard(path)
    for layout in (board["panels"], *(each.get("panels", ()) for each in board["panels"])):
        cells = [
            (x, y)
            for at in (panel["gridPos"] for panel in layout)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        ]
        assert len(cells) == len(set(cells))
        assert all(x < 24 for x, _ in cells)
    ids = [panel["id"] for panel in everything(board)]

    assert len(ids) == len(set(ids))


GPU = "DCGM_FI_DEV_GPU_UTIL"
UP = "sidestep_engine_up"


@needs_promtool
@pytest.mark.parametrize(
    ("series", "wanted"),
    [
        (
            {
                f'{GPU}{{job="dcgm",namespace="llm",pod="a",Hostname="n1",gpu="0"}}': "90+0x4",
                f'{GPU}{{job="dcgm",namespace="llm",pod="b",Hostname="n1",gpu="1"}}': "80+0x4",
                f'{GPU}{{job="dcgm",Hostname="n1",gpu="2"}}': "1+0x4",
                f'{UP}{{job="j",namespace="llm",pod="a",engine="0",model_name="m"}}': "1+0x4",
                f'{UP}{{job="j",namespace="llm",pod="a",engine="1",model_name="m"}}': "1+0x4",
            },
            {'{namespace="llm",pod="a",Hostname="n1",gpu="0"}': 90.0},
        ),
        (
            {
                f'{GPU}{{job="dcgm",Hostname="n1",gpu="0"}}': "90+0x4",
                f'{UP}{{job="j",instance="n1:9857",engine="0",model_name="m"}}': "1+0x4",
            },
            {'{Hostname="n1",gpu="0"}': 90.0},
        ),
        ({f'{UP}{{job="j",namespace="llm",pod="a",engine="0"}}': "1+0x4"}, {}),
    ],
    ids=["pods", "hosts", "no dcgm-exporter"],
)
def test_gpus_are_those_of_the_engines_pods(
    tmp_path: Path, series: dict[str, str], wanted: dict[str, float]
) -> None:
    """GPUs of pods with engines are shown, and all where neither GPUs nor engines have a pod."""
    (expr,) = (
        filled(asked.expr)
        for asked in queries(GRAFANA / "fleet.json")
        if asked.panel == "GPU utilization"
    )

    assert_query(tmp_path, series, expr, wanted)


@needs_promtool
def test_engines_without_the_bound_count_neither_way(tmp_path: Path) -> None:
    """An engine of another release, or with fewer buckets, makes the share of the others no smaller."""
    expr = next(
        filled(asked.expr)
        for asked in queries(GRAFANA / "latency.json")
        if asked.panel == "TTFT within $ttft s"
    )
    name = "vllm:time_to_first_token_seconds"
    series = {f'{name}_count{{engine="{engine}",model_name="m"}}': "0+10x10" for engine in "01"}
    for engine, bound in enumerate(("1.0", "2.5")):
        series[f'{name}_bucket{{engine="{engine}",model_name="m",le="{bound}"}}'] = "0+9x10"

    assert_query(tmp_path, series, expr, {"{}": 0.9})


def test_the_fleet_lists_its_alerts() -> None:
    """The alert list shows firing and pending alerts of engines, which the rules have."""
    (listed,) = (p for p in dashboard(GRAFANA / "fleet.json")["panels"] if p["type"] == "alertlist")
    options = listed["options"]
    shown = {state for state, chosen in options["stateFilter"].items() if chosen}
    alerts = {rule["alert"] for rule in rules("alerts.yaml") if "alert" in rule}

    assert shown == {"firing", "pending", "error"}
    assert {a for a in alerts if options["alertName"] in a} >= {"InferenceEngineStalled"}
    assert not options["dashboardAlerts"]
    assert listed["description"].endswith(".")


ENGINES = 'job="j",instance="i",pod="p",model_name="m"'
EVENTS = {
    "Engine restarted": (
        {
            f'sidestep_engine_restarts_total{{{ENGINES},engine="0"}}': "0x3 1x1",
            f'sidestep_engine_restarts_total{{{ENGINES},engine="1"}}': "0x9",
            # The exporter restarted without a state directory.
            f'sidestep_engine_restarts_total{{{ENGINES},engine="2"}}': "2x2 0x9",
        },
        '{instance="i",pod="p",model_name="m",engine="0"}',
        1.0,
    ),
    "Engine stalled": (
        # A stall between two steps of the query, which has ended.
        {f'sidestep_engine_stalled_seconds{{{ENGINES},engine="0",reason="step"}}': "_x1 7 stale"},
        '{instance="i",pod="p",model_name="m",engine="0",reason="step"}',
        7.0,
    ),
    "Counter reset": (
        {
            'sidestep_triton_resets_total{job="j",instance="i",model="m",version="1"}': "0x2 1x2",
            'sidestep_triton_resets_total{job="j",instance="i",model="m",version="2"}': "2x2 0x2",
        },
        '{model="m",version="1"}',
        1.0,
    ),
    "Exporter restarted": (
        {'process_start_time_seconds{job="j",instance="i"}': "100x2 500x2"},
        '{instance="i"}',
        1.0,
    ),
}
"""Series with an event in the last minute, and the event."""


@every_board
def test_annotations_mark_restarts_and_stalls(path: Path) -> None:
    """Every dashboard marks restarts, and those about engines stalls; texts name labels of the query."""
    found = {each["name"]: each for each in dashboard(path)["annotations"]["list"]}

    expected = {"triton": {"Counter reset"}, "sidestep": {"Exporter restarted"}}
    assert found.keys() == expected.get(path.stem, {"Engine restarted", "Engine stalled"})
    for each in found.values():
        (labels,) = re.findall(r" by \(([^()]*)\)", each["expr"])
        assert each["enable"]
        assert each["datasource"] == SOURCE
        assert each["titleFormat"] == each["name"]
        assert each["target"]["expr"] == each["expr"]
        assert set(re.findall(r"\{\{(\w+)\}\}", each["textFormat"])) == set(labels.split(", "))


@needs_promtool
@pytest.mark.parametrize(
    ("board", "title"),
    [
        ("fleet", "Engine restarted"),
        ("fleet", "Engine stalled"),
        ("triton", "Counter reset"),
        ("sidestep", "Exporter restarted"),
    ],
)
def test_annotations_have_a_sample_for_an_event(tmp_path: Path, board: str, title: str) -> None:
    """An annotation has a sample for what happened in the window, and none for other series."""
    (expr,) = (
        filled(asked.expr) for asked in queries(GRAFANA / f"{board}.json") if asked.panel == title
    )
    series, labels, value = EVENTS[title]

    assert_query(tmp_path, series, expr, {labels: value})


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
"""Increase per minute of each rank, by the value of the label that divides the family."""
DIVIDED = {
    "sglang:scheduler_stage_seconds_total": 'category="run_batch",forward_overlap',
    "sidestep_slo_requests_total": 'slo="queue",result',
}


@needs_promtool
@pytest.mark.parametrize(
    ("board", "title", "family", "expected"),
    [
        ("fleet", "Prefix-cache hit rate", "sglang:prefill_effective_tokens_total", {"m": 0.4}),
        ("kv-cache", "Prefix-cache hit rate, now", "sglang:prefill_effective_tokens_total", 0.4),
        ("sglang", "Prompt throughput", "sglang:realtime_tokens_total", 2 * 100 / 60),
        ("sglang", "Scheduler time by activity", "sglang:scheduler_stage_seconds_total", 45 / 60),
        ("latency", "Objectives met, by model", "sidestep_slo_requests_total", {"m": 0.9}),
        ("latency", "Objectives missed", "sidestep_slo_requests_total", {"m": 2 * 10 / 60}),
    ],
)
def test_ranks_count_once(
    tmp_path: Path, board: str, title: str, family: str, expected: float | dict[str, float]
) -> None:
    """Two replicas of two ranks: ranks count once, all other labels are summed."""
    (expr,) = (
        filled(asked.expr)
        for asked in queries(GRAFANA / f"{board}.json")
        if asked.panel == title and family in families(asked.expr)
    )
    label = DIVIDED.get(family, "mode")
    common = 'job="j",model_name="m",engine_type="unified",pp_rank="0"'
    series = {
        f'{family}{{{common},instance="{instance}",tp_rank="{rank}",{label}="{value}"}}': f"0+{count}x10"
        for instance in "ab"
        for rank in "01"
        for value, count in RATES[family].items()
    }
    values = expected if isinstance(expected, dict) else {"": expected}
    wanted = {f'{{model_name="{model}"}}' if model else "{}": n for model, n in values.items()}
    by_model = f"sum by (model_name) ({expr.replace('[1m]', '[5m]')})"

    assert_query(tmp_path, series, by_model, wanted, interval="1m", at="10m")
