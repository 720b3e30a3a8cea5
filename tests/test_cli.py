"""Commands as a user runs them: a mistake is one line and exit code 2."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gzip
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq

from command_line import ENVIRON, one_line, serving, sidestep, taken_port
from exporters import MAIN_RUN, Start, until
from pages import differences, get, parse
from sidestep.cli import serve
from sidestep.config.settings import read
from sidestep.errors import ConfigError
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher
from sidestep_adapters.recording.replay import Replay


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["serve", "--no.such-flag"], "No such option"),
        (["no-such-command"], "No such command"),
        (
            ["poll-triton", "http://h:8000", "--connect", "tcp://h:5556"],
            "was removed: run `sidestep serve",
        ),
        (["serve", "--web.listen-address", "nonsense"], "must be host:port"),
        (["serve", "--web.listen-address", "127.0.0.1:99999"], "must be host:port"),
        (["serve", "--web.listen-address", "no.such.host.invalid:0"], "cannot listen on"),
        (["serve", "--web.listen-address", "192.0.2.1:0"], "cannot listen on"),
        (["serve", "--web.telemetry-path", "metrics"], "must begin with /"),
        (["serve", "--web.telemetry-path", "/"], "must be a path of its own"),
        (["serve", "--web.telemetry-path", "/-/healthy"], "must be a path of its own"),
        (["serve", "--web.telemetry-path", "/{"], "must be a path of its own"),
        (["serve", "--web.listen-address", "x" * 70 + ":0"], "cannot listen on"),
        (["serve", "--log.level", "loud"], "must be one of debug, info, warning, error"),
        (["serve", "--log.stats-interval", "-1"], "must be a number of seconds"),
        (["serve", "--kv.sample-rate", "1.5"], "must be a number, 0 to 1"),
        (["serve", "--kv.sample-rate", "nan"], "must be a number, 0 to 1"),
        (["serve", "--kv.max-tracked", "0"], "must be a whole number above 0"),
        (["serve", "--requests.max-tracked", "1.5"], "must be a whole number above 0"),
        (["serve", "--requests.max-age", "0"], "must be a number of seconds above 0"),
        (["serve", "--intervals.scheduled", "middle"], "must be one of first, last"),
        (["serve", "--intervals.inter-token", "both"], "must be one of output, token"),
        (["serve", "--ingest.endpoint", "udp://x"], "must begin with ipc:// or tcp://"),
        (["serve", "--ingest.endpoint", "tcp://192.0.2.1:5"], "reaches beyond this host"),
        (
            ["serve", "--ingest.endpoint", "tcp://192.0.2.1:5", "--ingest.allow-plain-tcp"],
            "cannot bind ingest endpoint",
        ),
        (
            ["serve", "--ingest.endpoint", "tcp://nonsense", "--ingest.allow-plain-tcp"],
            "cannot bind ingest endpoint",
        ),
        (["serve", "--ingest.endpoint", "ipc://@sidestep"], "must be the path of a file"),
        (["serve", "--ingest.endpoint", "ipc://*"], "must be the path of a file"),
        (["serve", "--ingest.curve-key", "/x"], "ingest.authorized-keys is missing"),
        (["serve", "--ingest.authorized-keys", "/x"], "ingest.curve-key is missing"),
        (["serve", "--ingest.ipc-group", "no such group"], ": no such group"),
        (["serve", "--limits.memory-soft", "600"], "must not be above limits.memory-hard"),
        (["serve", "--limits.memory-hard", "-1"], "must be a whole number"),
        (["record", "/tmp/x", "--listen", "tcp://0.0.0.0:0"], "reaches beyond this host"),
        (["keygen", "../x"], "must be letters, digits"),
        (["keygen", "x", "--out", "/no/such/directory"], "cannot write /no/such/directory/x.key"),
        (["serve", "--ingest.endpoint", "ipc:///proc/x/i"], "cannot bind ingest endpoint"),
        (["serve", "--ingest.endpoint", "ipc:///tmp/" + "x" * 200], "longer than 107"),
        (["serve", "--config.file", "/no/such/file"], "cannot read /no/such/file"),
        (["replay", "/no/such/file"], "cannot read /no/such/file"),
        (["replay", str(MAIN_RUN), "--connect", "nonsense"], "must begin with ipc://"),
        (
            ["record", "/no/such/directory/x", "--listen", "tcp://127.0.0.1:0"],
            "cannot write /no/such/directory/x",
        ),
        (["demo", "--speed", "ludicrous"], "is not one of"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], what: str) -> None:
    """Exit code 2, what is wrong, no traceback."""
    one_line(sidestep(*arguments), 2, what)


def test_a_busy_port_is_one_line(tmp_path: Path) -> None:
    """It names the address."""
    held, port = taken_port()
    done = sidestep("serve", "--web.listen-address", f"127.0.0.1:{port}",
                    "--ingest.endpoint", f"ipc://{tmp_path}/i")  # fmt: skip
    held.close()

    one_line(done, 2, f"cannot listen on 127.0.0.1:{port}: Address already in use")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory_is_one_line(tmp_path: Path) -> None:
    """It names the directory."""
    tmp_path.chmod(0o500)
    done = sidestep("serve", "--ingest.endpoint", f"ipc://{tmp_path}/sub/i")

    one_line(done, 2, "Permission denied")


async def test_a_busy_endpoint_leaves_an_old_recording_alone(start: Start, tmp_path: Path) -> None:
    """The file is opened when there is something to record."""
    file = tmp_path / "old"
    file.write_text("precious")
    async with start() as exporter:
        done = await asyncio.to_thread(sidestep, "record", file, "--listen", exporter.endpoints[0])

    one_line(done, 2, "another exporter uses it")
    assert file.read_text() == "precious"


async def test_a_second_exporter_does_not_steal_the_path(start: Start) -> None:
    """The ipc path is locked: binding it again would succeed and cut the first one off."""
    async with start() as exporter:
        done = await asyncio.to_thread(
            sidestep, "serve", "--web.listen-address", "127.0.0.1:0",
            "--ingest.endpoint", exporter.endpoints[0],
        )  # fmt: skip

        one_line(done, 2, "another exporter uses it")


INIT = (
    b'{"call": "__init__", "t_mono": 1, "model": "m", "max_model_len": 9,'
    b' "engine_indexes": [0], %b}\n'
)
MALFORMED = {
    "empty": (b"", "neither a sidestep recording nor JSON lines"),
    "text": (b"hello\n", "neither a sidestep recording nor JSON lines"),
    "broken line": (b'{"call": "__init__"\n', "line 1 is no stat-logger call"),
    "no time": (b'{"call": "record"}\n', "line 1 is no stat-logger call"),
    "no init": (b'{"call": "record", "t_mono": 1}\n', "no __init__ call of its process"),
    "bad init": (b'{"call": "__init__", "t_mono": 1}\n', "lacks a field"),
    "bad options": (INIT % b'"observability": [1]', "lacks a field"),
    "bad buckets": (INIT % b'"observability": {"custom_histogram_buckets": [1]}', "lacks a field"),
    "endless time": (b'{"call": "record", "t_mono": ' + b"9" * 400 + b"}\n", "line 1 is no"),
    "bad engine": (
        INIT % b'"x": 1' + b'{"call": "record", "t_mono": 1, "engine_idx": "x"}\n',
        "line 2: invalid literal",
    ),
    "cut gzip": (gzip.compress(b"{}" * 1000)[:-20], "cut short or damaged"),
    "cut recording": (b"sidestep recording 1\n\x00\x00\x00\x09abc", "cut short at byte 21"),
    "damaged recording": (b"sidestep recording 1\n\x00\x00\x00\x01\xc1", "damaged at byte 21"),
    "empty recording": (b"sidestep recording 1\n", "the recording is empty"),
}


@pytest.mark.parametrize(("content", "what"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_recording_is_one_line(content: bytes, what: str, tmp_path: Path) -> None:
    """It says where."""
    file = tmp_path / "recording"
    file.write_bytes(content)

    one_line(sidestep("replay", file, "--connect", f"ipc://{tmp_path}/x"), 2, what)


def test_replay_without_an_exporter_fails_at_run_time(tmp_path: Path) -> None:
    """Exit code 1: nothing is wrong with the command."""
    done = sidestep("replay", MAIN_RUN, "--speed", "max", "--connect", f"ipc://{tmp_path}/x")

    one_line(done, 1, "no exporter answers")


CONFIGS = {
    "not TOML": ("= 1", "is not TOML"),
    "unknown key": ("[web]\nlisten = 'x'", "web.listen is not a setting"),
    "unknown section": ("speed = 9", "speed is not a setting"),
    "wrong type": ("[web]\ntelemetry-path = 5", "must be a string"),
    "wrong value": ("[log]\nlevel = 'loud'", "must be one of"),
    "number as text": ("[kv]\nmax-tracked = true", "must be a whole number above 0"),
    "share as text": ("[kv]\nsample-rate = false", "must be a number, 0 to 1"),
    "endless depth": ("x = " + "[" * 5000, "is not TOML"),
    "endless number": ("x = " + "9" * 5000, "is not TOML"),
    "no address": ("[web]\nlisten-address = []", "give at least one"),
    "unknown buckets": ("[buckets]\nx = [1]", "buckets.x is unknown"),
    "falling buckets": ("[buckets]\nrequest_latency = [2, 1]", "must increase strictly"),
    "unknown schema": ("[schemas]\nx = 3", "schemas.x is unknown"),
    "too fine": ("[schemas]\nrequest_latency = 9", "give a whole number from -4 to 8"),
    "no number": ("[schemas]\nrequest_latency = true", "give a whole number"),
    "no table": ("schemas = 3", "schemas must be a table"),
    "unknown histograms": ('histograms = "new"', "histograms"),
    "no buckets": ("[buckets]\nrequest_latency = []", "give one or more finite numbers"),
}


@pytest.mark.parametrize(("content", "what"), CONFIGS.values(), ids=CONFIGS.keys())
def test_a_wrong_configuration_is_one_line(content: str, what: str, tmp_path: Path) -> None:
    """It names the file, the key and what would be right."""
    file = tmp_path / "sidestep.toml"
    file.write_text(content)

    one_line(sidestep("serve", "--config.file", file), 2, what)


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    """And a default stands where none speaks."""
    file = tmp_path / "sidestep.toml"
    file.write_text("[log]\nlevel = 'debug'\nformat = 'json'\nstats-interval = 5\n")
    environ = {"SIDESTEP_LOG_LEVEL": "warning", "SIDESTEP_LOG_FORMAT": "text"}
    config = read({"config_file": str(file), "log_level": "error"}, environ)

    assert (config.log_level, config.log_format) == ("error", "text")
    assert config.log_stats_interval == 5.0
    assert config.web_telemetry_path == "/metrics"
    assert config.web_listen_address == (("127.0.0.1", 9857),)


def test_following_requests_and_blocks_is_configured(tmp_path: Path) -> None:
    """By default as the engine has it, a hundredth of the blocks; all of it in each form."""
    config = read({}, {})
    assert (config.kv_sample_rate, config.kv_scale_samples) == (0.01, False)
    assert (config.kv_max_tracked, config.requests_max_tracked) == (100_000, 100_000)
    assert (config.intervals_scheduled, config.intervals_inter_token) == ("first", "output")
    assert config.requests_max_age == 86400.0

    file = tmp_path / "sidestep.toml"
    file.write_text(
        "[kv]\nsample-rate = 1\nscale-samples = true\nmax-tracked = 7\n"
        "[intervals]\nscheduled = 'last'\ninter-token = 'token'\n"
    )
    config = read({"config_file": str(file)}, {"SIDESTEP_REQUESTS_MAX_AGE": "60"})
    assert (config.kv_sample_rate, config.kv_scale_samples, config.kv_max_tracked) == (1.0, True, 7)
    assert (config.intervals_scheduled, config.intervals_inter_token) == ("last", "token")
    assert config.requests_max_age == 60.0


def test_a_new_configuration_is_told_apart() -> None:
    """What is taken over, what needs a restart; the latter stays, and is told again."""
    old = read({}, {})
    flags = {"kv_sample_rate": "0.5", "log_format": "json", "metrics_legacy": True}
    new = dataclasses.replace(read(flags, {}), buckets={"request_latency": (1.0,)})
    now, taken, left = old.adjusted(new)

    assert taken == ["kv.sample-rate 0.5"]
    assert left == ["metrics.legacy", "log.format", "buckets"]
    assert now == dataclasses.replace(old, kv_sample_rate=0.5)
    assert now.adjusted(new) == (now, [], left)


def test_a_switch_that_is_not_given_leaves_the_say_to_the_others(tmp_path: Path) -> None:
    """The command line must not take its absence for a no."""
    file = tmp_path / "sidestep.toml"
    file.write_text("[metrics]\nlegacy = true\n[kv]\nscale-samples = true\n")

    def settings(*arguments: str, **environ: str) -> tuple[bool, bool]:
        config = read(serve.make_context("serve", list(arguments)).params, environ)
        return config.metrics_legacy, config.kv_scale_samples

    assert settings() == (False, False)
    assert settings("--config.file", str(file)) == (True, True)
    assert settings(SIDESTEP_METRICS_LEGACY="true") == (True, False)
    assert settings("--kv.scale-samples", SIDESTEP_KV_SCALE_SAMPLES="false") == (False, True)


def test_addresses_of_all_forms() -> None:
    """Host and port, all addresses, several."""
    flags: dict[str, Any] = {"web_listen_address": (":9000", "[::1]:9001", "10.0.0.1:9002")}

    assert read(flags, {}).web_listen_address == (("", 9000), ("::1", 9001), ("10.0.0.1", 9002))


def test_a_wrong_variable_is_named() -> None:
    """Not the flag that was never given."""
    with pytest.raises(ConfigError, match="SIDESTEP_LOG_LEVEL"):
        read({}, {"SIDESTEP_LOG_LEVEL": "loud"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_exits_0(number: signal.Signals, tmp_path: Path) -> None:
    """The ipc path is gone afterwards."""
    endpoint = f"ipc://{tmp_path}/i.ipc"
    arguments = ("serve", "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint)
    async with serving(*arguments) as (process, url):
        assert "sidestep_build_info" in await get(url)
        process.send_signal(number)
        output, _ = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 0
    assert b"Traceback" not in output
    assert not (tmp_path / "i.ipc").exists()


async def test_a_hangup_makes_it_read_the_configuration_again(tmp_path: Path) -> None:
    """A rate reaches the engines; a broken file, or none, leaves all as it was."""
    file, endpoint = tmp_path / "sidestep.toml", f"ipc://{tmp_path}/i.ipc"
    file.write_text("[kv]\nsample-rate = 0.25\n")
    arguments = (
        "serve", "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint,
        "--config.file", file,
    )  # fmt: skip
    labels = {"engine": "0", "model_name": "m"}
    engine = Publisher(endpoint, "s", [EngineInfo("e", "vllm", labels)], flush_interval=0.01)

    async def hang_up(content: str) -> list[str]:
        file.write_text(content)
        process.send_signal(signal.SIGHUP)
        return [await next_line(process) for _ in range(2 if "legacy" in content else 1)]

    async with serving(*arguments) as (process, url), contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.to_thread, engine.close)
        await until(lambda: engine.kv_sample_rate == 0.25)
        (said,) = await hang_up("[kv]\nsample-rate = 0.5\n")
        assert said.endswith(" INFO configuration reloaded: kv.sample-rate 0.5")
        await until(lambda: engine.kv_sample_rate == 0.5)

        for broken, why in BROKEN.items():
            (said,) = await hang_up(broken)
            assert " ERROR configuration not reloaded, the current one stays in effect: " in said
            assert why in said
        file.unlink()
        process.send_signal(signal.SIGHUP)
        assert f"cannot read {file}" in await next_line(process)
        assert "sidestep_build_info" in await get(url)
        assert engine.kv_sample_rate == 0.5

        said, warned = await hang_up("[kv]\nsample-rate = 0\n[metrics]\nlegacy = true\n")
        assert said.endswith("kv.sample-rate 0.0")
        assert warned.endswith(" WARNING changed settings that need a restart: metrics.legacy")
        await until(lambda: engine.kv_sample_rate == 0.0)
        (said,) = await hang_up("[kv]\nsample-rate = 0\n")
        assert said.endswith("no changes")
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
"""Files that must not change anything, not even by what is right in them."""


async def test_a_hangup_takes_over_the_log_level_but_no_flag_away(tmp_path: Path) -> None:
    """Flags and environment are as they were at the start; they win over the new file too."""
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
    """What it logs next."""
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 20)).decode().rstrip("\n")


async def test_log_lines_as_json(tmp_path: Path) -> None:
    """One object a line, the statistics as numbers."""
    endpoint = f"ipc://{tmp_path}/i.ipc"
    arguments = (
        "serve", "--web.listen-address", "127.0.0.1:0", "--ingest.endpoint", endpoint,
        "--log.format", "json", "--log.stats-interval", "0.2",
    )  # fmt: skip
    async with serving(*arguments) as (process, _):
        player = Replay(MAIN_RUN, endpoint, realtime=False, namespace="test")
        await asyncio.to_thread(player.run)
        assert process.stdout is not None
        line: dict[str, Any] = {}
        # The first may be about the beginning of the run only.
        while not line.get("prefix_hit_rate"):
            line = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        process.terminate()

    assert line["level"] == "info"
    assert line["who"] == "engine 0"
    assert line["generation_throughput"] > 0
    assert 0 < line["prefix_hit_rate"] < 1


def test_the_demo_once() -> None:
    """It ends by itself and says what was played."""
    done = sidestep("demo", "--once", "--speed", "max", "--web.listen-address", "127.0.0.1:0")

    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    assert "http://127.0.0.1:" in first
    assert "records 969" in last
    assert "generated tokens 6348" in last


async def test_the_demo_ends_on_ctrl_c() -> None:
    """In the middle of a round, cleanly."""
    async with serving("demo", "--web.listen-address", "127.0.0.1:0") as (process, url):
        async with asyncio.timeout(20):
            while "vllm:generation_tokens_total{" not in await get(url):
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 20)

    assert process.returncode == 0
    assert b"Traceback" not in output


@pytest.mark.parametrize("forward", [False, True], ids=["alone", "before an exporter"])
async def test_a_recording_replays_to_the_same_page(
    forward: bool, start: Start, tmp_path: Path
) -> None:
    """Recorded from a live stream, alone or passing it on; nothing is missing either way."""
    file, listen = tmp_path / "recording", f"ipc://{tmp_path}/tee.ipc"
    async with start() as exporter:
        onward = ["--connect", exporter.endpoints[0]] if forward else []
        tee = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sidestep", "record", str(file), "--listen", listen, *onward,
            stderr=asyncio.subprocess.PIPE, env=ENVIRON,
        )  # fmt: skip
        assert tee.stderr is not None
        await asyncio.wait_for(tee.stderr.readline(), 20)
        player = Replay(MAIN_RUN, listen, realtime=False, namespace="test")
        await asyncio.to_thread(player.run)
        live = parse(await get(exporter.url))
        tee.send_signal(signal.SIGINT)
        await asyncio.wait_for(tee.wait(), 20)
        assert tee.returncode == 0
    assert ("vllm:generation_tokens" in live) == forward

    async with start() as exporter:
        done = await asyncio.to_thread(
            sidestep, "replay", file, "--connect", exporter.endpoints[0], "--speed", "max"
        )
        again = parse(await get(exporter.url))
    assert done.returncode == 0, done.stderr
    async with start() as exporter:
        player = Replay(MAIN_RUN, exporter.endpoints[0], realtime=False, namespace="test")
        await asyncio.to_thread(player.run)
        direct = parse(await get(exporter.url))

    assert list(differences(direct, again, tolerance=1e-12)) == []
    if forward:
        assert list(differences(direct, live, tolerance=1e-12)) == []


PROMETHEUS = shutil.which("prometheus")


@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (apt: prometheus)")
async def test_a_real_prometheus_scrapes_the_demo(tmp_path: Path) -> None:
    """``up`` is 1, and a rate over the generated tokens is a number above 0."""
    async with serving("demo", "--web.listen-address", "127.0.0.1:0") as (_, url):
        target = url.removeprefix("http://").removesuffix("/metrics")
        held, port = taken_port()
        held.close()
        config = tmp_path / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 500ms}\n"
            f"scrape_configs: [{{job_name: sidestep, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        prometheus = await asyncio.create_subprocess_exec(
            str(PROMETHEUS), f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            api = f"http://127.0.0.1:{port}/api/v1/query"
            async with asyncio.timeout(60), aiohttp.ClientSession() as session:
                up = await answer(session, api, 'up{job="sidestep"}')
                rate = await answer(session, api, "rate(vllm:generation_tokens_total[10s]) > 0")
        finally:
            prometheus.terminate()
            await prometheus.wait()

    assert up == 1
    assert rate > 0


async def answer(session: aiohttp.ClientSession, api: str, query: str) -> float:
    """The value of ``query``, once there is one."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with session.get(api, params={"query": query}) as response:
                result = (await response.json())["data"]["result"]
                if result and float(result[0]["value"][1]) > 0:
                    return float(result[0]["value"][1])
        await asyncio.sleep(0.2)
