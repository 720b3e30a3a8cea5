"""A process that holds what is measured: a case a line goes in, a result a line comes out."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, final

VLLM = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "none",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment of a process that imports vLLM and measures."""


@dataclasses.dataclass(frozen=True)
class Result:
    """Nanoseconds: of the calling thread per call with and without gap, of the process a call."""

    gap: list[int]
    hot: list[int]
    process: float
    recorded: int = 0


@final
class Worker:
    """Runs ``python -m`` with these arguments; use it as a context."""

    def __init__(self, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        inherited = {**os.environ, **VLLM}
        # prometheus_client reads it when it is imported.
        inherited.pop("PROMETHEUS_MULTIPROC_DIR", None)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, **environ},
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30.0)

    def run(self, case: Any) -> Result:
        """Measure ``case``, a dataclass."""
        to, answers = self._process.stdin, self._process.stdout
        if to is None or answers is None:
            raise RuntimeError("a worker has pipes")
        to.write(json.dumps(dataclasses.asdict(case)) + "\n")
        to.flush()
        answer = answers.readline()
        if not answer:
            raise SystemExit("a worker has died; its error stands above")
        return Result(**json.loads(answer))


def cases(answers: IO[str]) -> Iterator[tuple[dict[str, Any], Callable[[Result], None]]]:
    """In a worker: each case, and what takes its result; ``answers`` is from ``own_output``."""

    def answer(result: Result) -> None:
        answers.write(json.dumps(dataclasses.asdict(result)) + "\n")
        answers.flush()

    for line in sys.stdin:
        yield json.loads(line), answer


def own_output() -> IO[str]:
    """The pipe for answers; whatever a library prints goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
