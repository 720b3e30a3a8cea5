"""Fixtures: a running exporter and golden pages; and which modules ``make quick`` leaves out."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import settings

from exporters import Start, started
from prometheus_server import BINARIES, VERSIONS
from sidestep.telemetry.logs import recent

# A deadline per example would measure the machine; in CI every run tries the same examples.
settings.register_profile(
    "sidestep", deadline=None, max_examples=30, derandomize="CI" in os.environ
)
settings.register_profile("long", settings.get_profile("sidestep"), max_examples=300)
settings.register_profile("quick", settings.get_profile("sidestep"), max_examples=10)
settings.load_profile("sidestep")

ROOT = Path(__file__).parents[1]
PROCESSES = re.compile(
    r"^(?:import|from) (?:subprocess|playwright)\b|create_subprocess",
    re.MULTILINE,
)
"""Text of a module that starts processes or browsers."""
SLOW = (
    "adapters/llamacpp/test_poller.py",
    "adapters/publisher/test_cache_lookups.py",
    "adapters/publisher/test_progress.py",
    "adapters/publisher/test_silent_exporter.py",
    "adapters/streams/test_subscriber.py",
    "adapters/test_poll_memory.py",
    "adapters/triton/test_hostile.py",
    "adapters/triton/test_poller.py",
    "adapters/vllm/test_front_end_progress.py",
    "adapters/vllm/test_privacy.py",
    "adapters/vllm/test_scheduler_progress.py",
    "diagnosis/test_own_checks.py",
    "engines/test_load.py",
    "engines/test_vllm_lookups.py",
    "exposition/live/test_answers.py",
    "exposition/test_aggregated_text.py",
    "exposition/test_views.py",
    "hostile/test_churn.py",
    "hostile/test_messages.py",
    "http/test_costs.py",
    "http/test_hit_ratio_curve.py",
    "metrics/test_saturation.py",
    "metrics/test_slo_counter.py",
    "otlp/test_families.py",
    "otlp/test_grpc.py",
    "otlp/test_increments.py",
    "requests/test_front_end_records.py",
    "top/test_app.py",
    "tracking/test_health_model.py",
    "tracking/test_kv_blocks.py",
    "tracking/test_reuse.py",
    "tracking/test_shortage.py",
    "transport/test_link.py",
)
"""Modules whose tests compute or wait for long without any process."""
IMPORTS = re.compile(r"^(?:import|from) ([\w.]+)", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-golden``, by which ``make golden`` rewrites the golden pages, and ``--quick``."""
    parser.addoption("--update-golden", action="store_true", help="write tests/golden again")
    parser.addoption(
        "--quick",
        action="store_true",
        help="try fewer examples; leave out slow modules, and those that start processes",
    )


def pytest_configure(config: pytest.Config) -> None:
    """With ``--quick``, try fewer examples."""
    if config.getoption("--quick"):
        settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--quick``, leave out modules that start processes, and slow ones."""
    if not config.getoption("--quick") or collection_path.suffix != ".py":
        return None
    is_slow = collection_path.as_posix().endswith(SLOW)
    return True if is_slow or starts_processes(collection_path) else None


@cache
def starts_processes(module: Path) -> bool:
    """Return whether a module starts processes, itself or by a helper that it imports."""
    text = module.read_text()
    helpers = [
        path
        for name in IMPORTS.findall(text)
        for folder in (ROOT / "tests" / "support", ROOT)
        if (path := folder.joinpath(*name.split(".")).with_suffix(".py")).exists()
    ]
    return bool(PROCESSES.search(text)) or any(map(starts_processes, helpers))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a page with the golden one of that name, byte by byte."""

    def compare(name: str, page: str) -> None:
        kept = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            kept.write_text(page)
        assert page == kept.read_text()

    return compare


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Return a major version of Prometheus that is installed."""
    found: str = request.param
    if BINARIES[found] is None:
        pytest.skip(f"there is no Prometheus {found} (make tools)")
    return found


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return a function that runs an exporter on a free port and an ipc path, with settings as keywords."""
    return partial(started, tmp_path)


@pytest.fixture
def kept_log() -> Iterator[None]:
    """Keep log lines as ``sidestep serve`` does, for the debug page and the live page."""
    logger = logging.getLogger("sidestep")
    recent.lines.clear()
    recent.warnings.clear()
    logger.addHandler(recent)
    yield
    logger.removeHandler(recent)
