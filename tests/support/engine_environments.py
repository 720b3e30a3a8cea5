"""Python environments with metadata of packages, and processes with an engine's command line in them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sidestep_tools.doctor.environment import processes
from sidestep_tools.doctor.environment.packages import Packages
from sidestep_tools.doctor.environment.processes import Process

PLUGIN = """\
[vllm.stat_logger_plugins]
sidestep = sidestep_adapters.vllm.plugin:SidestepStatLogger

[sglang.srt.plugins]
sidestep = sidestep_adapters.sglang.plugin:plugin
"""
SCRIPT = "import time; print(flush=True); time.sleep(600)"


class EngineEnvironment:
    """A virtual environment of which only the metadata of packages is there.

    Args:
        root: Directory to make it in.
        packages: Releases of packages; without any, a good environment of vLLM.

    Attributes:
        python: How processes name the interpreter.
    """

    def __init__(self, root: Path, **packages: str) -> None:
        self.root = root / "venv"
        self.python = str(self.root / "bin" / "python")
        self.site = self.root / "lib" / "python3.11" / "site-packages"
        self.site.mkdir(parents=True)
        (self.root / "bin").mkdir()
        (self.root / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
        (self.root / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
        for module in ("vllm/entrypoints/openai/api_server", "sglang/launch_server"):
            file = self.site / f"{module}.py"
            file.parent.mkdir(parents=True)
            file.write_text(SCRIPT)
        for program in ("vllm", "sglang"):
            (self.root / "bin" / program).write_text(SCRIPT)
        good = {"vllm": "0.32.0", "sidestep": "0.1.0"}
        for name, version in (packages or good).items():
            self.install(name, version)

    def install(self, name: str, version: str, entry_points: str = PLUGIN) -> None:
        """Add the metadata of a package."""
        metadata = self.site / f"{name}-{version}.dist-info"
        metadata.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        if name == "sidestep":
            (metadata / "entry_points.txt").write_text(entry_points)
        (metadata / "METADATA").write_text(text)

    @property
    def packages(self) -> Packages:
        """What is installed."""
        return Packages("made", [str(self.site)])

    @contextlib.contextmanager
    def running(
        self, *arguments: str, user: int | None = None, **environ: str
    ) -> Iterator[Process]:
        """Run the environment's Python; yield how the process is found."""
        command = [self.python, *arguments]
        given = {"PATH": os.environ["PATH"], **environ}
        # The interpreter of a user's installation may be closed to others.
        program = "/usr/bin/python3" if user else None
        with subprocess.Popen(
            command, executable=program, stdout=subprocess.PIPE, env=given, user=user, cwd=self.root
        ) as started:
            assert started.stdout is not None
            started.stdout.readline()
            try:
                found = [each for each in processes.find() if each.pid == started.pid]
                assert found, "the process is not taken for an engine"
                yield found[0]
            finally:
                started.kill()

    def vllm(self, *options: str, **environ: str) -> contextlib.AbstractContextManager[Process]:
        """Run a process with vLLM's command line."""
        return self.running(
            str(self.root / "bin" / "vllm"), "serve", "MODEL", *options, user=None, **environ
        )

    def sglang(self, *options: str, **environ: str) -> contextlib.AbstractContextManager[Process]:
        """Run a process with SGLang's command line."""
        return self.running(
            "-m", "sglang.launch_server", "--model-path", "M", *options, user=None, **environ
        )
