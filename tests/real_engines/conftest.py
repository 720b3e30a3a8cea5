"""Fixtures of the tests with real engines: where each is, its model, and a short private folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_engines import triton_server
from real_engines.sglang_server import interpreter
from real_engines.tiny_model import make_adapter, make_model

BUILD = Path(__file__).parents[2] / "build"


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of vLLM's environment, which tools/setup_vllm.sh makes."""
    python = Path(os.environ.get("SIDESTEP_VLLM_PYTHON", BUILD / "vllm-venv/bin/python"))
    if not python.exists():
        pytest.skip("no vLLM; make one with tools/setup_vllm.sh")
    return python


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """The interpreter of SGLang's environment."""
    python = interpreter()
    if not python.exists():
        pytest.skip("no SGLang; make one with tools/setup_sglang.sh")
    return python


@pytest.fixture(scope="session")
def triton_python() -> Path:
    """The interpreter of Triton's environment."""
    python = triton_server.interpreter()
    if not python.exists():
        pytest.skip("no Triton; make one with tools/setup_triton.sh")
    return python


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two LoRA adapters by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name) for name in ("lora-a", "lora-b")}


@pytest.fixture
def home() -> Iterator[Path]:
    """A private folder; its path is short, as those of Unix sockets must be."""
    path = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def endpoint(home: Path) -> str:
    """Where this test's exporter listens."""
    return f"ipc://{home}/ingest.ipc"
