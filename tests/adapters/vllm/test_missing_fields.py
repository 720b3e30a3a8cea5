"""Fields that a release of vLLM has renamed or removed: no sample of what needs them, and it is said."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from exporters import Start, until
from fake_vllm import AsyncLLM, importable
from intakes import Fed
from pages import get
from sidestep.app.exporter import Exporter
from sidestep.engines.items import encode_item
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.publisher.field_check import Fields
from sidestep_adapters.vllm.ownership import Role
from sidestep_adapters.vllm.stats import FIELDS, VllmTap

FEATURES = ["spec_decode", "kv_cache_metrics", "nan_check", "watermark", "kv_consumer", "cudagraph"]
FEATURES += ["iteration_details", "lora"]


def of_struct(struct: type[msgspec.Struct], path: str, without: str) -> SimpleNamespace:
    """Return an object of vLLM's with the fields that are read, each with a value that is not 0."""
    hints = get_type_hints(struct)
    return SimpleNamespace(
        **{
            name: value(hint, f"{path}.{name}", without)
            for name, hint in hints.items()
            if f"{path}.{name}" not in (without, *FIELDS.unread)
        }
    )


def record(without: str) -> dict[str, Any]:
    """Return the arguments of vLLM's stat loggers."""
    names = "scheduler_stats", "iteration_stats", "mm_cache_stats"
    parts = zip(names, FIELDS.parts.items(), strict=True)
    return {name: of_struct(struct, part, without) for name, (part, struct) in parts}


def value(hint: Any, path: str, without: str) -> Any:
    """Return a value of this type."""
    if type(None) in get_args(hint):
        hint = get_args(hint)[0]
    origin = get_origin(hint) or hint
    if origin is list:
        return [value(get_args(hint)[0], path, without)]
    if origin is dict:
        return {"in_progress": 1}
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return of_struct(origin, path, without)
    return origin(1)


def paths(fields: Fields) -> list[str]:
    """Return the paths of all fields that are read."""
    found = (f"{path}.{n}" for path, inner in fields.structs() for n in inner.__struct_fields__)
    return [path for path in found if path not in fields.unread]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the release of vLLM."""

    def of(number: str) -> None:
        module = ModuleType("vllm")
        module.__version__ = number  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "vllm", module)

    of("0.34.0")
    return of


def page(
    without: str, role: Role = "alone", *, none: str = ""
) -> tuple[dict[str, str], Mapping[str, str]]:
    """Return the samples after a step without a field, and the fields that are missing.

    ``none`` is a field of the scheduler's that is None.
    """
    found: dict[str, str] = {}
    pushed: list[Any] = []

    def missing(info: Mapping[str, dict[str, str]]) -> None:
        found.update(info["missing_fields"])

    given, left_out = record(without), list[str]()
    fail = left_out.append if none else pytest.fail
    if none:
        setattr(given["scheduler_stats"], none, None)
    tap = VllmTap(pushed.append, fail, [0], role=role, missing=missing)
    tap.record(**given)
    info = EngineInfo("e", "vllm", {"engine": "0", "model_name": "m"}, features=FEATURES)
    fed = Fed()
    fed.send_hello("s", [info])
    items = [encode_item(item) for make in pushed for item in make()]
    fed.send_hello("s", [msgspec.structs.replace(info, info={"missing_fields": found})])
    fed.items("s", items)
    samples = (line.rpartition(" ") for line in fed.page.splitlines() if line[0] != "#")
    names = ("vllm:", "sidestep_vllm_")
    times = "_created", "lora_requests_info"
    return {
        name: number
        for name, _, number in samples
        if name.startswith(names) and not any(each in name for each in times)
    }, found


@pytest.fixture(scope="module")
def whole() -> dict[str, str]:
    """Return the samples after a step with all fields."""
    samples, missing = page("")
    assert (len(samples) > 300, missing) == (True, {})
    return samples


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("path", paths(FIELDS))
def test_what_needs_a_missing_field_has_no_sample(path: str, whole: dict[str, str]) -> None:
    """Each sample of a page without a field is that of the page with it: none is 0 instead."""
    less, missing = page(path)
    assert less.items() <= whole.items()
    if path in FIELDS.substitutes:
        assert (less, missing) == (whole, {})
    else:
        assert missing == {path.replace(".", "__"): "missing"}


@pytest.mark.usefixtures("release")
def test_a_required_number_that_is_none_is_missing(whole: dict[str, str]) -> None:
    """An optional part that is None is not."""
    less, missing = page("", none="kv_cache_usage")
    assert missing == {"scheduler__kv_cache_usage": "missing"}
    assert less == page("scheduler.kv_cache_usage")[0]
    assert less.items() < whole.items()
    assert page("", none="perf_stats")[1] == {}


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize(
    ("role", "path", "is_missing"),
    [
        ("core", "scheduler.prefix_cache_stats.hits", True),
        ("core", "scheduler.kv_cache_eviction_events", False),
        ("core", "iteration.num_generation_tokens", False),
        ("front_end", "scheduler.num_running_reqs", False),
        ("front_end", "iteration.num_generation_tokens", False),
        ("front_end", "iteration.finished_requests.e2e_latency", True),
    ],
)
def test_a_process_misses_only_what_it_sends(role: Role, path: str, *, is_missing: bool) -> None:
    """Of what the other process sends, it does not know whether it is there."""
    assert bool(page(path, role)[1]) is is_missing


@pytest.mark.parametrize("number", ["0.11.1", "0.25.0"])
def test_an_older_release_is_no_fault(
    number: str, release: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Fields that came later are absent, without a line in the log; others are missing as well."""
    release(number)
    later = [path for path, since in FIELDS.since.items() if parsed(since) > parsed(number)]
    found = {status for path in later for status in page(path)[1].values()}
    assert (found, caplog.messages) == ({"absent"}, [])
    for path in set(FIELDS.since) - set(later):
        assert [*page(path)[1].values()] == ["missing"]
    assert page("scheduler.num_running_reqs")[1] == {"scheduler__num_running_reqs": "missing"}


def parsed(number: str) -> list[int]:
    """Return a release's first two numbers."""
    return [int(part) for part in number.split(".")[:2]]


async def test_it_is_said_once_where_operators_look(
    start: Start,
    release: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line in the engine's log, a metric and a finding of the exporter; and no sample, however many steps."""
    path = "scheduler.num_running_reqs"
    async with start() as exporter:
        doctor = exporter.url.removesuffix("/metrics") + "/api/v1/doctor"
        with importable(monkeypatch, exporter.endpoints[0]) as plugins:
            release("0.34.0")
            front_end = AsyncLLM(SimpleNamespace(), [0], plugins.stat_logger)
            (logger,) = front_end.logger_manager.stat_loggers
            for _ in range(3):
                logger.record(**record(path))
            await until(lambda: _has(exporter, f"vllm:generation_tokens_total{SERIES} 3"))
            found, findings = await get(exporter.url), await get(doctor)
            await asyncio.to_thread(logger._publisher.close)
    lines = [message for message in caplog.messages if path in message]
    assert len(lines) == 1
    assert lines[0].startswith(f"sidestep: vllm 0.34.0 has no field {path}: ")
    assert f'sidestep_engine_missing_fields{{engine="0",field="{path}",model_name="m"' in found
    assert "vllm:num_requests_running{" not in found
    assert "vllm:num_requests_waiting{" in found
    assert f'"text":"vllm 0.34.0 has no {path}"' in findings.replace('": "', '":"')


SERIES = '{engine="0",model_name="m"}'


async def _has(exporter: Exporter, line: str) -> bool:
    return line in (await get(exporter.url)).splitlines()
