"""`sidestep doctor URL`: an exporter's own findings, and what only others can see."""

from __future__ import annotations

import asyncio
import json
import tarfile
import time
from email.utils import formatdate
from pathlib import Path
from subprocess import CompletedProcess

import bcrypt
import pytest
from aiohttp import web

from command_line import one_line, sidestep
from exporters import Start
from ports import free_port
from sidestep import __version__
from web_servers import server

DOCTOR = "/api/v1/doctor"


async def doctor(*arguments: str, **environ: str) -> CompletedProcess[str]:
    """Run the command beside the servers of the test."""
    return await asyncio.to_thread(sidestep, "doctor", *arguments, **environ)


async def codes(*arguments: str, **environ: str) -> list[str]:
    """Return the codes of all findings."""
    done = await doctor("--json", *arguments, **environ)
    assert done.stderr == ""
    return [each["code"] for each in json.loads(done.stdout)["findings"]]


async def test_a_good_exporter(start: Start, tmp_path: Path) -> None:
    """Nothing is wrong just after the start."""
    async with start(state_dir=str(tmp_path / "state")) as exporter:
        done = await doctor(exporter.url)
    assert done.stdout == f"checked {exporter.url}: nothing is wrong\n"
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_support_bundle(start: Start, tmp_path: Path) -> None:
    """It has the findings, each exporter's pages, its settings without secrets, and its log."""
    file = tmp_path / "bundle.tar.gz"
    secret = "https://tenant.example/v1?key=abc"
    async with start(scrape=[secret]) as exporter:
        done = await doctor(exporter.url, "http://127.0.0.1:1", "--bundle", str(file))
        one_line(
            await doctor("--bundle", "/no/such/file"), 2, "--bundle /no/such/file: No such file"
        )
    assert done.returncode == 2
    with tarfile.open(file) as archive:
        found = {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]

    assert json.loads(found["report.json"])["checked"][0] == exporter.url
    assert b"sidestep_build_info{" in found["exporter-1/metrics.txt"]
    assert b"scrape https://" in found["exporter-1/debug.txt"]
    assert found["exporter-2/live.json"].startswith(b"cannot connect")
    assert not [name for name, text in found.items() if b"key=abc" in text]


async def test_exit_codes(start: Start) -> None:
    """An error is 2; a lower severity is 1 if --fail-on says so."""
    async with start() as exporter:
        assert (await doctor(exporter.url)).returncode == 0
        assert (await doctor(exporter.url, "--fail-on", "info")).returncode == 1
        assert (await doctor(exporter.url, "--fail-on", "warning")).returncode == 0
    assert (await doctor(exporter.url, "--fail-on", "info")).returncode == 2


async def test_text_names_code_subject_and_remedy(start: Start) -> None:
    """A finding takes two lines."""
    async with start() as exporter:
        first, remedy, last = (await doctor(exporter.url)).stdout.splitlines()
    assert first == f"SD120 info: {exporter.url}: exporter: --state.dir is not set"
    assert remedy.startswith("      Set --state.dir to")
    assert last == f"checked {exporter.url}: 1 info"


async def test_no_exporter() -> None:
    """The cause is the system's."""
    url = f"http://127.0.0.1:{free_port()}"
    done = await doctor(url)
    assert done.stdout.startswith(f"SD150 error: {url}: cannot connect: Connection refused\n")


async def test_a_password(start: Start, tmp_path: Path) -> None:
    """Without one, access is denied; the variable or the option gives it."""
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    (tmp_path / "web.yml").write_text(f"basic_auth_users:\n  sre: {hashed}\n")
    async with start(web_config_file=str(tmp_path / "web.yml")) as exporter:
        assert await codes(exporter.url) == ["SD151"]
        assert "SD151" not in await codes(exporter.url, "--user", "sre:secret")
        given = {"SIDESTEP_PASSWORD": "secret"}
        assert "SD151" not in await codes(exporter.url, "--user", "sre", **given)


@pytest.mark.parametrize(
    ("text", "date", "code"),
    [
        ("vllm:num_requests_running 1\n", 0.0, "SD152"),
        (json.dumps({"version": __version__, "findings": []}), -60.0, "SD153"),
        (json.dumps({"version": __version__, "findings": []}), 60.0, "SD153"),
        (json.dumps({"version": "9.9", "findings": []}), 0.0, "SD154"),
    ],
)
async def test_another_server(text: str, date: float, code: str) -> None:
    """Another program, a wrong clock and another release are each named."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text, headers={"Date": formatdate(time.time() + date)})

    async with server(answer, DOCTOR) as url:
        assert await codes(url) == [code]


def test_a_wrong_address() -> None:
    """A wrong address is a usage error, not a finding."""
    one_line(sidestep("doctor", "ftp://host"), 2, "must be a URL")
