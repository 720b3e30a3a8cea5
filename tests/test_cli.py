"""Commands as a user runs them: a usage error is one line and exit code 2."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq
from click import Context

from command_line import ENVIRON, one_line, serving, sidestep, taken_port
from exporters import MAIN_RUN, Start, until
from pages import differences, get, parse
from prometheus_server import BINARIES, prometheus
from replays import replay
from sidestep.app.cli import cli
from sidestep.config.engine_settings import default_endpoint
from sidestep.config.setting import Setting
from sidestep.config.settings import SETTINGS, read
from sidestep.engines.vllm.wire import VllmStep
from sidestep.protocol.iteration_stats import IterationStats
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serve --no.such-flag", "No such option"),
        ("no-such-command", "No such command"),
        ("serve --log.level loud", "--log.level 'loud': must be one of debug, info"),
        ("serve --web.listen-address no.such.host.invalid:0", "cannot listen on"),
        ("serve --web.listen-address 192.0.2.1:0", "cannot listen on"),
        (f"serve --web.listen-address {'x' * 70}:0", "cannot listen on"),
        ("serve --ingest.endpoint udp://x", "must begin with ipc:// or tcp://"),
        ("serve --ingest.endpoint tcp://192.0.2.1:5", "reaches beyond this host"),
        (
            "serve --ingest.endpoint tcp://192.0.2.1:5 --ingest.allow-plain-tcp",
            "cannot bind ingest endpoint",
        ),
        (
            "serve --ingest.endpoint tcp://nonsense --ingest.allow-plain-tcp",
            "must be tcp://HOST:PORT",
        ),
        ("serve --ingest.endpoint ipc://@sidestep", "must be the path of a file"),
        ("serve --ingest.endpoint ipc://*", "must be the path of a file"),
        ("serve --ingest.endpoint ipc:///proc/x/i", "cannot bind ingest endpoint"),
        (f"serve --ingest.endpoint ipc:///tmp/{'x' * 200}", "longer than 107"),
        ("serve --ingest.curve-key /x", "ingest.authorized-keys is missing"),
        ("serve --ingest.authorized-keys /x", "ingest.curve-key is missing"),
        ("serve --ingest.ipc-group no-such", ": no such group"),
        ("serve --ingest.ipc-group 4294967295", ": no such group"),
        ("serve --limits.memory-soft 600", "must not be above limits.memory-hard"),
        ("serve --config.file /no/such/file", "cannot read /no/such/file"),
        ("serve --web.config.file /no/such/file", "cannot read /no/such/file"),
        ("record /tmp/x --listen tcp://0.0.0.0:0", "reaches beyond this host"),
        (
            "record /no/such/directory/x --listen tcp://127.0.0.1:0",
            "cannot write /no/such/directory/x",
        ),
        ("keygen ../x", "must be letters, digits"),
        ("keygen x --out /no/such/directory", "cannot write /no/such/directory/x.key"),
        ("replay /no/such/file", "cannot read /no/such/file"),
        (f"replay {MAIN_RUN} --connect nonsense", "must begin with ipc://"),
        ("demo --speed ludicrous", "is not one of"),
    ],
)
def test_a_usage_error_is_one_line(command: str, message: str) -> None:
    """The exit code is 2, without a traceback."""
    one_line(sidestep(*command.split()), 2, message)


def test_a_configuration_is_checked_without_a_start(tmp_path: Path) -> None:
    """Each value that is set has a line with its origin ; files that settings name are read."""
    file = tmp_path / "sidestep.toml"
    file.write_text(
        '[web]\nlisten-address = "192.0.2.1:1"\n[buckets]\ntime_to_first_token = [1, 2]\n'
    )
    flags = ("--config.file", file, "--scrape", "http://127.0.0.1:1/metrics")
    done = sidestep(
        "serve", "--check", *flags, SIDESTEP_LOG_LEVEL="debug", SIDESTEP_SHUTDOWN_LINGER=""
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        f"buckets of time_to_first_token ({file})",
        "log.level debug (SIDESTEP_LOG_LEVEL)",
        "scrape http://127.0.0.1:1/metrics (--scrape)",
        f"web.listen-address 192.0.2.1:1 ({file}: web.listen-address)",
    ]
    assert sidestep("serve", "--check", SIDESTEP_SHUTDOWN_LINGER="").stdout.startswith(
        "every setting"
    )


@pytest.mark.parametrize(
    ("flag", "value", "what"),
    [
        ("--web.config.file", "/no/such/file", "cannot read"),
        ("--log.level", "loud", "must be one of"),
        ("--ingest.endpoint", "unix:///x", "must begin with ipc:// or tcp://"),
        ("--ingest.endpoint", "ipc://@x", "must be the path of a file"),
        ("--ingest.endpoint", "ipc:///x/\udcff", "'utf-8' codec can't encode"),
        ("--ingest.endpoint", f"ipc:///{'x' * 107}", "longer than 107 bytes"),
        ("--ingest.endpoint", "tcp://127.0.0.1:99999", "a port up to 65535"),
        ("--ingest.endpoint", "tcp://0.0.0.0:9858", "reaches beyond this host"),
        ("--engine", "other=http://h:1", "'other' is no kind of server"),
        ("--ingest.ipc-group", "1" * 5000, "no such group"),
        ("--state.dir", __file__, "is no directory that can be written to"),
        ("--state.dir", "x" * 300, "File name too long"),
    ],
)
def test_a_wrong_configuration_is_found_without_a_start(flag: str, value: str, what: str) -> None:
    """The line is that of a start."""
    one_line(sidestep("serve", "--check", flag, value), 2, what)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("command", ["--version", "serve --help", "inject", "doctor --rules /x"])
def test_a_full_disk_is_one_line(command: str) -> None:
    """Standard output may be a file; the exit code 1 would be a verdict."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sidestep", *command.split()],
            input=b"kind: Service\n", stdout=full, stderr=subprocess.PIPE, check=False, env=ENVIRON,
        )  # fmt: skip

    assert done.returncode == 2
    assert done.stderr == b"sidestep: cannot write the output: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("errors", ["2>&-", "2>/dev/full"])
