"""`sidestep doctor --environment`: packages and variables; and options of engines' command lines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from command_line import sidestep
from sidestep_tools.doctor.checks import run
from sidestep_tools.doctor.environment import (
    ALLOWED,
    ENGINES,
    MODE,
    OPTIONS,
    PACKAGES,
    SGLANG,
    TAP,
    VLLM,
    InstalledEngine,
    Start,
    parse_options,
)

PLUGIN = """\
[vllm.stat_logger_plugins]
sidestep = sidestep_adapters.vllm.plugin:SidestepStatLogger

[sglang.srt.plugins]
sidestep = sidestep_adapters.sglang.plugin:plugin
"""


def install(site: Path, name: str, version: str, entry_points: str = PLUGIN) -> Path:
    """Add the metadata of a package to a directory of packages, and return the directory."""
    metadata = site / f"{name}-{version}.dist-info"
    metadata.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if name == "sidestep":
        (metadata / "entry_points.txt").write_text(entry_points)
    (metadata / "METADATA").write_text(text)
    return site


def of_packages(site: Path, **versions: str) -> list[str]:
    """Return the codes of an environment that has the metadata of these packages as well."""
    for name, version in versions.items():
        install(site, name, version)
    return [each.code for each in run(PACKAGES, [str(site)], "")]


def of_start(engine: InstalledEngine, options: tuple[str, ...], **environ: str) -> set[str]:
    """Return the codes of an engine that is started with options and variables."""
    modes = {each.mode: "instead" for each in ENGINES}
    given = {"SIDESTEP_ENDPOINT": "ipc:///nowhere", **modes, **environ}
    start = Start(engine, given, parse_options(options))
    return {each.code for each in run((*ALLOWED, *MODE, *OPTIONS), start, "")}


def command(**environ: str) -> dict[str, str]:
    """Run the command, and return the severities of its findings by their codes."""
    done = sidestep("doctor", "--environment", "--json", **environ)
    assert done.stderr == ""
    return {each["code"]: each["severity"] for each in json.loads(done.stdout)["findings"]}


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
    assert of_packages(tmp_path, **versions) == [code]


@pytest.mark.parametrize("version", ["0.11.1", "0.33.1", "0.33.0+cu129", "0.1.dev9+g1a2b3c"])
def test_supported_releases(version: str, tmp_path: Path) -> None:
    """Builds from a checkout have versions that say nothing."""
    assert of_packages(tmp_path, vllm=version, sidestep="0.1.0") == []


def test_the_documents_name_the_supported_releases() -> None:
    """README.md has the range that the check has."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for engine in ENGINES:
        first, last = (".".join(map(str, version)) for version in (engine.first, engine.last))
        assert f"{engine.title} {first} to {last}" in readme


def test_a_release_without_the_plugin(tmp_path: Path) -> None:
    """Its metadata have other entry points only."""
    install(tmp_path, "sidestep", "0.0.1", "[console_scripts]\nsidestep = sidestep.app.cli:main\n")
    assert of_packages(tmp_path, vllm="0.32.0") == ["SD002"]


@pytest.mark.parametrize(
    ("options", "environ", "code"),
    [
        ((), {"SIDESTEP_VLLM_MODE": ""}, "SD012"),
        ((), {"VLLM_PLUGINS": "lora_resolver"}, "SD003"),
        (("--scheduler-cls", "sidestep_adapters.vllm.Scheduler"), {}, "SD021"),
        ((), {"VLLM_USE_RUST_FRONTEND": "1"}, "SD023"),
        (("--disable-log-stats",), {}, "SD024"),
        (("--api-server-count", "4"), {}, "SD025"),
        (("--scheduler-cls", TAP), {}, "SD025"),
    ],
)
def test_vllm(options: tuple[str, ...], environ: dict[str, str], code: str) -> None:
    """Each fault of a server's start has its code."""
    assert of_start(VLLM, ("serve", "MODEL", *options), **environ) == {code}


@pytest.mark.parametrize(
    ("options", "environ", "code"),
    [
        ((), {}, "SD022"),
        (("--enable-metrics", "--tokenizer-worker-num", "4"), {}, "SD026"),
        (("--enable-metrics",), {"SIDESTEP_SGLANG_MODE": "beside"}, "SD012"),
        (("--enable-metrics",), {"SGLANG_PLUGINS": "other"}, "SD003"),
    ],
)
def test_sglang(options: tuple[str, ...], environ: dict[str, str], code: str) -> None:
    """Each fault of a server's start has its code."""
    assert of_start(SGLANG, options, **environ) == {code}


@pytest.mark.parametrize(
    ("engine", "options", "environ"),
    [
        (VLLM, (), {}),
        (VLLM, ("--scheduler-cls", TAP, "--shutdown-timeout=30"), {"VLLM_PLUGINS": ""}),
        (SGLANG, ("--enable-metrics",), {"SGLANG_PLUGINS": ""}),
        (SGLANG, ("--config", "sglang.yaml"), {}),
    ],
)
def test_good_starts(
    engine: InstalledEngine, options: tuple[str, ...], environ: dict[str, str]
) -> None:
    """With the tap the plugin is not needed; SGLang takes an empty list for none; a file has any option."""
    assert of_start(engine, options, **environ) == set()


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({"SIDESTEP_ENDPOINT": ""}, "SD010"),
        ({"SIDESTEP_ENDPOINT": "/run/ingest.ipc"}, "SD160"),
        ({"SIDESTEP_ENDPOINT": "ipc:///nowhere/ingest.ipc"}, "SD161"),
        ({"SIDESTEP_VLLM_MODE": "Instead"}, "SD011"),
        ({"SIDESTEP_STACKS": "no"}, "SD011"),
        ({"SIDESTEP_NAMSPACE": "pod-1"}, "SD013"),
    ],
)
def test_variables(environ: dict[str, str], code: str) -> None:
    """Each fault has its code; this environment has no engine."""
    assert command(**environ).keys() - {"SD006"} >= {code}


def test_an_engine_beside_this_command(tmp_path: Path) -> None:
    """The command has the engine's environment: its packages, and the variables that it would read."""
    site = install(tmp_path, "vllm", "0.32.0")
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(site)])
    assert "SD003" in command(PYTHONPATH=path, VLLM_PLUGINS="other")
    assert "SD012" in command(PYTHONPATH=path, SIDESTEP_ENDPOINT="ipc:///nowhere/x")
