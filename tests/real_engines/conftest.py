"""Fixtures of the tests with real engines: interpreters, models, and a short private folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_engines import sglang_server, triton_server
from real_engines.sites import SglangSite, Site, VllmSite
from real_engines.tiny_model import make_adapter, make_model

BUILD = Path(__file__).parents[2] / "build"


def existing(python: Path, engine: str) -> Path:
    """Return ``python``; skip the test if the environment of ``engine`` is not installed."""
    if not python.exists():
        pytest.skip(f"no {engine}; make one with tools/setup_{engine.lower()}.sh")
    return python


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """Return the interpreter of vLLM's environment, which tools/setup_vllm.sh makes."""
    python = os.environ.get("SIDESTEP_VLLM_PYTHON", BUILD / "vllm-venv/bin/python")
    return existing(Path(python), "vLLM")


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Return the interpreter of SGLang's environment, which tools/setup_sglang.sh makes."""
    return existing(sglang_server.interpreter(), "SGLang")


@pytest.fixture(scope="session")
def triton_python() -> Path:
    """Return the interpreter of Triton's environment."""
    return existing(triton_server.interpreter(), "Triton")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny model."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of two LoRA adapters by name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name) for name in ("lora-a", "lora-b")}


@pytest.fixture
def home() -> Iterator[Path]:
    """Yield a private folder with a short path, as paths of Unix sockets must be."""
    path = Path(tempfile.mkdtemp(prefix="st-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def vllm(vllm_python: Path, tiny: Path, home: Path) -> VllmSite:
    """Return the site of a test with vLLM."""
    return VllmSite(vllm_python, tiny, home, f"ipc://{home}/ingest.ipc")


@pytest.fixture
def sglang(sglang_python: Path, tiny: Path, home: Path) -> SglangSite:
    """Return the site of a test with SGLang."""
    return SglangSite(sglang_python, tiny, home, f"ipc://{home}/ingest.ipc")


@pytest.fixture(params=["vllm", "sglang"])
def site(request: pytest.FixtureRequest) -> Site:
    """Return the site of a test of what both engines have in common."""
    found: Site = request.getfixturevalue(request.param)
    return found
