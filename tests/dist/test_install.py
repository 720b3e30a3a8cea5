"""The files of ``make dist``, installed and run as users do; nothing comes from the checkout."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from charts import CHART, ENGINE, VALUES, rendered
from command_line import ENVIRON
from installations import ROOT, interpreter, made, pip
from manifests import pods, sidesteps
from ports import free_port
from sidestep import __version__

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

DIST = ROOT / "dist"
WHEEL = DIST / f"sidestep-{__version__}-py3-none-any.whl"
DEMO = ("demo", "--once", "--speed", "max", "--web.listen-address", "127.0.0.1:0")
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="file systems and containers need root")
INSIDE = (
    "unshare", "--mount", "sh", "-c",
    'mount --rbind /proc "$0/proc"; mount --rbind /dev "$0/dev"; exec chroot "$0" "$@"',
)  # fmt: skip
"""Runs a command in another root, which comes first, with the host's /proc and /dev."""
REFUSE_EXECUTABLE_MEMORY = """
import ctypes, os, sys
assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""PR_SET_MDWE, of Linux 6.3 and later, refuses what the unit's MemoryDenyWriteExecute refuses."""
EXPOSURE = 25
"""Most tenths of what ``systemd-analyze security`` counts from 0 (safe) to 10."""


@pytest.fixture(autouse=True)
def built() -> None:
    """Fail if there is nothing to install."""
    assert (DIST / "SHA256SUMS").exists(), "there is nothing in dist/: run make dist"


def unpacked(name: str, into: Path) -> Path:
    """Unpack an archive of dist/ and return its directory."""
    with tarfile.open(DIST / name) as tar:
        tar.extractall(into)
        return into / tar.getnames()[0].partition("/")[0]


