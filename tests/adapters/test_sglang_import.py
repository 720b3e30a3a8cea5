"""Without plugins SGLang's collectors are tapped as their module is imported, if that is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOK = ROOT / "adapters" / "sidestep.pth"
ON = {"SIDESTEP_SGLANG_IMPORT_HOOK": "1"}
ENDPOINT = {"SIDESTEP_ENDPOINT": "ipc:///nonexistent/x"}
COLLECTOR = '''
class SchedulerMetricsCollector:
    """As 0.5.4's."""

    def __init__(self, labels):
        from prometheus_client import Counter, Gauge

        self.labels = labels
        self.last_log_time = 0.0
        names = list(labels)
        self.num_running_reqs = Gauge("sglang:num_running_reqs", "Theirs.", names)
        self.num_bootstrap_failed_reqs = Counter(
            "sglang:num_bootstrap_failed_reqs_total", "Theirs.", names
        )

    def log_stats(self, stats):
        self.num_running_reqs.labels(**self.labels).set(stats.num_running_reqs)
'''
PROGRAM = """
    import site, sys
    site.addsitedir(sys.argv[1])
    before = {name.partition(".")[0] for name in sys.modules}
    from sglang.srt.managers.scheduler import SchedulerMetricsCollector, bases
    loaded = {name.partition(".")[0] for name in sys.modules}
    print(SchedulerMetricsCollector.__name__, bases)
    print(*sorted({"sidestep_adapters", "zmq", "msgspec", "prometheus_client"} & before) or ["-"])
    print(*sorted({"sidestep_adapters", "zmq", "msgspec", "prometheus_client"} & loaded) or ["-"])
"""
TAPPED = "SidestepSchedulerMetricsCollector ['SchedulerMetricsCollector']"
THEIRS = "SchedulerMetricsCollector ['object']"


@pytest.fixture(params=["metrics.collector", "observability.metrics_collector"])
def tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of packages with the hook and an SGLang laid out like 0.5.4's, and like later ones'."""
    package, _, module = str(request.param).rpartition(".")
    for folder in ("", "srt", f"srt/{package}", "srt/managers"):
        (tmp_path / "sglang" / folder).mkdir()
        (tmp_path / "sglang" / folder / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / package / f"{module}.py").write_text(COLLECTOR)
    (tmp_path / "sglang" / "srt" / "managers" / "scheduler.py").write_text(
        f"from sglang.srt.{request.param} import SchedulerMetricsCollector\n"
        "bases = [base.__name__ for base in SchedulerMetricsCollector.__bases__]\n"
    )
    (tmp_path / "sidestep.pth").write_text(HOOK.read_text())
    return tmp_path


def run(
    tree: Path, environment: Mapping[str, str], program: str = PROGRAM, *, ours: bool = True
) -> list[str]:
    """What ``program`` prints, line by line; ``ours``: with sidestep where it finds it."""
    paths = [str(ROOT / "exporter"), str(ROOT / "adapters")] if ours else []
    settings = {n: v for n, v in os.environ.items() if not n.startswith("SIDESTEP_")}
    settings["PYTHONPATH"] = os.pathsep.join([*paths, str(tree)])
    # Without the site's own packages nothing of ours can be there.
    isolated = [] if ours else ["-S"]
    done = subprocess.run(
        [sys.executable, *isolated, "-c", textwrap.dedent(program), str(tree)],
        capture_output=True,
        check=False,
        text=True,
        env={**settings, **environment},
    )
    assert done.returncode == 0, done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def test_collectors_are_tapped_when_it_is_asked_for(tree: Path) -> None:
    """Whoever imports the class gets ours; nothing of weight is imported before SGLang is."""
    found = run(tree, {**ENDPOINT, **ON})

    assert found == [TAPPED, "sidestep_adapters", "msgspec sidestep_adapters zmq"]


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_otherwise_nothing_is_imported(tree: Path, value: str) -> None:
    """Every interpreter of the environment runs this line."""
    environment = {"SIDESTEP_SGLANG_IMPORT_HOOK": value, **ENDPOINT}

    assert run(tree, environment) == [THEIRS, "-", "-"]


def test_without_an_endpoint_the_classes_are_sglangs(tree: Path) -> None:
    """Asked for, and nobody to tell."""
    assert run(tree, ON)[0] == THEIRS


def test_an_interpreter_starts_without_us(tree: Path) -> None:
    """Off it says nothing; on it is said that the package is missing, and SGLang goes on."""
    assert run(tree, {}, ours=False) == [THEIRS, "-", "-"]
    found = run(tree, ON, ours=False)
    assert found[:3] == [THEIRS, "-", "-"]
    assert any("sidestep_adapters" in line for line in found[3:])


BROKEN = """
    import sys
    from sidestep_adapters.sglang import import_hook as sglang_import
    from sidestep_adapters.sglang import plugin as sglang_plugin

    def broken(_):
        raise RuntimeError("a bug")

    sglang_plugin.replace_in = broken
    sglang_import.install()
    from sglang.srt.managers.scheduler import SchedulerMetricsCollector
    print(SchedulerMetricsCollector.__name__)
"""


def test_a_bug_of_ours_leaves_the_module_as_it_is(tree: Path) -> None:
    """The import succeeds, and it is said what went wrong."""
    found = run(tree, {}, BROKEN)

    assert found[0] == "SchedulerMetricsCollector"
    assert "RuntimeError: a bug" in found


COUNTING = """
    import types
    from sidestep_adapters.sglang import import_hook as sglang_import
    from sidestep_adapters.sglang import taps as sglang_taps
    from sidestep_adapters.sglang.collectors import Process

    sglang_import.install()
    sglang_import.install()
    from sglang.srt.managers.scheduler import SchedulerMetricsCollector
    process = sglang_taps._process = Process("ipc:///x", "pod", beside=False)
    process.start = lambda *_: None
    labels = {"model_name": "m", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0}
    collector = SchedulerMetricsCollector(labels=labels)
    collector.log_stats(types.SimpleNamespace(num_running_reqs=3, num_queue_reqs=0))
    collector.num_bootstrap_failed_reqs.labels(**labels).inc()
    for item in process.notes.items():
        print(type(item).__name__)
    import sys
    print(sum(type(finder).__name__ == "Finder" for finder in sys.meta_path))
    print(sglang_taps.tapped(SchedulerMetricsCollector, "scheduler") is SchedulerMetricsCollector)
"""


def test_what_is_tapped_so_counts(tree: Path) -> None:
    """An older release's numbers become items; a plugin loaded as well taps nothing twice."""
    found = run(tree, ENDPOINT, COUNTING)

    assert sorted(found) == ["1", "Samples", "SglangStats", "True"]


def test_the_wheel_brings_the_hook() -> None:
    """At its top, where interpreters look for it; one line, for only lines that import are run."""
    project = (ROOT / "pyproject.toml").read_text()
    (line,) = HOOK.read_text().splitlines()

    assert 'force-include = { "adapters/sidestep.pth" = "sidestep.pth" }' in project
    assert line.startswith("import os; ")
