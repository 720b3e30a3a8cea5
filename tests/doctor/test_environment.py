"""`sidestep doctor --environment`: packages, variables and processes of engines."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from command_line import sidestep
from engine_environments import SCRIPT, EngineEnvironment
from exporters import Start
from sidestep.diagnosis.finding import Finding
from sidestep_tools.doctor.environment import packages
from sidestep_tools.doctor.environment.check import check_own, check_process
from sidestep_tools.doctor.environment.packages import ENGINES

TAP = "sidestep_adapters.vllm.scheduler.SidestepScheduler"
NO_EXPORTER = {"SIDESTEP_ENDPOINT": "ipc:///nowhere/ingest.ipc", "SIDESTEP_VLLM_MODE": "instead"}
NOTHING = {"SD161"}
"""The only code where no exporter runs."""
SYSTEM = [
    str(path)
    for place in ("/usr", "/usr/local")
    for path in Path(place).glob("lib/python3*/*-packages")
]


def codes(findings: list[Finding]) -> set[str]:
    """Return the codes of findings."""
    return {each.code for each in findings}


def own(*arguments: str, **environ: str) -> set[str]:
    """Return the codes of this process's environment and variables; engines of others are left out."""
    done = sidestep("doctor", "--environment", "--json", *arguments, **environ)
    assert done.stderr == ""
    found = json.loads(done.stdout)["findings"]
    return {each["code"] for each in found if not each["subject"].startswith("process ")}


async def test_a_good_engine(start: Start, tmp_path: Path) -> None:
    """Nothing is wrong with a plugin, or a tap, that reaches its exporter."""
    made = EngineEnvironment(tmp_path)
    async with start() as exporter:
        given = {"SIDESTEP_ENDPOINT": exporter.endpoints[0], "SIDESTEP_VLLM_MODE": "instead"}
        with made.vllm(**given) as process:
            assert list(check_process(process)) == []
        with made.vllm("--scheduler-cls", TAP, "--shutdown-timeout=30", **given) as process:
            assert list(check_process(process)) == []
        made.install("sglang", "0.5.23")
        given["SIDESTEP_SGLANG_MODE"] = "instead"
        with made.sglang("--enable-metrics", **given) as process:
            assert list(check_process(process)) == []


@pytest.mark.parametrize(
    ("versions", "code"),
    [
        ({"vllm": "0.32.0"}, "SD001"),
        ({"vllm": "0.11.0", "sidestep": "0.1.0"}, "SD004"),
        ({"sglang": "0.5.10.post1", "sidestep": "0.1.0"}, "SD004"),
        ({"vllm": "0.34.0rc1", "sidestep": "0.1.0"}, "SD005"),
        ({"sglang": "0.6.0", "sidestep": "0.1.0"}, "SD005"),
        ({"torch": "2.14.1"}, "SD006"),
    ],
)
def test_packages(versions: dict[str, str], code: str, tmp_path: Path) -> None:
    """Each fault has its code, and nothing else is found."""
    made = EngineEnvironment(tmp_path, **versions)
    assert [each.code for each in packages.check(made.packages)] == [code]


@pytest.mark.parametrize("version", ["0.11.1", "0.33.1", "0.33.0+cu129", "0.1.dev9+g1a2b3c"])
def test_supported_releases(version: str, tmp_path: Path) -> None:
    """Builds from a checkout have versions that say nothing."""
    made = EngineEnvironment(tmp_path, vllm=version, sidestep="0.1.0")
    assert list(packages.check(made.packages)) == []


def test_the_documents_name_the_supported_releases() -> None:
    """README.md has the range that the check has."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for engine in ENGINES:
        first, last = (".".join(map(str, version)) for version in (engine.first, engine.last))
        assert f"{engine.title} {first} to {last}" in readme


def test_sources_without_metadata(tmp_path: Path) -> None:
    """A checkout on PYTHONPATH can be imported, but names no plugin."""
    made = EngineEnvironment(tmp_path, vllm="0.32.0")
    (made.site / "sidestep_adapters").mkdir()
    assert codes(list(packages.check(made.packages))) == {"SD002"}


def test_a_release_without_the_plugin(tmp_path: Path) -> None:
    """Its metadata have other entry points only."""
    made = EngineEnvironment(tmp_path, vllm="0.32.0")
    made.install("sidestep", "0.0.1", "[console_scripts]\nsidestep = sidestep.cli:main\n")
    assert codes(list(packages.check(made.packages))) == {"SD002"}


def test_packages_of_the_running_engine(tmp_path: Path) -> None:
    """The process's own environment and PYTHONPATH count, not those of this command."""
    made = EngineEnvironment(tmp_path, vllm="0.32.0")
    elsewhere = EngineEnvironment(tmp_path / "plugin", sidestep="0.1.0")
    with made.vllm(**NO_EXPORTER) as process:
        assert codes(list(check_process(process))) == NOTHING | {"SD001"}
    with made.vllm(**NO_EXPORTER, PYTHONPATH=str(elsewhere.site)) as process:
        assert codes(list(check_process(process))) == NOTHING


