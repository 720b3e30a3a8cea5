"""Start-up times, read from vLLM's configuration of any release and from the process's age."""

from __future__ import annotations

import multiprocessing
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sidestep.engines.dialects import DIALECTS
from sidestep.engines.items import encode_item
from sidestep.engines.vllm.own_rows import ROWS
from sidestep.protocol.self_described import Family, Samples
from sidestep_adapters.publisher.process_metrics import process_age
from sidestep_adapters.vllm.startup import core_startup, front_end_startup


def config(**times: Any) -> SimpleNamespace:
    """Return a VllmConfig with compilation times."""
    return SimpleNamespace(compilation_config=SimpleNamespace(**times))


def phases(families: list[Family]) -> dict[str, float]:
    """Return the seconds by phase."""
    return {sample.labels[0]: sample.value for family in families for sample in family.samples}


def test_a_core_sends_what_vllm_keeps() -> None:
    """The compilation times are those of the configuration; a time of 0 is no sample."""
    both = config(compilation_time=12.5, encoder_compilation_time=2.0)

    assert phases(core_startup(both)) == {"compile": 12.5, "compile_encoder": 2.0}
    assert phases(core_startup(config(compilation_time=1.0, encoder_compilation_time=0.0))) == {
        "compile": 1.0
    }


def test_a_release_without_times_sends_nothing() -> None:
    """A core in a program's own process, of which nothing is known, has no family."""
    unknown = [config(compilation_time=time) for time in (0.0, None, float("nan"), "fast")]

    assert [core_startup(made) for made in (SimpleNamespace(), *unknown)] == [[]] * 5


def ages_of_a_core(queue: Any) -> None:
    """Put the phases of a core in this process, by two names of it, and its age before and after."""
    before = process_age()
    found = []
    for name in ("Process-1", "EngineCore_DP0"):
        multiprocessing.current_process().name = name
        found.append(phases(core_startup(config())))
    queue.put((before, *found, process_age()))


def test_the_age_of_a_cores_process() -> None:
    """A process that vLLM started for the core has its age as the phase; any other one has none."""
    spawned = multiprocessing.get_context("spawn")
    queue = spawned.Queue()
    started = time.monotonic()
    child = spawned.Process(target=ages_of_a_core, args=(queue,))
    child.start()
    before, other, core, after = queue.get(timeout=60)
    child.join()

    assert other == {}
    assert [*core] == ["core"]
    assert 0 < before <= core["core"] <= after <= time.monotonic() - started + 0.02


def test_a_front_end_sends_the_age_of_its_process() -> None:
    """The family has the labels of its row, and survives encoding."""
    families = front_end_startup()
    item = Samples(0, 1.0, families)
    (row,) = [row for row in ROWS if row.name == "sidestep_startup_seconds"]

    assert [*phases(families)] == ["front_end"]
    assert phases(families)["front_end"] == pytest.approx(process_age(), abs=1.0)
    assert [family.labels for family in families] == [list(row.own_labels)]
    assert DIALECTS.decode(encode_item(item)) == item