def test_a_usage_error_has_its_exit_code_without_a_line(errors: str) -> None:
    """For a comparison, 1 would be a verdict."""
    line = f"exec {sys.executable} -m sidestep compare /no/such /no/such {errors}"
    assert subprocess.run(["bash", "-c", line], check=False, env=ENVIRON).returncode == 2


@pytest.mark.parametrize("command", ["inject", "doctor --manifest -"])
def test_a_closed_standard_input_is_empty(command: str) -> None:
    """Some that start commands, such as cron's wrappers, close it."""
    line = f"exec {sys.executable} -m sidestep {command} <&-"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=True, env=ENVIRON
    )

    assert "Traceback" not in done.stderr
    assert "no container runs" in done.stderr or "0 resources were read" in done.stdout


@pytest.mark.parametrize("command", ["compare {0} {0}", "why --from {0}"])
def test_an_interrupt_ends_a_command_that_reads_a_file(command: str, tmp_path: Path) -> None:
    """The first Ctrl-C ends it, even if the file is long or a pipe that nothing comes from."""
    file = tmp_path / "requests.jsonl"
    os.mkfifo(file)
    words = [sys.executable, "-m", "sidestep", *command.format(file).split()]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRON)
    with process, file.open("wb"):  # It opens once the command reads.
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=20)

    assert (process.returncode, output) == (130, "")


def test_sidestep_alone_prints_its_help() -> None:
    """Each command has one line, at the width of a terminal of 80 columns."""
    done = sidestep()
    lines = done.stdout.partition("Commands:\n")[2].splitlines()

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == sidestep("--help").stdout
    assert [line.split()[0] for line in lines] == cli.list_commands(Context(cli))
    assert all(line.endswith(".") and not line.endswith("..") for line in lines)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.flag)
def test_help_shows_the_default_in_effect(setting: Setting, help_text: str) -> None:
    """The default in help is the value of a configuration without flags, variables and file; an unset one is empty."""
    found = re.search(rf"\[{setting.variable};(default|unset):([^\]]+)\]", help_text)
    assert found
    effective = getattr(read({}, {}), setting.key)
    if found[1] == "default":
        parsed = setting.parse(found[2])
        assert effective == ((parsed,) if setting.repeatable else parsed)
    else:
        assert effective in ("", (), None, (default_endpoint(),))


