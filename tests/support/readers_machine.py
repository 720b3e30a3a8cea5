"""A machine as a reader of the documents has it: a clone, an environment, and engines that are stand-ins.

Commands run as they stand in a document, in one shell, with two changes: the port 9857 is a free one, and
directories of sidestep below ``/run``, ``/opt`` and ``/etc`` are those of the test. Nothing comes from the network: pip finds
the dependencies that the tests' environment has.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ports import free_port

ROOT = Path(__file__).parents[2]
CLONED = (
    "LICENSE", "Makefile", "README.md", "adapters", "deploy", "docs", "exporter", "grafana", "pyproject.toml",
    "tests/data/core_lora.rec.gz", "tests/data/vllm_kv_events.jsonl.gz", "tools",
)  # fmt: skip
PROGRAMS = {
    "vllm": """
PYTHONPATH="$PYTHONPATH:$SUPPORT" exec python "$SUPPORT/stand_in_vllm.py" "$@"
""",
    # It starts what the unit of this name starts.
    "systemctl": """
test "$1 $2" = "enable --now" || exit 1
$(sed -n 's/^ExecStart=//p' "$HOME/etc/systemd/system/$3.service") &
""",
    # The real client reads the command line, and reaches no daemon: no container is ever started.
    "docker": """
said=$(DOCKER_HOST=unix:///nowhere.sock "$DOCKER" "$@" 2>&1)
case $said in *"Cannot connect to the Docker daemon"*) exit 0 ;; esac
echo "$said"; exit 1
""",
    # The real one renders; the rest reaches no cluster. What is applied is in a file.
    "kubectl": """
case $1 in
kustomize) exec "$KUBECTL" "$@" ;;
apply) test "$2" = -f && (echo "---"; cat "$3") >> "$HOME/applied.yaml"; exit ;;
esac
said=$(KUBECONFIG=/dev/null "$KUBECTL" "$@" 2>&1)
case $said in *"localhost:8080 was refused"*) exit 0 ;; esac
echo "$said"; exit 1
""",
}
"""Programs on the path, in place of engines and of what a test cannot have."""
PATIENCE = 60.0
"""Seconds for a command, and for an output to appear."""
ENDED = "readers-shell-ended"
FAILED = "readers-shell-failed"


class Machine:
    """A shell whose current directory is a clone of the repository.

    Attributes:
        home: The home directory; files of ``/etc`` and ``/opt`` are below it.
        clone: The clone's directory.
        port: Free port in place of 9857.
        page_port: Port of an engine's page in place of 8000; 0: there is none.
    """

    def __init__(self, home: Path, environ: Mapping[str, str]) -> None:
        self.home = home
        self.clone = home / "clone"
        self.port = free_port()
        self._count = 0
        self._output = home / "output"
        self.page_port = 0
        for used in ("s", ".local", "user"):
            shutil.rmtree(home / used, ignore_errors=True)
        (home / "user").mkdir(mode=0o700)
        with self._output.open("wb") as output:
            self._shell = subprocess.Popen(
                ["bash", "--noprofile", "--norc"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.clone,
                env={**environ, "SIDESTEP_WEB_LISTEN_ADDRESS": f"127.0.0.1:{self.port}"},
                start_new_session=True,
                text=True,
            )
        self._send(f"trap 'echo {FAILED}: $BASH_COMMAND' ERR")

    def run(self, text: str) -> str:
        """Run commands and return their output, and that of background jobs."""
        before = self._output.stat().st_size
        self._count += 1
        mark = f"{ENDED} {self._count}"
        self._send(f"{self.changed(text)}\necho {mark}")
        self.wait_for(mark)
        said = self._output.read_bytes()[before:].decode().replace(mark, "")
        assert FAILED not in said, said
        return said

    def wait_for(self, text: str) -> None:
        """Wait until the output of all commands contains ``text``."""
        deadline = time.monotonic() + PATIENCE
        while text not in self._output.read_text():
            assert time.monotonic() < deadline, f"no {text!r} in {self._output.read_text()}"
            time.sleep(0.05)

    def until(self, command: str, lines: list[str]) -> None:
        """Repeat a command until its output has these lines, in which ``...`` is any text."""
        lines = list(map(self.changed, lines))
        wanted = [
            re.compile(re.escape(line).replace(r"\.\.\.", ".*"), re.MULTILINE) for line in lines
        ]
        deadline = time.monotonic() + PATIENCE
        while True:
            # A search without a result is a failure, until there is one.
            said = self.run(f"{command} || true" if lines else command)
            if all(line.search(said) for line in wanted):
                return
            assert time.monotonic() < deadline, f"{command}: {lines} not in {said[-4000:]}"
            time.sleep(0.1)

    def changed(self, text: str) -> str:
        """Return commands with the port and the directories of this machine."""
        text = re.sub(r"/run/sidestep\b", f"{self.home}/s", text)
        text = re.sub(r"(?<![\w.])/(?:opt|etc)/(?=sidestep|systemd)", rf"{self.home}\g<0>", text)
        if self.page_port:
            text = text.replace(":8000", f":{self.page_port}")
        return text.replace("9857", str(self.port))

    def save(self, text: str) -> Path:
        """Save a file whose first line is a comment with its path, below the clone or ``home``."""
        text = self.changed(text)
        path = self.clone / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def close(self) -> None:
        """End the shell and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()

    def _send(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{text}\n")
        self._shell.stdin.flush()


def _install(home: Path) -> dict[str, str]:
    """Make the clone, its environment and the programs; return the variables of a shell."""
    clone = home / "clone"
    for name in CLONED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "images")
            shutil.copytree(source, clone / name, ignore=ignored)
        else:
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, clone / name)
    packages = home / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"sidestep|_editable|pip|.*\.pth$", path.name):
            (packages / path.name).symlink_to(path)
    subprocess.run([sys.executable, "-m", "venv", clone / ".venv"], check=True)
    programs = home / "programs"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    metadata = packages / "sglang-0.5.23.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    (packages / "sglang").mkdir()
    (packages / "sglang" / "__init__.py").touch()
    (packages / "sglang" / "launch_server.py").write_text(
        f"import sys\nsys.path.append({str(ROOT / 'tests' / 'support')!r})\n"
        "import stand_in_sglang\nstand_in_sglang.main()\n"
    )
    environ = {
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home / "user"),
        "PATH": f"{clone}/.venv/bin:{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(packages),
        "SUPPORT": str(ROOT / "tests" / "support"),
        "DOCKER": shutil.which("docker") or "",
        "KUBECTL": shutil.which("kubectl") or "",
        "PIP_NO_INDEX": "1",
        # pip reads this as --no-build-isolation: hatchling is among the packages.
        "PIP_NO_BUILD_ISOLATION": "0",
    }
    # As `make` does it, which would need packages of the network.
    subprocess.run(
        [clone / ".venv" / "bin" / "pip", "install", "--quiet", "."],
        check=True,
        cwd=clone,
        env=environ,
    )
    (clone / ".venv" / ".installed").touch()
    # That of `make demo`.
    (clone / "build").mkdir()
    (clone / "build" / "demo-venv").symlink_to(clone / ".venv")
    return environ


@contextlib.contextmanager
def machines() -> Iterator[Callable[[], Machine]]:
    """Install once; yield a function that returns a machine on which nothing has run."""
    # A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="reader") as name:
        home = Path(name)
        environ = _install(home)
        yield lambda: Machine(home, environ)
