"""The plugin as a directory, loaded by an engine in whose environment sidestep is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import msgspec
import pytest
import zmq

from manifests import ROOT
from sidestep import __version__

BROUGHT = (msgspec, zmq)
"""Dependencies of the plugin that engines have themselves."""
FIND = """
import json, sys
from importlib.metadata import entry_points, version
import sidestep_adapters.sglang.collectors, sidestep_adapters.vllm.stats, sidestep_adapters.vllm.frontend
found = {g: [e.name for e in entry_points(group=g)] for g in ("vllm.stat_logger_plugins", "sglang.srt.plugins")}
print(json.dumps([found, version("sidestep"), sidestep_adapters.__file__, sys.path]))
"""
LOG = """
import logging, sys
from sidestep_adapters.publisher.environment import set_up_log
logging.getLogger("engine").addHandler(logging.StreamHandler(sys.stdout))
logging.getLogger("engine").setLevel("INFO")
set_up_log("engine")
set_up_log("engine")
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the distribution without its dependencies into a directory, as the image has it."""
    directory = tmp_path_factory.mktemp("plugin")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = directory / "wheel"
    make = [*pip, "wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={built}", str(ROOT)]
    subprocess.run(make, check=True)
    (wheel,) = built.glob("*.whl")
    target = directory / "opt"
    put = [*pip, "install", "--no-deps", "--no-compile", f"--target={target}", str(wheel)]
    subprocess.run(put, check=True)
    return target


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with engines' dependencies but without sidestep."""
    directory = tmp_path_factory.mktemp("engine")
    venv.create(directory, with_pip=False, symlinks=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    for module in BROUGHT:
        source = Path(str(module.__file__)).parent
        for one in source.parent.glob(f"{source.name}*"):
            (packages / one.name).symlink_to(one)
        for one in source.parent.glob(f"py{source.name}*"):
            (packages / one.name).symlink_to(one)
    return directory / "bin" / "python"


def run(engine: Path, code: str, **environ: str) -> str:
    """Run a program with the engine's interpreter and return its output."""
    done = subprocess.run(
        [engine, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], **environ},
        cwd="/",
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engines_find_the_plugin_by_its_entry_points(engine: Path, plugin: Path) -> None:
    """Engines find the plugin's entry points in the directory, which comes first on the path."""
    found, version, file, path = json.loads(run(engine, FIND, PYTHONPATH=str(plugin)))

    assert found == {"vllm.stat_logger_plugins": ["sidestep"], "sglang.srt.plugins": ["sidestep"]}
    assert (version, Path(file).is_relative_to(plugin)) == (__version__, True)
    assert path[1] == str(plugin)


@pytest.mark.parametrize(("more", "warned"), [("", True), (":", True), (":/theirs", False)])
def test_a_path_that_hides_the_images_is_logged(
    engine: Path, plugin: Path, more: str, warned: bool
) -> None:
    """The engine's log says that a PYTHONPATH of its image does not apply, unless the manifest has one."""
    line = (
        f"sidestep: PYTHONPATH is only {plugin}: a PYTHONPATH of the engine's image does not apply"
    )
    said = run(engine, LOG, PYTHONPATH=f"{plugin}{more}")

    assert said.count(line) == warned


def test_the_directory_has_only_sidesteps_packages(plugin: Path) -> None:
    """The directory has no package that could replace one of the engine's."""
    names = {one.name for one in plugin.iterdir() if one.suffix != ".dist-info"}

    assert names - {"bin"} == {"sidestep", "sidestep_adapters", "sidestep_tools"}