def run(*command: object, **environ: str) -> str:
    """Run a command without this environment and return its output."""
    clean = {key: value for key, value in ENVIRON.items() if key != "VIRTUAL_ENV"}
    arguments = [*map(str, command)]
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=False, cwd="/", env={**clean, **environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def works(sidestep: Path | str, *before: object) -> None:
    """Check that a command is this release's, and that it serves recorded engines."""
    assert run(*before, sidestep, "--version") == f"sidestep, version {__version__}\n"
    assert "vLLM" in run(*before, sidestep, *DEMO)


def page(url: str) -> str:
    """Return a page once it is there."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
        assert time.monotonic() < deadline, f"no answer of {url}"
        time.sleep(0.1)


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_wheel_in_an_empty_environment(version: str, tmp_path: Path) -> None:
    """The package brings what it needs."""
    run(interpreter(version), "-m", "venv", tmp_path)
    pip(tmp_path / "bin" / "python", "--only-binary", ":all:", WHEEL)
    run(tmp_path / "bin" / "python", "-m", "pip", "check")
    works(tmp_path / "bin" / "sidestep")


@pytest.mark.parametrize(("version", "choice"), [("3.10", "--lowest"), ("3.13", "--newest")])
def test_the_wheel_with_the_oldest_and_newest_dependencies(version: str, choice: str) -> None:
    """Every module loads and every command works, with all extras."""
    python = made(version, choice)
    pip(python, "--no-deps", "--force-reinstall", WHEEL)
    run(python, "-I", ROOT / "tools" / "smoke.py")


def test_the_source_distribution_makes_the_same_wheel(tmp_path: Path) -> None:
    """Byte by byte, at the release's time."""
    epoch = run("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    source = unpacked(f"sidestep-{__version__}.tar.gz", tmp_path)
    hatchling = ROOT / ".venv" / "bin" / "hatchling"
    subprocess.run(
        [hatchling, "build", "-t", "wheel", "-d", tmp_path],
        check=True, cwd=source, env={**os.environ, "SOURCE_DATE_EPOCH": epoch},
    )  # fmt: skip

    assert (tmp_path / WHEEL.name).read_bytes() == WHEEL.read_bytes()


@pytest.fixture(scope="module")
def installers() -> Path:
    """Return the directory of pipx, uv and the library of CycloneDX."""
    folder = ROOT / "build" / "installers"
    if not (folder / "bin" / "uvx").exists():
        run(interpreter("3.11"), "-m", "venv", folder)
        pip(folder / "bin" / "python", "pipx", "uv", "cyclonedx-python-lib[json-validation]")
    return folder / "bin"


def test_pipx_installs_the_wheel(installers: Path, tmp_path: Path) -> None:
    """The command is on its path."""
    places = {"PIPX_HOME": f"{tmp_path}/home", "PIPX_BIN_DIR": f"{tmp_path}/bin"}
    run(installers / "pipx", "install", "--quiet", WHEEL, **places)
    works(tmp_path / "bin" / "sidestep")


def test_uvx_runs_the_wheel(installers: Path, tmp_path: Path) -> None:
    """Without an installation."""
    works("sidestep", installers / "uvx", "--cache-dir", tmp_path, "--from", WHEEL)


def test_the_bill_of_materials_is_valid(installers: Path) -> None:
    """By CycloneDX' schema; it has the image's packages of both kinds."""
    bill = DIST / f"sidestep-{__version__}.cdx.json"
    program = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
sys.exit(str(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()) or "") or 0)
"""
    run(installers / "python", "-c", program, bill)
    names = {one["name"] for one in json.loads(bill.read_text())["components"]}

    assert {"aiohttp", "pyzmq", "libc6", "python3.11"} <= names


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_chart_is_rendered(values: Path, tmp_path: Path) -> None:
    """Packed, it renders as in the repository, but for its version."""
    chart = unpacked(f"sidestep-{__version__}.tgz", tmp_path)
    text = json.dumps(rendered(CHART, values)).replace('"dev"', f'"{__version__}"')

    assert rendered(chart, values) == json.loads(text)


def test_the_library_chart_is_rendered(tmp_path: Path) -> None:
    """An engine's chart that depends on it has this release's sidecar."""
    library = unpacked(f"sidestep-lib-{__version__}.tgz", tmp_path)
    ((_, pod),) = [one for each in rendered(ENGINE, library=library) for one in pods(each)]

    assert {one["image"] for one in sidesteps(pod)} == {f"sidestep:{__version__}"}


@pytest.fixture(scope="module")
def debian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bare Debian with the package installed."""
    root = tmp_path_factory.mktemp("debian") / "root"
    run(
        "mmdebstrap", "--quiet", "--variant=apt", "--skip=cleanup/apt/lists",
        "--include=systemd,adduser,man-db", "bookworm", root,
    )  # fmt: skip
    (package,) = DIST.glob("*.deb")
    shutil.copy(package, root / "tmp" / "sidestep.deb")
    shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
    inside(root, "apt-get", "install", "-y", "-qq", "--no-install-recommends", "/tmp/sidestep.deb")
    return root


def inside(root: Path, *command: object) -> str:
    """Run a command in another root and return its output."""
    return run(*INSIDE, root, *command, DEBIAN_FRONTEND="noninteractive")


def as_user(user: str, *groups: str) -> list[str]:
    """Return the command that runs another one as a user, with systemd's ban on new executable memory."""
    ids = ["setpriv", f"--reuid={user}", f"--regid={user}", f"--groups={','.join([user, *groups])}"]
    return [
        *ids,
        "--no-new-privs",
        "--bounding-set=-all",
        "python3",
        "-c",
        REFUSE_EXECUTABLE_MEMORY,
    ]


@NEEDS_ROOT
def test_the_debian_package_is_complete(debian: Path) -> None:
    """The command, the man page and completions are there, and the service's user."""
    assert inside(debian, "sidestep", "--version") == f"sidestep, version {__version__}\n"
    assert "SIDESTEP(1)" in inside(debian, "man", "sidestep")
    assert inside(debian, "id", "-Gn", "sidestep") == "sidestep\n"
    completions = "/usr/share/bash-completion/completions/sidestep"
    assert "_SIDESTEP_COMPLETE" in inside(debian, "cat", completions)


@NEEDS_ROOT
def test_systemd_accepts_the_unit(debian: Path) -> None:
    """The unit has no error, and exposes little."""
    unit = "/usr/lib/systemd/system/sidestep.service"
    inside(debian, "systemd-analyze", "verify", "--man=no", unit)
    inside(debian, "systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}", unit)


@NEEDS_ROOT
def test_the_service_serves_engines_of_its_group(debian: Path) -> None:
    """The unit's command runs as its user, without rights; an engine's user sends to it."""
    unit = (debian / "usr/lib/systemd/system/sidestep.service").read_text()
    (command,) = [line.split("=", 1)[1] for line in unit.splitlines() if "ExecStart=" in line]
    port = free_port()
    settings = debian / "etc/sidestep/sidestep.toml"
    settings.write_text(settings.read_text().replace("127.0.0.1:9857", f"127.0.0.1:{port}"))
    for folder in ("/run/sidestep", "/var/lib/sidestep"):
        inside(debian, "install", "-d", "-o", "sidestep", "-g", "sidestep", folder)
    inside(debian, "useradd", "--groups", "sidestep", "vllm")
    service = subprocess.Popen([*INSIDE, debian, *as_user("sidestep"), *command.split()])
    try:
        page(f"http://127.0.0.1:{port}/-/ready")
        (recording,) = debian.glob("opt/sidestep/venv/lib/*/*/sidestep/data/vllm-aborts.rec.gz")
        endpoint = "ipc:///run/sidestep/ingest/ingest.ipc"
        replay = ["replay", f"/{recording.relative_to(debian)}", "--connect", endpoint]
        inside(debian, *as_user("vllm", "sidestep"), "sidestep", *replay, "--speed", "max")
        text = page(f"http://127.0.0.1:{port}/metrics")
    finally:
        service.terminate()
        code = service.wait(30)

    assert "vllm:generation_tokens_total" in text
    assert code == 0
    assert (debian / "var/lib/sidestep/state/snapshot").is_file()


@NEEDS_ROOT
def test_a_purge_leaves_nothing(debian: Path) -> None:
    """But the user, and what is still in /run until the next boot."""
    inside(debian, "apt-get", "purge", "-y", "-qq", "sidestep")
    folders = [debian / name for name in ("etc", "opt", "usr", "var/lib")]
    left = [path for folder in folders for path in folder.rglob("*sidestep*")]

    assert left == []


@pytest.fixture
def podman() -> Iterator[Callable[..., str]]:
    """Return a function that runs podman with a storage of its own, which has the image."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    # The path of its state has at most 50 characters.
    place = Path(tempfile.mkdtemp(prefix="dist-"))
    places = f"--root={place}/root --runroot={place}/run --storage-driver=overlay".split()
    call = partial(run, "podman", *places, "--runtime=runc", "--cgroup-manager=cgroupfs")
    try:
        call("load", "--quiet", "--input", DIST / f"sidestep-{__version__}-image.tar")
        yield call
    finally:
        shutil.rmtree(place, ignore_errors=True)


@NEEDS_ROOT
def test_podman_runs_the_image(podman: Callable[..., str]) -> None:
    """On a read-only file system without rights; it serves, and ends by SIGTERM with 0."""
    image = f"localhost/sidestep:{__version__}"
    # Podman's defaults are above what a root without CAP_SYS_RESOURCE may set.
    kept = "--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024"
    assert podman("run", "--rm", *kept, "--network=none", image, "--version").endswith(
        f"{__version__}\n"
    )
    port = free_port()
    listen = f"--web.listen-address=127.0.0.1:{port}"
    limits = [
        *kept,
        "--read-only",
        "--cap-drop=all",
        "--security-opt=no-new-privileges",
        "--network=host",
    ]
    volumes = "--volume=/run/sidestep", "--volume=/var/lib/sidestep"
    command = "serve", listen, "--shutdown.linger=0"
    podman("run", "--detach", "--name=x", *limits, *volumes, image, *command)
    try:
        assert f'version="{__version__}"' in page(f"http://127.0.0.1:{port}/metrics")
    finally:
        podman("stop", "--time=30", "x")
    assert podman("inspect", "--format={{.State.ExitCode}}", "x") == "0\n"
