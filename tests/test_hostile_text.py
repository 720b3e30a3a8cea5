"""Names that peers, pages, files and the environment choose: none reaches a terminal or a log as it is."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from command_line import serving, sidestep
from request_runs import run as request_run
from request_runs import write
from sidestep.protocol.limits import VERSION, escape
from sidestep.protocol.messages import EngineInfo, Hello
from sidestep.telemetry import logs
from socket_peers import connect
from web_servers import server

HOSTILE = "x\x1b]0;title\x07\r\nFORGED \u202eline\x9b2J\x7f\u2028\U000e0041"
"""Sets the terminal's title, begins a line, turns it around, clears the screen; and a tag."""
MODEL = HOSTILE.replace("\r\n", "\\n")  # as a page of metrics escapes a newline
PAGE = f"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{MODEL}"}} 1
vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} 1
"""


def assert_plain(*outputs: str) -> None:
    """Fail unless all lines are printable, and none is one that a name began."""
    for output in outputs:
        for line in output.split("\n"):
            assert line.isprintable(), ascii(line)
            assert not line.startswith("FORGED")


async def run(*arguments: object, **environ: str) -> str:
    """Run a command to its end; return what it printed, after checking it."""
    done = await asyncio.to_thread(sidestep, *arguments, **environ)
    assert_plain(done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


async def test_a_peer_of_an_exporter(tmp_path: Path) -> None:
    """The log of a real exporter, its findings and ``top --once``."""
    ingest = f"ipc://{tmp_path}/ingest.ipc"
    flags = ("--ingest.endpoint", ingest, "--web.listen-address", "127.0.0.1:0")
    labels = {"engine": HOSTILE, "model_name": HOSTILE}
    async with serving("serve", *flags) as (process, url), connect(ingest) as peer:
        root = url.removesuffix("/metrics")
        infos = [EngineInfo(HOSTILE, "vllm", labels), EngineInfo("e", HOSTILE, {})]
        for number, info in enumerate(infos):
            await peer.send(Hello(VERSION, f"{HOSTILE}{number}", number, 1, 1, [info]))
        await peer.send(Hello(VERSION + 1, HOSTILE, 3, 1, 1, []))
        while "SD106" not in await run("doctor", root):
            pass
        await run("doctor", "--json", root)
        await run("top", "--once", "--interval", "0.1", root)
        process.terminate()
        out, _ = await process.communicate()
    assert "refused" in out.decode()
    assert_plain(out.decode())


async def test_a_page_of_metrics(tmp_path: Path) -> None:
    """``doctor`` and ``top`` of an engine's page; error texts and redirects of a server."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=PAGE)

    async with server(page, "/{path:.*}") as url:
        board = tmp_path / "board.json"
        query = 'vllm:num_requests_running{model_name="none"}'
        board.write_text(json.dumps({"title": HOSTILE, "expr": query}))
        for form in ((), ("--json",)):
            named = await run(
                "doctor", *form, "--engine-page", f"{url}/metrics", "--dashboard", board
            )
            assert "SD408" in named
            await run("top", "--once", *form, "--interval", "0.1", f"{url}/metrics")


async def test_files_and_the_environment(tmp_path: Path) -> None:
    """Manifests, dashboards, rules, recordings, names of files, and variables."""
    container = {"name": HOSTILE, "image": "sidestep", "args": ["serve", f"--{HOSTILE}"]}
    pod = {"kind": "Pod", "metadata": {"name": HOSTILE}, "spec": {"containers": [container]}}
    manifest, rules = tmp_path / "a.yaml", tmp_path / f"{HOSTILE.replace('/', '')}.yaml"
    manifest.write_text(yaml.safe_dump(pod))
    rules.write_text(
        yaml.safe_dump(
            {"groups": [{"name": HOSTILE, "rules": [{"alert": HOSTILE, "expr": HOSTILE}]}]}
        )
    )
    for form in ((), ("--json",)):
        assert "SD514" in await run("doctor", *form, "--manifest", manifest, "--rules", rules)
    (tmp_path / "trace.jsonl").write_text(HOSTILE)
    await run("whatif", tmp_path / "trace.jsonl")
    await run("compare", tmp_path / "trace.jsonl", f"{HOSTILE}{{{HOSTILE}}}@{HOSTILE}")
    log = write(tmp_path / "log.jsonl", request_run(1, 20, model=HOSTILE))
    for form in ((), ("--json",)):
        await run("compare", *form, log, log)
    await run("replay", tmp_path / "trace.jsonl", "--connect", f"ipc://{tmp_path}/none")
    await run("serve", SIDESTEP_INGEST_ENDPOINT=HOSTILE, SIDESTEP_LIMITS_MEMORY_HARD=HOSTILE)
    await run("serve", f"--{HOSTILE}")
    await run("doctor", "--environment", SIDESTEP_ENDPOINT=HOSTILE, SIDESTEP_NAMESPACE=HOSTILE)


@pytest.mark.parametrize("form", ["text", "json"])
def test_lines_of_the_log(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message, a member of JSON and a traceback stay within their lines; other packages' lines, too."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(out))
    logs.set_up("info", form)
    error = ValueError(HOSTILE)
    try:
        logging.getLogger("sidestep.test").error(
            "failed: %s", HOSTILE, exc_info=error, extra={"fields": {"name": HOSTILE}}
        )
        assert logging.lastResort is not None
        logging.lastResort.handle(logging.makeLogRecord({"msg": HOSTILE, "levelname": "ERROR"}))
    finally:
        for name in logs.PACKAGES:
            logging.getLogger(name).handlers = []
            logging.getLogger(name).propagate = True
    lines = out.getvalue().splitlines()
    assert_plain(out.getvalue())
    starts = r"\{" if form == "json" else r"\d{4}-|  "
    assert [line for line in lines if not re.match(starts, line)] == []
    if form == "json":
        assert json.loads(lines[0])["name"] == HOSTILE


@given(st.text())
def test_escaping(text: str) -> None:
    """The result is printable, and within a string of JSON it is the same text."""
    assert escape(text).isprintable()
    assert json.loads(escape(json.dumps(text, ensure_ascii=False))) == text
    assert escape(escape(text)) == escape(text)