def test_how_a_command_line_names_python(tmp_path: Path) -> None:
    """By a path from its directory, or by a name that PATH has."""
    made = EngineEnvironment(tmp_path)
    made.python = "bin/python"
    with made.vllm(**NO_EXPORTER) as process:
        assert process.packages.path == [str(made.site)]
    made.python = "python"
    with made.vllm(**NO_EXPORTER, PATH=str(made.root / "bin")) as process:
        assert process.packages.path == [str(made.site)]


@pytest.mark.skipif(not SYSTEM, reason="the system's Python has no packages")
def test_packages_of_the_system(tmp_path: Path) -> None:
    """The system's Python has two places for them; an environment may add them to its own."""
    made = EngineEnvironment(tmp_path)
    with (made.root / "pyvenv.cfg").open("a") as config:
        config.write("include-system-site-packages = true\n")
    with made.vllm(**NO_EXPORTER) as process:
        assert process.packages.path == [str(made.site), *SYSTEM]
    made.python = "/usr/bin/python3"
    with made.vllm(**NO_EXPORTER) as process:
        assert process.packages.path == SYSTEM


@pytest.mark.parametrize(
    ("options", "environ", "code"),
    [
        ((), {"SIDESTEP_ENDPOINT": ""}, "SD010"),
        ((), {"SIDESTEP_ENDPOINT": "ipc://run/ingest.ipc"}, "SD160"),
        ((), {"SIDESTEP_VLLM_MODE": "Instead"}, "SD011"),
        ((), {"SIDESTEP_STACKS": "no"}, "SD011"),
        ((), {"SIDESTEP_VLLM_MODE": ""}, "SD012"),
        ((), {"SIDESTEP_NAMSPACE": "pod-1"}, "SD013"),
        ((), {"VLLM_PLUGINS": "lora_resolver"}, "SD003"),
        ((), {"VLLM_PLUGINS": ""}, "SD003"),
        ((), {"VLLM_PLUGINS": "lora_resolver, sidestep"}, "SD003"),
        (("--scheduler-cls", "sidestep_adapters.vllm.Scheduler"), {}, "SD021"),
        (("--scheduler_cls=sidestep.SidestepScheduler",), {}, "SD021"),
        ((), {"VLLM_USE_RUST_FRONTEND": "1"}, "SD023"),
        (("--disable-log-stats",), {}, "SD024"),
        (("--api-server-count", "4"), {}, "SD025"),
        (("--data-parallel-size=2",), {}, "SD025"),
        (("--scheduler-cls", TAP), {}, "SD025"),
    ],
)
def test_vllm(options: tuple[str, ...], environ: dict[str, str], code: str, tmp_path: Path) -> None:
    """Each fault of a server that runs has its code."""
    with EngineEnvironment(tmp_path).vllm(*options, **{**NO_EXPORTER, **environ}) as process:
        found = codes(list(check_process(process))) - NOTHING
    expected = {code, "SD012"} if environ.get("SIDESTEP_VLLM_MODE") == "Instead" else {code}
    assert found == expected


@pytest.mark.parametrize(
    ("options", "environ", "code"),
    [
        ((), {}, "SD022"),
        (("--enable-metrics", "--tokenizer-worker-num", "4"), {}, "SD026"),
        (("--enable-metrics",), {"SIDESTEP_SGLANG_MODE": "beside"}, "SD012"),
        (("--enable-metrics",), {"SGLANG_PLUGINS": "other"}, "SD003"),
    ],
)
def test_sglang(
    options: tuple[str, ...], environ: dict[str, str], code: str, tmp_path: Path
) -> None:
    """Each fault of a server that runs has its code."""
    made = EngineEnvironment(tmp_path, sglang="0.5.23", sidestep="0.1.0")
    given = {**NO_EXPORTER, "SIDESTEP_SGLANG_MODE": "instead", **environ}
    with made.sglang(*options, **given) as process:
        assert codes(list(check_process(process))) - NOTHING == {code}


