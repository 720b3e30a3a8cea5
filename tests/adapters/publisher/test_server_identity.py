"""The identity of a server, in all of its processes."""

from __future__ import annotations

import ast
import os
import socket
from pathlib import Path

import pytest

from descendants import Known
from python_programs import run_python

HOST = socket.gethostname()
PROGRAM = """
    import sys
    from descendants import known

    if __name__ == "__main__":
        method, depth, *sys.argv[1:] = sys.argv[1:]
        print(known(method, int(depth)))
"""


def run(method: str, depth: int, *arguments: str) -> list[Known]:
    """Return what a main process and its descendants know."""
    found: list[Known] = ast.literal_eval(run_python(PROGRAM, method, str(depth), *arguments))
    assert len(found) == depth + 1
    return found


def alone(*arguments: str) -> Known:
    """Return what a main process knows."""
    return run("spawn", 0, *arguments)[0]


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDESTEP_NAMESPACE", raising=False)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_all_processes_of_a_server_have_one_identity(method: str) -> None:
    """However they descend from its main process; another server has another key."""
    command = "serve", "model", "--port", "8001"
    (one,) = {*run(method, 2, *command)}
    other = alone(*command)

    assert one[0] == other[0] == f"{HOST}:8001"
    assert one[1] != other[1]


@pytest.mark.parametrize(
    ("command", "namespace", "has_key"),
    [
        (["serve", "model"], HOST, True),
        (["serve", "model", "--port=8001", "--host", "0.0.0.0"], f"{HOST}:8001", True),
        (["serve", "model", "--port"], HOST, True),
        (["serve", "model", "--port", "8001", "--headless"], HOST, False),
        (["serve", "model", "-dpl", "2", "--port", "8001"], HOST, False),
        (["serve", "model", "--port", "8001", "--data_parallel_backend=ray"], HOST, False),
        (["-m", "sglang.launch_server", "--port", "30001", "--nnodes", "2"], HOST, False),
    ],
)  # fmt: skip
def test_an_identity_has_what_all_processes_know(
    command: list[str], namespace: str, has_key: bool
) -> None:
    """A port is left out where a process may descend from another main process."""
    name, key = alone(*command)

    assert name == namespace
    assert bool(key) is has_key


def test_a_file_of_options_has_the_port_unless_the_command_line_has(tmp_path: Path) -> None:
    """As vLLM and SGLang read it, with dashes or underscores."""
    options = tmp_path / "options.yaml"
    options.write_text("model: m  # a comment\nkv-config:\n  port: 1\nport: '8002'\n")

    assert alone("--config", str(options))[0] == f"{HOST}:8002"
    assert alone(f"--config={options}", "--port", "8003")[0] == f"{HOST}:8003"
    assert alone("--config", str(tmp_path / "absent"))[0] == HOST
    options.write_text("data_parallel_backend: ray\nport: 8002\n")
    assert alone("--config", str(options)) == (HOST, "")


def test_a_forked_child_has_the_key_of_its_server() -> None:
    """Its publisher's stream has a name of its own, and belongs to the same engine."""
    program = """
        import os
        from descendants import known
        before = known("spawn", 0)
        if os.fork() == 0:
            os._exit(0 if known("spawn", 0) == before else 1)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
    """
    assert run_python(program, PYTHONWARNINGS="ignore", PATH=os.environ["PATH"]) == "0\n"