def test_help_shows_the_default_endpoint(help_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint is in the directory of the user's session, or else among temporary files."""
    found = re.search(r"unset:([^;]+);withoutthatvariable,([^;\]]+)\]", help_text)
    assert found
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_endpoint() == found[1].replace("$XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert default_endpoint() == found[2].replace("UID", str(os.getuid()))


@pytest.fixture(scope="module")
def help_text() -> str:
    """Return the help of ``serve`` without white space, which wraps at any place."""
    return "".join(sidestep("serve", "--help").stdout.split())


@pytest.mark.parametrize("command", ["serve", "demo --once", "record /tmp/x"])
def test_an_unknown_variable_is_one_line(command: str) -> None:
    """The line has the nearest known ones, and no value."""
    done = sidestep(*command.split(), SIDESTEP_LOG_LEVL="debug", SIDESTEP_COLOUR="on")

    one_line(
        done, 2,
        "unknown environment variables: SIDESTEP_COLOUR, SIDESTEP_LOG_LEVL (did you mean SIDESTEP_LOG_LEVEL?)",
    )  # fmt: skip


async def test_variables_of_others_are_accepted(tmp_path: Path) -> None:
    """Those of an engine in the same pod, and those that Kubernetes sets for a Service "sidestep"."""
    environ = {
        "SIDESTEP_VLLM_MODE": "instead",
        "SIDESTEP_ENDPOINT": "ipc:///x",
        "SIDESTEP_SERVICE_HOST": "10.0.0.1",
        "SIDESTEP_PORT_9857_TCP": "tcp://10.0.0.1:9857",
        "SIDESTEP_PORT": "tcp://10.0.0.1:9857",
    }
    async with serving(*lingering(tmp_path, linger=0), **environ) as (_, url):
        assert "sidestep_build_info" in await get(url)


@pytest.mark.parametrize("flag", ["--web.listen-address", "--ingest.endpoint"])
@pytest.mark.parametrize("command", ["serve", "demo"])
def test_a_busy_port_is_one_line(command: str, flag: str, tmp_path: Path) -> None:
    """The line names the port, and the flag to choose another."""
    held, port = taken_port()
    flags = {
        "--web.listen-address": "127.0.0.1:0", "--ingest.endpoint": f"ipc://{tmp_path}/i",
        flag: f"127.0.0.1:{port}" if flag.startswith("--web") else f"tcp://127.0.0.1:{port}",
    }  # fmt: skip
    done = sidestep(command, *(word for pair in flags.items() for word in pair))
    held.close()

    one_line(done, 2, f": choose another with {flag}")
    assert str(port) in done.stderr


async def test_a_busy_endpoint_is_not_stolen(start: Start, tmp_path: Path) -> None:
    """The ipc path is locked, as another bind would succeed; a recording is not opened before."""
    file = tmp_path / "old"
    file.write_text("precious")
    async with start() as exporter:
        (endpoint,) = exporter.endpoints
        done = await asyncio.to_thread(sidestep, "record", file, "--listen", endpoint)
        flags = ("--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint)
        served = await asyncio.to_thread(sidestep, "serve", *flags)

    for each in (done, served):
        one_line(each, 2, f"ingest endpoint {endpoint} is in use by another process")
    assert "choose another with --ingest.endpoint (sidestep record: --listen)" in done.stderr
    assert file.read_text() == "precious"


def test_replay_without_an_exporter_fails_at_run_time(tmp_path: Path) -> None:
    """The exit code is 1, as the command itself is valid."""
    done = sidestep("replay", MAIN_RUN, "--speed", "max", "--connect", f"ipc://{tmp_path}/x")

    one_line(done, 1, "no exporter answers")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_0(number: signal.Signals, tmp_path: Path) -> None:
    """The ipc path is removed; without engines the exporter does not linger."""
    async with serving(*lingering(tmp_path, linger=600)) as (process, url):
        assert "sidestep_build_info" in await get(url)
        process.send_signal(number)
        output, _ = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 0
    assert b"Traceback" not in output
    assert not (tmp_path / "i.ipc").exists()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
async def test_an_exporter_runs_and_stops_without_standard_streams(
    closed: str, tmp_path: Path
) -> None:
    """No connection gets the descriptor of one, whose end would abort the process."""
    command = [sys.executable, "-m", "sidestep", *lingering(tmp_path, linger=0)]
    line = f"exec {' '.join(command)} {closed}"
    exporter = await asyncio.create_subprocess_exec("bash", "-c", line, env=ENVIRON)
    await until((tmp_path / "i.ipc").exists)
    exporter.terminate()

    assert await asyncio.wait_for(exporter.wait(), 20) == 0


def lingering(folder: Path, linger: float) -> tuple[str, ...]:
    """Return the arguments of an exporter that lingers after SIGTERM."""
    return (
        "serve", "--web.listen-address", "127.0.0.1:0",
        "--ingest.endpoint", f"ipc://{folder}/i.ipc", f"--shutdown.linger={linger}",
    )  # fmt: skip


def engine(folder: Path) -> Publisher:
    """Return an engine that pushes to that exporter."""
    labels = {"engine": "0", "model_name": "m"}
    return Publisher(f"ipc://{folder}/i.ipc", "s", [EngineInfo("e", "vllm", labels)])


async def test_a_terminated_exporter_serves_the_last_counts_of_its_engine(tmp_path: Path) -> None:
    """After SIGTERM the exporter counts and answers until a scrape after the engine's goodbye."""
    tokens = 'vllm:generation_tokens_total{engine="0",model_name="m"}'

    async def shows(count: int) -> bool:
        return f"{tokens} {count}\n" in await get(url)

    async with serving(*lingering(tmp_path, linger=600)) as (process, url):
        publisher = engine(tmp_path)
        publisher.push(VllmStep(0, 1.0, 1.0, None, IterationStats(5)))
        await until(lambda: shows(5), 20)
        process.terminate()
        while "stopping after the next scrape, within 600 s" not in await next_line(process):
            pass
        publisher.push(VllmStep(0, 1.0, 1.0, None, IterationStats(3)))
        await until(lambda: shows(8), 20)
        publisher.push(VllmStep(0, 1.0, 1.0, None, IterationStats(4)))
        await asyncio.to_thread(publisher.close)
        last = ""
        with contextlib.suppress(aiohttp.ClientError):
            async with asyncio.timeout(20):
                while process.returncode is None:
                    last = await get(url)
        await asyncio.wait_for(process.wait(), 20)

    assert f"{tokens} 12\n" in last
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("linger", "signals"),
    [
        (0.5, [signal.SIGTERM]),
        (0, [signal.SIGTERM]),
        (600, [signal.SIGINT]),
        (600, [signal.SIGTERM, signal.SIGTERM]),
    ],
    ids=["time", "none", "ctrl-c", "again"],
)
async def test_an_exporter_with_a_connected_engine_does_not_linger_for_ever(
    linger: float, signals: list[signal.Signals], tmp_path: Path
) -> None:
    """Lingering ends after ``--shutdown.linger`` seconds or with a second signal; Ctrl-C stops at once."""
    async with serving(*lingering(tmp_path, linger)) as (process, _):
        publisher = engine(tmp_path)
        try:
            await until(lambda: publisher.connected, 20)
            process.send_signal(signals[0])
            for number in signals[1:]:
                assert "stopping after the next scrape" in await next_line(process)
                process.send_signal(number)
            output, _ = await asyncio.wait_for(process.communicate(), 20)
        finally:
            await asyncio.to_thread(publisher.close, 0.1)

    assert (process.returncode, b"drained and stopped" in output) == (0, True)


async def test_sighup_reloads_the_configuration(tmp_path: Path) -> None:
    """A changed sample rate reaches the engines; an invalid or missing file changes nothing."""
    file, endpoint = tmp_path / "sidestep.toml", f"ipc://{tmp_path}/i.ipc"
    file.write_text("[kv]\nsample-rate = 0.25\n")
    arguments = (
        "serve", "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint,
        "--config.file", file,
    )  # fmt: skip
    labels = {"engine": "0", "model_name": "m"}
    engine = Publisher(endpoint, "s", [EngineInfo("e", "vllm", labels)], flush_interval=0.01)

    async def reload(content: str) -> list[str]:
        file.write_text(content)
        process.send_signal(signal.SIGHUP)
        return [await next_line(process) for _ in range(2 if "legacy" in content else 1)]

    async with serving(*arguments) as (process, url), contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, engine.close)
        await until(lambda: engine.kv_sample_rate == 0.25)
        assert "engine e has connected: " in await next_line(process)
        (line,) = await reload("[kv]\nsample-rate = 0.5\n")
        assert line.endswith(" INFO configuration reloaded: kv.sample-rate 0.5")
        await until(lambda: engine.kv_sample_rate == 0.5)

        for broken, reason in BROKEN.items():
            (line,) = await reload(broken)
            assert " ERROR configuration not reloaded, the current one stays in effect: " in line
            assert reason in line
        file.unlink()
        process.send_signal(signal.SIGHUP)
        assert f"cannot read {file}" in await next_line(process)
        assert "sidestep_build_info" in await get(url)
        assert engine.kv_sample_rate == 0.5

        line, warning = await reload("[kv]\nsample-rate = 0\n[metrics]\nlegacy = true\n")
        assert line.endswith("kv.sample-rate 0.0")
        assert warning.endswith(" WARNING changed settings that need a restart: metrics.legacy")
        await until(lambda: engine.kv_sample_rate == 0.0)
        (line,) = await reload("[kv]\nsample-rate = 0\n")
        assert line.endswith("no changes")
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0


BROKEN = {
    "[kv\n": "is not TOML",
    "[kv]\nsample-rate = 2\n": "kv.sample-rate '2': must be a number, 0 to 1",
    '"a\\nb" = 1\n': "a b is not a setting",
    "x = " + "[" * 5000: "is not TOML",
    "[kv]\nmax-tracked = 0x" + "f" * 5000: "Exceeds the limit",
    "[kv]\nsample-rate = 0.75\n[log]\nlevel = 'loud'\n": "must be one of",
}
"""Files with an error: not even their valid settings apply."""


async def test_sighup_during_the_start_reloads_after_it(tmp_path: Path) -> None:
    """Its default action would end the process. The start waits here for the pipe's content."""
    file, changed = tmp_path / "sidestep.toml", tmp_path / "changed.toml"
    os.mkfifo(file)
    changed.write_text("[kv]\nsample-rate = 0.5\n")
    exporter = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "sidestep", *lingering(tmp_path, linger=0), "--config.file", file,
        env=ENVIRON, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    pipe = await asyncio.to_thread(file.open, "w")
    exporter.send_signal(signal.SIGHUP)
    changed.replace(file)
    pipe.write("[kv]\nsample-rate = 0.25\n")
    pipe.close()
    assert exporter.stderr is not None
    async for line in exporter.stderr:
        if line.endswith(b"configuration reloaded: kv.sample-rate 0.5\n"):
            exporter.terminate()

    assert await asyncio.wait_for(exporter.wait(), 20) == 0


async def test_sighup_applies_the_log_level_but_overrides_no_flag(tmp_path: Path) -> None:
    """Flags take precedence over the changed file, too."""
    file, endpoint = tmp_path / "sidestep.toml", f"ipc://{tmp_path}/i.ipc"
    file.write_text("")
    arguments = (
        "serve", "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint,
        "--config.file", file, "--kv.sample-rate", "0.125",
    )  # fmt: skip
    async with serving(*arguments) as (process, _):
        file.write_text("[kv]\nsample-rate = 1\n[log]\nlevel = 'debug'\n")
        process.send_signal(signal.SIGHUP)
        assert (await next_line(process)).endswith("configuration reloaded: log.level debug")
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(endpoint)
        await asyncio.to_thread(socket.send, b"nonsense")
        assert (await next_line(process)).endswith(" DEBUG rejected: bad_schema")
        socket.close(linger=0)
        context.term()


async def next_line(process: asyncio.subprocess.Process) -> str:
    """Return the next log line."""
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 20)).decode().rstrip("\n")