def test_lists_that_allow_the_plugin(tmp_path: Path) -> None:
    """SGLang takes an empty list for none; with the tap the plugin is not needed."""
    made = EngineEnvironment(tmp_path)
    tapped = ("--scheduler-cls", TAP, "--shutdown-timeout", "30")
    with made.vllm(*tapped, **NO_EXPORTER, VLLM_PLUGINS="") as process:
        assert codes(list(check_process(process))) == NOTHING
    made.install("sglang", "0.5.23")
    given = {**NO_EXPORTER, "SIDESTEP_SGLANG_MODE": "instead", "SGLANG_PLUGINS": ""}
    with made.sglang("--enable-metrics", **given) as process:
        assert codes(list(check_process(process))) == NOTHING


def test_options_in_a_file(tmp_path: Path) -> None:
    """Both engines read further options from the file of --config."""
    made, config = EngineEnvironment(tmp_path), tmp_path / "config.yaml"
    config.write_text(f"scheduler-cls: {TAP}\nshutdown_timeout: 30\n")
    with made.vllm("--config", str(config), **NO_EXPORTER, VLLM_PLUGINS="") as process:
        assert codes(list(check_process(process))) == NOTHING
    made.install("sglang", "0.5.23")
    given = {**NO_EXPORTER, "SIDESTEP_SGLANG_MODE": "instead"}
    for text, found in (("enable-metrics: true", set()), ("enable-metrics: false", {"SD022"})):
        config.write_text(f"{text}\n")
        with made.sglang("--config", str(config), **given) as process:
            assert codes(list(check_process(process))) == NOTHING | found
    with made.sglang("--config", "/nowhere/config.yaml", **given) as process:
        assert codes(list(check_process(process))) == NOTHING


def test_variables_that_cannot_be_read(tmp_path: Path) -> None:
    """The command line is checked all the same."""
    with EngineEnvironment(tmp_path).vllm("--api-server-count", "2", **NO_EXPORTER) as process:
        found = list(check_process(process._replace(environ=None)))
    assert [each.code for each in found] == ["SD020", "SD025"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of other users")
def test_an_engine_of_another_user() -> None:
    """What it may not do is found by its user and groups, not by those of this command."""
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        made, directory = EngineEnvironment(Path(root)), Path(root) / "closed"
        directory.mkdir(mode=0o700)
        given = {**NO_EXPORTER, "SIDESTEP_ENDPOINT": f"ipc://{directory}/ingest.ipc"}
        vllm = (str(made.root / "bin" / "vllm"), "serve", "MODEL")
        with made.running(*vllm, user=65534, **given) as process:
            assert codes(list(check_process(process))) == {"SD162"}


def test_command_lines_that_start_no_server(tmp_path: Path) -> None:
    """Clients, shells and wrappers are no engines."""
    made = EngineEnvironment(tmp_path)
    for arguments in (("-c", SCRIPT, "vllm", "serve"), (str(made.root / "bin" / "vllm"), "bench")):
        with (
            pytest.raises(AssertionError, match="not taken for an engine"),
            made.running(*arguments),
        ):
            pass


def test_a_running_engine_as_a_command(tmp_path: Path) -> None:
    """Its variables count; those of the shell beside it only if they are others."""

    def subjects(**environ: str) -> list[str]:
        done = sidestep("doctor", "--environment", "--json", **environ)
        found = json.loads(done.stdout)["findings"]
        return [each["subject"] for each in found if each["code"] == "SD011"]

    given = {**NO_EXPORTER, "SIDESTEP_STACKS": "no"}
    with EngineEnvironment(tmp_path).vllm(**given, SIDESTEP_SHUTDOWN_LINGER="0") as process:
        own = f"process {process.pid} (vLLM)"
        assert subjects() == [own]
        assert subjects(**given) == [own]
        assert sorted(subjects(**{**given, "SIDESTEP_STACKS": "yes"})) == [own, "this environment"]


def test_this_environment() -> None:
    """Where no engine runs, the variables of this process count."""
    assert "SD160" in own(SIDESTEP_ENDPOINT="/run/ingest.ipc")
    assert "SD011" in own(SIDESTEP_VLLM_MODE="x")


def test_where_no_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started here would have neither an engine nor an endpoint."""
    monkeypatch.delenv("SIDESTEP_ENDPOINT", raising=False)
    assert codes(list(check_own(is_alone=True))) == {"SD006", "SD010"}
    assert codes(list(check_own(is_alone=False))) == set()


def test_this_environments_packages(tmp_path: Path) -> None:
    """The command runs in the engine's environment."""
    made = EngineEnvironment(tmp_path, vllm="0.32.0")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(made.site)])
    assert "SD003" in own(PYTHONPATH=path, VLLM_PLUGINS="other")
    assert "SD012" in own(PYTHONPATH=path, SIDESTEP_ENDPOINT="ipc:///nowhere/x")
