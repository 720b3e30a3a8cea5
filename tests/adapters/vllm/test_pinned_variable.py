"""vLLM's variable that its statistics look up for each output, where vLLM goes on building them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fake_vllm import AsyncLLM, importable
from sidestep_adapters.vllm.hook_installation import NAN_CHECK


class Variables(ModuleType):
    """A module of vLLM's shape, which reads the environment whenever it is asked."""

    def __init__(self, *known: str) -> None:
        super().__init__("vllm.envs")
        self._known = known
        self._asked: list[str] = []

    def __getattr__(self, name: str) -> bool:
        """Read a variable."""
        if name not in vars(self)["_known"]:
            raise AttributeError(name)
        self._asked.append(name)
        return os.environ.get(name) == "1"


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, envs: Variables, mode: str) -> None:
    """Start the plugin, with this module as vLLM's."""
    monkeypatch.setenv("SIDESTEP_VLLM_MODE", mode)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    with importable(monkeypatch, f"ipc://{folder}/ingest.ipc") as ours:
        front_end = AsyncLLM(SimpleNamespace(), [0], ours.stat_logger)
        (logger,) = front_end.logger_manager.stat_loggers
        logger.log_engine_initialized()
        errors = logger._publisher.errors
        logger._publisher.close()
    assert errors == 0


@pytest.mark.parametrize("mode", ["beside", "instead"])
@pytest.mark.parametrize("value", [False, True])
def test_it_is_looked_up_once(
    mode: str, value: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside vLLM's own metrics, and where the hook does not fit the release."""
    monkeypatch.setenv(NAN_CHECK, str(int(value)))
    envs = Variables(NAN_CHECK)
    start(monkeypatch, tmp_path, envs, mode)
    asked = len(envs._asked)
    assert [getattr(envs, NAN_CHECK) for _ in range(3)] == [value] * 3
    assert len(envs._asked) == asked


def test_a_release_without_it_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An attribute that its release does not know would hide a mistake."""
    envs = Variables("VLLM_OTHER")
    start(monkeypatch, tmp_path, envs, "beside")
    assert NAN_CHECK not in vars(envs)
