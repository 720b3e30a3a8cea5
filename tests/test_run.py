"""`sidestep run`: the variables and options that an engine's process gets, and what is said about them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from command_line import ENVIRON, one_line, serving, sidestep
from exporters import until
from pages import get
from sidestep.config.engine_settings import default_endpoint
from sidestep_tools.doctor.environment import TAP

SUPPORT = Path(__file__).parent / "support"
SHOWS = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def machine(
    directory: Path, *, program: str = SHOWS, python: str = sys.executable
) -> dict[str, str]:
    """Install metadata of engines, and commands that run a program; return the variables to find them."""
    for name, version in (("vllm", "0.32.0"), ("sglang", "0.5.23")):
        metadata = directory / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (directory / name).write_text(f"#!{python}\n{program}\n")
        (directory / name).chmod(0o755)
    package = directory / "modules" / "sglang"
    package.mkdir(parents=True)
    (package / "launch_server.py").write_text(program)
    return {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "PYTHONPATH": f"{directory}:{directory / 'modules'}:{SUPPORT}",
    }


def started(directory: Path, *words: str, **environ: str) -> tuple[list[str], dict[str, str], str]:
    """Return the engine's arguments, its variables, and what is on standard error."""
    done = sidestep("run", *words, **machine(directory), **environ)
    assert done.returncode == 0, done.stderr
    arguments, variables = json.loads(done.stdout)
    return arguments, variables, done.stderr


def test_vllm_gets_endpoint_and_mode(tmp_path: Path) -> None:
    """Nothing is added to its options, and each variable has a line."""
    arguments, variables, said = started(tmp_path, "--", "vllm", "serve", "tiny", "--port", "8000")

    assert arguments == ["serve", "tiny", "--port", "8000"]
    assert variables["SIDESTEP_ENDPOINT"] == default_endpoint()
    assert variables["SIDESTEP_VLLM_MODE"] == "instead"
    assert "VLLM_PLUGINS" not in variables
    assert "starting vLLM 0.32.0\n" in said
    assert f"set SIDESTEP_ENDPOINT={default_endpoint()}: " in said
    assert "set SIDESTEP_VLLM_MODE=instead: " in said
    assert "no exporter yet: " in said


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    """A list of plugins is extended, since the plugin is not loaded without."""
    arguments, variables, said = started(
        tmp_path,
        "--tap", "vllm", "serve", "tiny", "--scheduler-cls=mine.Scheduler", "--shutdown_timeout", "5",
        SIDESTEP_ENDPOINT="ipc:///nowhere/ingest.ipc", SIDESTEP_VLLM_MODE="beside", VLLM_PLUGINS="lora",
    )  # fmt: skip

    assert arguments == [
        "serve",
        "tiny",
        "--scheduler-cls=mine.Scheduler",
        "--shutdown_timeout",
        "5",
    ]
    assert variables["SIDESTEP_ENDPOINT"] == "ipc:///nowhere/ingest.ipc"
    assert variables["SIDESTEP_VLLM_MODE"] == "beside"
    assert variables["VLLM_PLUGINS"] == "lora,sidestep"
    assert "kept SIDESTEP_VLLM_MODE=beside" in said
    assert "kept --scheduler-cls mine.Scheduler" in said
    assert "added sidestep to VLLM_PLUGINS=lora" in said


def test_a_file_of_options_counts_as_set(tmp_path: Path) -> None:
    """Both engines read options from the YAML of --config."""
    config = tmp_path / "config.yaml"
    config.write_text("scheduler-cls: mine.Scheduler\nshutdown-timeout: 9\n")
    arguments, *_ = started(tmp_path, "--tap", "vllm", "serve", "tiny", "--config", str(config))

    assert arguments == ["serve", "tiny", "--config", str(config)]


def test_a_setting_of_false_or_null_is_none(tmp_path: Path) -> None:
    """SGLang counts nothing by the file's `false`."""
    config = tmp_path / "config.yaml"
    config.write_text("enable_metrics: false\nmodel-path:\n")
    arguments, *_ = started(tmp_path, "sglang", "serve", "--config", str(config))

    assert arguments == ["serve", "--config", str(config), "--enable-metrics"]


def test_variables_of_env_are_the_users(tmp_path: Path) -> None:
    """They are kept as those of the shell, and a list of plugins is extended."""
    words = ("SIDESTEP_VLLM_MODE=beside", "VLLM_PLUGINS=lora", "A=b=c", "vllm", "serve", "t=1")
    arguments, variables, said = started(tmp_path, "env", *words)

    assert arguments == ["serve", "t=1"]
    assert variables["SIDESTEP_VLLM_MODE"] == "beside"
    assert variables["VLLM_PLUGINS"] == "lora,sidestep"
    assert variables["A"] == "b=c"
    assert "kept SIDESTEP_VLLM_MODE=beside" in said


