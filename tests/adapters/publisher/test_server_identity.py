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
        method, *sys.argv[1:] = sys.argv[1:]
        print(known(method, 2))
"""


def run(method: str, *arguments: str, **environ: str) -> list[Known]:
    """Return what a main process, its child and its grandchild know."""
    found: list[Known] = ast.literal_eval(run_python(PROGRAM, method, *arguments, **environ))
    assert len(found) == 3
    return found


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIDESTEP_NAMESPACE", raising=False)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_all_processes_of_a_server_have_one_identity(method: str) -> None:
    """However they descend from its main process; another server has another key."""
    command = "serve", "model", "--port", "8001"
    one, other = run(method, *command), run(method, *command)

    assert {name for name, _ in (*one, *other)} == {f"{HOST}:8001"}
    assert len({key for _, key in one}) == len({key for _, key in other}) == 1
    assert one[0][1] != other[0][1]


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
    program = PROGRAM.replace("known(method, 2)", "known(method, 0)")
    ((name, key),) = ast.literal_eval(run_python(program, "spawn", *command))

    assert name == namespace
    assert bool(key) is has_key


def test_a_file_of_options_has_the_port_unless_the_command_line_has(tmp_path: Path) -> None:
    """As vLLM and SGLang read it, with dashes or underscores."""
    options = tmp_path / "options.yaml"
    options.write_text("model: m  # a comment\nkv-config:\n  port: 1\nport: '8002'\n")

    assert run("spawn", "--config", str(options))[2][0] == f"{HOST}:8002"
    assert run("spawn", f"--config={options}", "--port", "8003")[2][0] == f"{HOST}:8003"
    assert run("spawn", "--config", str(tmp_path / "absent"))[2][0] == HOST
    options.write_text("data_parallel_backend: ray\nport: 8002\n")
    assert run("spawn", "--config", str(options))[2] == (HOST, "")


def test_a_namespace_is_used_as_given() -> None:
    """A user has chosen it for all processes, on whatever hosts."""
    assert {name for name, _ in run("spawn", "--port", "8001", SIDESTEP_NAMESPACE="ns")} == {"ns"}


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
