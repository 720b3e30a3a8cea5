"""Programs that tests run in a Python process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_python(program: str, *arguments: object, **environ: str) -> str:
    """Run ``program``, which can import what tests can, and return its output.

    Raises:
        AssertionError: Its exit code is not 0.
        subprocess.TimeoutExpired: It takes longer than 30 seconds.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
