"""A machine as a reader of the documents has it: a clone, an environment, and engines that are stand-ins.

Commands run as they stand in a document, in one shell, with three changes: the port 9857 is a free one, and
``/tmp/sidestep`` and ``/dev/shm/sidestep`` are directories of the test. Nothing comes from the network: pip finds
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
from collections.abc import Iterator, Mapping
from pathlib import Path

from ports import free_port

ROOT = Path(__file__).parents[2]
CLONED = (
    "LICENSE", "Makefile", "README.md", "adapters", "deploy", "docs", "exporter", "grafana", "pyproject.toml",
    "tools",
)  # fmt: skip
STAND_INS = {"vllm": "stand_in_vllm.py"}
"""Programs on the path in place of engines."""
PATIENCE = 60.0
"""Seconds for a command, and for an output to appear."""
ENDED = "readers-shell-ended"
FAILED = "readers-shell-failed"


class Machine:
    """A shell whose current directory is a clone of the repository.

    Attributes:
        clone: The clone's directory.
        port: Free port in place of 9857.
    """

    def __init__(self, directory: Path) -> None:
        self.clone = directory / "clone"
        self.port = free_port()
        self._directory = directory
        self._count = 0
        self._output = directory / "output"
        self._make()
        with self._output.open("wb") as output:
            self._shell = subprocess.Popen(
                ["bash", "--noprofile", "--norc"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.clone,
                env=self._environ,
                start_new_session=True,
                text=True,
            )
        self._send(f"trap 'echo {FAILED}: $BASH_COMMAND' ERR")

    def run(self, text: str) -> str:
        """Run commands and return their output, and that of background jobs.

        Raises:
            AssertionError: A command failed, or did not end.
        """
        before = self._output.stat().st_size
        self._count += 1
        mark = f"{ENDED} {self._count}"
        self._send(f"{self.changed(text)}\necho {mark}")
        self.wait_for(mark)
        said = self._output.read_bytes()[before:].decode().replace(mark, "")
        assert FAILED not in said, said
        return said

    def wait_for(self, text: str) -> None:
        """Wait until the output of all commands contains ``text``.

        Raises:
            AssertionError: It does not.
        """
        deadline = time.monotonic() + PATIENCE
        while text not in self._output.read_text():
            assert time.monotonic() < deadline, f"no {text!r} in {self._output.read_text()}"
            time.sleep(0.05)

    def until(self, command: str, lines: list[str]) -> None:
        """Repeat a command until its output has these lines, in which ``...`` is any text.

        Raises:
            AssertionError: It has not.
        """
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
        text = re.sub(r"/(?:tmp|dev/shm|run)/sidestep\b", str(self._directory / "s"), text)
        return text.replace("9857", str(self.port))

    def close(self) -> None:
        """End the shell and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()

    def _send(self, text: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{text}\n")
        self._shell.stdin.flush()

    def _make(self) -> None:
        """Make the clone, its environment, and the programs that stand in for engines."""
        for name in CLONED:
            source = ROOT / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "images")
                shutil.copytree(source, self.clone / name, ignore=ignored)
            else:
                self.clone.mkdir(exist_ok=True)
                shutil.copy(source, self.clone / name)
        packages = self._directory / "packages"
        packages.mkdir()
        for path in Path(sysconfig.get_path("purelib")).iterdir():
            if not re.match(r"sidestep|_editable|pip|.*\.pth$", path.name):
                (packages / path.name).symlink_to(path)
        subprocess.run([sys.executable, "-m", "venv", self.clone / ".venv"], check=True)
        programs = self._directory / "programs"
        programs.mkdir()
        for name, file in STAND_INS.items():
            program = programs / name
            program.write_text(
                f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{ROOT}/tests/support" exec python {ROOT}/tests/support/{file} "$@"\n'
            )
            program.chmod(0o755)
        (packages / "sglang").mkdir()
        (packages / "sglang" / "__init__.py").touch()
        (packages / "sglang" / "launch_server.py").write_text(
            f"import sys\nsys.path.append({str(ROOT / 'tests' / 'support')!r})\n"
            "import stand_in_sglang\nstand_in_sglang.main()\n"
        )
        self._environ: Mapping[str, str] = {
            "HOME": str(self._directory),
            "PATH": f"{self.clone}/.venv/bin:{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(packages),
            "PIP_NO_INDEX": "1",
            # pip reads this as --no-build-isolation: hatchling is among the packages.
            "PIP_NO_BUILD_ISOLATION": "0",
            "SIDESTEP_WEB_LISTEN_ADDRESS": f"127.0.0.1:{self.port}",
        }
        # As `make` does it, which would need packages of the network.
        subprocess.run(
            [self.clone / ".venv" / "bin" / "pip", "install", "--quiet", "."],
            check=True,
            cwd=self.clone,
            env=self._environ,
        )
        (self.clone / ".venv" / ".installed").touch()


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """Make a machine, and end all that was started on it."""
    # A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="reader") as name:
        made = Machine(Path(name))
        try:
            yield made
        finally:
            made.close()
