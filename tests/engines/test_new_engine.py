"""An engine that is added as a folder with an entry point, as CONTRIBUTING.md says."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomllib
from tests.engines.toy_engine.dialect import DIALECT
from tests.engines.toy_engine.wire import ToyStep

from exporter_processes import process
from exporters import until
from pages import Family, get, parse
from sidestep.app.exporter import Exporter
from sidestep.app.run import running
from sidestep.catalog.row import Handler
from sidestep.config.settings import read
from sidestep.engines.apply import Applier
from sidestep.engines.dialect import Dialects
from sidestep.engines.dialects import DIALECTS
from sidestep.engines.row_builders import counter
from sidestep.engines.shared_rows import objectives
from sidestep.engines.vllm.wire import VllmSleep
from sidestep.errors import CatalogueError
from sidestep.metrics.registry import Registry
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher

WITH_TOY = Dialects(*DIALECTS.values(), DIALECT)
LABELS = {"engine": "0", "model_name": "m"}
STEP = ToyStep(0, 1.0, 2, 1, 0.5, 100, 10, [0.05, 5.0], "decode")
TOY = Path(__file__).parent / "toy_engine"
GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
ENGINE = """
import sys
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.publisher import Publisher
from toy_engine.wire import ToyStep
info = EngineInfo("e", "toy", {"engine": "0", "model_name": "m"})
publisher = Publisher(sys.argv[1], "toy", [info])
publisher.push(ToyStep(0, 1.0, generated_tokens=10))
sys.stdin.read()
publisher.close()
"""
"""The engine's process, until its standard input is closed."""


def install(folder: Path) -> None:
    """Install the toy engine into ``folder``, with the entry points of the guide."""
    (folder / "toy_engine").mkdir()
    for module in TOY.glob("*.py"):
        text = module.read_text().replace("tests.engines.toy_engine", "toy_engine")
        (folder / "toy_engine" / module.name).write_text(text)
    (block,) = re.findall(r" *```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    block = block.replace("<engine>", "toy").replace("<package>", "toy_engine")
    groups = tomllib.loads(textwrap.dedent(block))["project"]["entry-points"]
    metadata = folder / "toy_engine-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in groups.items()
        )
    )


async def test_a_package_with_an_entry_point_is_all_that_an_exporter_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter and an engine, each with the package on its path, need nothing else."""
    install(tmp_path)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    )

    async def generated() -> bool:
        page = parse(await get(url))
        return "toy:generated_tokens" in page and sample(page, "toy:generated_tokens_total") == 10

    async with process(tmp_path) as (_, url):
        engine = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ENGINE, f"ipc://{tmp_path}/i.ipc", stdin=asyncio.subprocess.PIPE
        )
        await until(generated)
        await engine.communicate(b"")

    assert engine.returncode == 0


@asynccontextmanager
async def exporter(
    folder: Path, dialects: Dialects = WITH_TOY, **flags: Any
) -> AsyncIterator[Exporter]:
    """Run an exporter that knows the toy engine."""
    given = {
        "web_listen_address": ("127.0.0.1:0",),
        "ingest_endpoint": (f"ipc://{folder}/ingest.ipc",),
        "log_stats_interval": "0",
        "limits_memory_soft": "0",
        "limits_memory_hard": "0",
        **flags,
    }
    async with running(Exporter(read(given, {}), dialects=dialects)) as exporter:
        yield exporter


async def send(to: Exporter, *steps: ToyStep) -> None:
    """Send ``steps`` over a socket, as the engine's plugin would."""
    publisher = Publisher(to.endpoints[0], "toy", [EngineInfo("e", "toy", LABELS)])
    expected = to.intake.items + len(steps)
    with closing(publisher):
        for step in steps:
            publisher.push(step)
        await until(lambda: to.intake.items == expected)


def sample(page: dict[str, Family], family: str, **labels: str) -> float:
    """Return the value of one of the engine's series."""
    key = family, tuple(sorted({**LABELS, **labels}.items()))
    return page[family.removesuffix("_total").removesuffix("_bucket")].samples[key]


def test_a_dialect_that_cannot_be_loaded_prevents_the_start(tmp_path: Path) -> None:
    """The line names its entry point and the error."""
    install(tmp_path)
    (tmp_path / "toy_engine" / "dialect.py").write_text("import missing_library")
    done = subprocess.run(
        [sys.executable, "-m", "sidestep", "serve"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert done.stderr.startswith("sidestep: dialect toy (toy_engine.dialect:DIALECT): ")
    assert "missing_library" in done.stderr
    assert done.stderr.count("\n") == 1


async def test_its_page_has_its_own_families_and_the_common_ones(tmp_path: Path) -> None:
    """Plain fields, a handler's row, objectives and common names arrive over a real socket."""
    async with exporter(tmp_path, metrics_common=True, slo=("ttft=1s",)) as running:
        await send(running, STEP, STEP)
        page = parse(await get(running.url))

    assert sample(page, "toy:requests_running") == 2
    assert sample(page, "toy:generated_tokens_total") == 20
    assert sample(page, "toy:first_token_seconds_bucket", le="0.1") == 2
    assert sample(page, "toy:steps_total", phase="decode") == 2
    assert sample(page, "sidestep_requests_waiting") == 1
    slo = "sidestep_slo_requests_total"
    assert sample(page, slo, result="good", slo="ttft") == 2
    assert sample(page, slo, result="bad", slo="ttft") == 2
    ttft = page["gen_ai_server_time_to_first_token_seconds"].samples
    assert max(ttft.values()) == 10.1


async def test_an_objective_needs_no_rows_of_an_engine_without_latencies(tmp_path: Path) -> None:
    """It counts other engines' requests; this one's family of the same common name is unaffected."""
    rows = tuple(row for row in DIALECT.rows if row not in objectives())
    plain = dataclasses.replace(DIALECT, latencies={}, rows=rows)
    name = "gen_ai_server_time_to_first_token_seconds"
    flags = {"metrics_common": True, "slo": (f"mine=1s,family={name}",)}
    async with exporter(tmp_path, Dialects(*DIALECTS.values(), plain), **flags) as running:
        await send(running, STEP)
        page = parse(await get(running.url))

    assert sample(page, f"{name}_bucket", le="+Inf") == 2
    assert "sidestep_slo_requests" not in page


def test_names_and_tags_of_dialects_are_unique() -> None:
    """A second dialect or item of the same name prevents the start."""

    class Other(msgspec.Struct, array_like=True, tag="toy"):
        """An item with the tag of another one."""

    other = dataclasses.replace(DIALECT, name="other", items=(Other,))

    with pytest.raises(CatalogueError, match="same name"):
        Dialects(DIALECT, DIALECT)
    with pytest.raises(CatalogueError, match="unique `tag` values"):
        Dialects(DIALECT, other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rows": (*DIALECT.rows, counter("toy:x_total", Handler("other"), "X."))}, "other"),
        ({"rows": (*(row for row in DIALECT.rows if row.name != "toy:steps_total"),)}, "steps"),
        ({"items": (ToyStep, VllmSleep)}, "VllmSleep"),
        ({"items": ()}, "ToyStep"),
    ],
)
def test_handlers_fit_the_rows_and_the_items(change: dict[str, Any], named: str) -> None:
    """A row's handler or an item without a function prevents the start, and so does the reverse."""
    dialects = Dialects(dataclasses.replace(DIALECT, **change))

    with pytest.raises(CatalogueError, match=named):
        Applier(Registry(dialects.layouts()), dialects)