async def test_log_lines_as_json(tmp_path: Path) -> None:
    """Each line is an object; statistics are numbers."""
    endpoint = f"ipc://{tmp_path}/i.ipc"
    arguments = (
        "serve", "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint,
        "--log.format", "json", "--log.stats-interval", "0.2",
    )  # fmt: skip
    async with serving(*arguments) as (process, _):
        await replay(endpoint, MAIN_RUN)
        assert process.stdout is not None
        line: dict[str, Any] = {}
        # The first line may cover only the beginning of the run.
        while not line.get("prefix_hit_rate"):
            line = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        process.terminate()

    assert line["level"] == "info"
    assert line["id"].startswith("test/")
    assert (line["event"], line["engine"], line["dialect"]) == ("statistics", "0", "vllm")
    assert line["model"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert line["generation_tokens_per_second"] > 0
    assert 0 < line["ttft"]["p50"] <= line["ttft"]["p95"]
    assert 0 < line["prefix_hit_rate"] < 1


async def test_a_recording_replays_to_the_same_page(start: Start, tmp_path: Path) -> None:
    """A recording of a live stream that the recorder forwards is complete."""
    file, listen = tmp_path / "recording", f"ipc://{tmp_path}/tee.ipc"
    async with start() as exporter:
        tee = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sidestep", "record", str(file), "--listen", listen,
            "--connect", exporter.endpoints[0], stderr=asyncio.subprocess.PIPE, env=ENVIRON,
        )  # fmt: skip
        assert tee.stderr is not None
        await asyncio.wait_for(tee.stderr.readline(), 20)
        await replay(listen, MAIN_RUN)
        live = parse(await get(exporter.url))
        tee.send_signal(signal.SIGINT)
        await asyncio.wait_for(tee.wait(), 20)
        assert tee.returncode == 0

    async with start() as exporter:
        done = await asyncio.to_thread(
            sidestep, "replay", file, "--connect", exporter.endpoints[0], "--speed", "max"
        )
        again = parse(await get(exporter.url))
    assert done.returncode == 0, done.stderr
    async with start() as exporter:
        await replay(exporter, MAIN_RUN)
        direct = parse(await get(exporter.url))

    assert list(differences(direct, again, tolerance=1e-12)) == []
    assert list(differences(direct, live, tolerance=1e-12)) == []