def test_a_process_without_a_front_end_sends_by_the_tap(tmp_path: Path) -> None:
    """A line says so, unless it is tapped."""
    environ = machine(tmp_path)
    plain = sidestep("run", "vllm", "serve", "tiny", "--headless", **environ)
    tapped = sidestep("run", "--tap", "vllm", "serve", "tiny", "--headless", **environ)

    assert "nothing is sent from here without --tap" in plain.stderr
    assert "starting vLLM" in tapped.stderr
    assert "nothing is sent from here" not in tapped.stderr


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["--tap", "--", "vllm", "serve", "tiny"], ["--scheduler-cls", TAP, "--shutdown-timeout", "30"]),
        (["vllm", "serve", "tiny", "--api-server-count=4"], ["--shutdown-timeout", "30"]),
        (["vllm", "serve", "tiny", "-dp=4"], ["--shutdown-timeout", "30"]),
        (["vllm", "serve", "tiny", "-asc", "2"], ["--shutdown-timeout", "30"]),
        (["vllm", "serve", "tiny", "-dp", "4", "--headless"], []),
        (["sglang", "serve", "--model-path", "tiny"], ["--enable-metrics"]),
        ([sys.executable, "-u", "-m", "sglang.launch_server", "--model-path", "tiny"], ["--enable-metrics"]),
        (["env", "sglang", "serve", "--enable-metrics"], []),
    ],
)  # fmt: skip
def test_options_are_added(words: list[str], added: list[str], tmp_path: Path) -> None:
    """At the end; a command before the engine's own, such as numactl, stays."""
    arguments, _, said = started(tmp_path, *words)

    given = words[-len(arguments) + len(added) :]
    assert arguments == [*given, *added]
    for option in (each for each in added if each.startswith("--")):
        assert f"added {option}" in said


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["python", "train.py"], "starts no engine that sidestep knows"),
        (["python", "-m", "vllm.benchmarks.serve"], "starts no engine that sidestep knows"),
        (["/nowhere/vllm", "serve", "tiny"], "/nowhere/vllm: no such command"),
        (["nowhere", "vllm", "serve", "tiny"], "nowhere: no such command"),
        (["--tpa", "vllm", "serve", "tiny"], "Did you mean '--tap'?"),
        (["bash", "-lc", "cd / && vllm serve tiny"], "in a script, write `sidestep run --` before it"),
        (["env", "-i", "vllm", "serve", "tiny"], "env -i keeps variables from the engine"),
        (["sudo", "-u", "vllm", "vllm", "serve", "tiny"], "sudo keeps variables from the engine"),
        (["--tap", "sglang", "serve"], "--tap is vLLM's"),
        (["vllm", "serve", "tiny", "--scheduler-cls", "sidestep.Tap"], "--scheduler-cls sidestep_adapters"),
        (["vllm", "serve", "tiny", "--config", "/nowhere/config.yaml"], "cannot read /nowhere/config.yaml"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_be_observed_does_not_start(
    words: list[str], what: str, tmp_path: Path
) -> None:
    """The error is one line."""
    one_line(sidestep("run", *words, **machine(tmp_path)), 2, what)


@pytest.mark.parametrize(
    ("variables", "what"),
    [
        ({"SIDESTEP_ENDPOINT": "here:9858"}, "here:9858: it must begin with ipc:// or tcp://"),
        ({"SIDESTEP_SERVER_KEY": "/nowhere"}, "SIDESTEP_CLIENT_KEY is not set"),
    ],
    ids=["endpoint", "keys"],
)
def test_an_endpoint_that_no_exporter_has_is_an_error(
    variables: dict[str, str], what: str, tmp_path: Path
) -> None:
    """Nothing would ever be sent."""
    environ = {"SIDESTEP_ENDPOINT": "tcp://127.0.0.1:1", **variables, **machine(tmp_path)}
    one_line(sidestep("run", "vllm", "serve", "tiny", **environ), 2, what)


@pytest.mark.parametrize(
    ("made", "what"),
    [("config", "config.yaml: line 2: is not YAML"), ("vllm", "its Python /nowhere/python3 does")],
)
def test_a_file_that_cannot_be_used_is_named(made: str, what: str, tmp_path: Path) -> None:
    """It is the options' file, or the engine's command whose environment was removed."""
    environ = machine(tmp_path)
    config = tmp_path / "config.yaml"
    config.write_text("port: {\n" if made == "config" else "")
    if made == "vllm":
        (tmp_path / "vllm").write_text("#!/nowhere/python3\n")
    one_line(sidestep("run", "vllm", "serve", "--config", config, **environ), 2, what)


def test_sidestep_has_to_be_installed_beside_the_engine(tmp_path: Path) -> None:
    """The line names the engine's own Python, which is another one than that of the command."""
    python = str(Path(sys.base_prefix, "bin", "python3").resolve())
    done = sidestep("run", "vllm", "serve", "tiny", **machine(tmp_path, python=python))

    one_line(done, 2, f"{python} -m pip install")


def test_a_wrapper_hides_the_engines_python(tmp_path: Path) -> None:
    """The engine starts, and a line says what was not checked."""
    environ = machine(tmp_path)
    (tmp_path / "vllm").rename(tmp_path / "real")
    (tmp_path / "vllm").write_text(f'#!/bin/sh\nexec {tmp_path / "real"} "$@"\n')
    (tmp_path / "vllm").chmod(0o755)
    done = sidestep("run", "vllm", "serve", "tiny", **environ)

    assert done.returncode == 0, done.stderr
    assert "whether sidestep is installed is not checked" in done.stderr


async def test_the_engine_is_observed_and_ends_by_its_own_signal_handler(tmp_path: Path) -> None:
    """The exporter has the engine of an unchanged command line; SIGTERM goes to the engine itself."""
    environ = machine(tmp_path, program="import stand_in_vllm\nstand_in_vllm.main()")
    endpoint = f"ipc://{tmp_path}/run/ingest.ipc"
    flags = ("--ingest.endpoint", endpoint, "--web.listen-address", "127.0.0.1:0")
    async with serving("serve", *flags) as (_, url):
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sidestep", "run", "--tap", "vllm", "serve", "tiny",
            env={**ENVIRON, **environ, "SIDESTEP_ENDPOINT": endpoint},
        )  # fmt: skip
        try:

            async def tokens() -> bool:
                page = await get(url)
                return 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in page

            await until(tokens)
            engine.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(engine.wait(), 30) == 0
        finally:
            if engine.returncode is None:
                engine.kill()
                await engine.wait()