@pytest.mark.skipif(BINARIES["2"] is None, reason="prometheus is not installed (apt: prometheus)")
async def test_a_real_prometheus_stores_the_last_counts_of_a_pod(tmp_path: Path) -> None:
    """The exporter waits for Prometheus although a router polls the page, and stops long before its time is up."""
    tokens = "last_over_time(vllm:generation_tokens_total[10m])"

    async def poll() -> None:
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                await get(url)

    async with serving(*lingering(tmp_path, linger=600)) as (process, url):
        publisher = engine(tmp_path)
        targets = {"sidestep": {"pod": url}}
        with prometheus(str(BINARIES["2"]), tmp_path, targets, interval="2s") as server:
            publisher.push(VllmStep(0, 1.0, 1.0, None, IterationStats(5)))
            await asyncio.to_thread(server.until, tokens, lambda found: [*found.values()] == [5])
            router = asyncio.create_task(poll())
            publisher.push(VllmStep(0, 1.0, 1.0, None, IterationStats(7)))
            await asyncio.to_thread(publisher.close)
            process.terminate()
            await asyncio.wait_for(process.wait(), 60)
            await router
            await asyncio.to_thread(server.until, tokens, lambda found: [*found.values()] == [12])


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("sidestep dem", "demo"),
        ("sidestep serve --web.listen", "--web.listen-address"),
        ("sidestep replay --speed m", "max"),
    ],
)
def test_bash_completes_commands_flags_and_values(typed: str, completed: str) -> None:
    """As the script asks that documents name."""
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [Path(sys.executable).with_name("sidestep")],
        env={**ENVIRON, "_SIDESTEP_COMPLETE": "bash_complete", **words},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.split() == [f"plain,{completed}"]
