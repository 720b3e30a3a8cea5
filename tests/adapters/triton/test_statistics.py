"""Decoding of Triton's answers, recorded and invalid ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters import DATA
from sidestep.errors import PollError, WireError
from sidestep_adapters.triton import model_config as triton_config
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.statistics import (
    ModelVersion,
    read,
    split,
    version_of,
)
from sidestep_adapters.triton.wire import (
    Batch,
    InferenceStats,
    Memory,
    ModelStats,
    Responses,
    Timed,
)
from triton_fields import documented_fields

LARGEST = 2**64 - 1
"""Maximum of Triton's counters."""
RECORDED = sorted(
    path.name.removesuffix(".gz")
    for path in (DATA / "triton").iterdir()
    if path.name.startswith("stats_")
)
TIMED = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")


def recorded(name: str) -> bytes:
    """Return the body of a recorded answer."""
    data = gzip.decompress((DATA / "triton" / f"{name}.gz").read_bytes())
    return data.partition(b"\r\n\r\n")[2] if name.endswith(".http") else data


def stats(body: bytes, *, has_cache: bool = False) -> dict[tuple[str, str], ModelStats]:
    """Return statistics by model and version."""
    versions = {version_of(piece): read(piece, has_cache=has_cache) for piece in split(body)}
    return {(version.name, version.version): found for version, found in versions.items()}


def one(**fields: Any) -> ModelStats:
    """Return a model with ``fields`` only."""
    piece = json.dumps({"name": "m", "version": "1", **fields}).encode()
    return read(piece, has_cache=False)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_answers_are_read_whole(name: str) -> None:
    """Every number equals that of an independent JSON reader."""
    body = recorded(name)
    theirs = json.loads(body)["model_stats"]
    ours = stats(body)

    assert len(ours) == len(theirs) > 0
    for model in theirs:
        mine = ours[model["name"], model["version"]]
        numbers = model["inference_stats"]
        assert mine.last_inference == model["last_inference"]
        assert mine.inference_count == model["inference_count"]
        assert mine.execution_count == model["execution_count"]
        for field in TIMED:
            assert getattr(mine.inference_stats, field) == Timed(**numbers[field])
        for field in ("cache_hit", "cache_miss"):
            is_used = numbers["cache_hit"]["count"] or numbers["cache_miss"]["count"]
            expected = Timed(**numbers[field]) if is_used else None
            assert getattr(mine.inference_stats, field) == expected
        assert mine.batch_stats == tuple(
            Batch(
                batch["batch_size"],
                batch["compute_output"]["count"],
                *(batch[f"compute_{part}"]["ns"] for part in ("input", "infer", "output")),
            )
            for batch in model["batch_stats"]
        )
        assert [(m.type, m.id, m.byte_size) for m in mine.memory_usage] == [
            (m["type"], m["id"], m["byte_size"]) for m in model["memory_usage"]
        ]
        assert (mine.response_stats is None) is (not model["response_stats"])


def paths(found: Any, before: str = "") -> Iterator[str]:
    """Yield the paths of all numbers and strings in JSON statistics."""
    match found:
        case dict():
            for name, below in found.items():
                yield from paths(below, f"{before}.{name}")
        case list():
            for each in found:
                yield from paths(each, f"{before}[]")
        case _:
            yield before


def test_the_fields_are_those_of_a_real_server() -> None:
    """The document has every recorded field and no other."""
    models = [model for name in RECORDED for model in json.loads(recorded(name))["model_stats"]]
    for model in models:
        responses = model["response_stats"].items()
        model["response_stats"] = [{"key": key, **found} for key, found in responses]

    assert {path.removeprefix("[].") for path in paths(models)} == documented_fields().keys()


def test_later_responses_are_combined() -> None:
    """Triton has an index for each response of a request; keys sort as strings."""
    found = stats(recorded("stats_respstat.json"))["respstat", "1"]

    assert found.response_stats == Responses(
        first=Timed(5, 126_703_878),
        next=Timed(17, 430_533_795),
        fail=Timed(2, 50_619_312),
        empty_response=Timed(4, 16_795),
        cancel=Timed(1, 23_172_182),
        first_compute_infer=Timed(5, 100_475_842),
        first_compute_output=Timed(5, 26_228_036),
        next_compute_infer=Timed(23, 381_797_923),
        next_compute_output=Timed(19, 99_371_979),
    )
    assert found.memory_usage == (Memory("CPU", 0, 123_456_789), Memory("GPU", 1, 5_368_709_120))


def test_fields_may_be_missing_or_new_and_in_any_order() -> None:
    """Releases before 24.03 have no ``response_stats``."""
    assert one() == ModelStats()
    assert one(inference_stats={"success": {"ns": 5}}, later={"a": [1]}) == ModelStats(
        inference_stats=InferenceStats(success=Timed(0, 5))
    )
    assert version_of(b'{"name": "m"}') == ModelVersion("m", "")
    assert read(b'{"execution_count": 3, "name": "m"}', has_cache=False) == ModelStats(
        execution_count=3
    )


def test_a_sum_beyond_64_bits_is_rejected() -> None:
    """No record could hold it."""
    half = {"success": {"count": 1, "ns": 2**63}}
    assert one(response_stats={"1": half}).response_stats is not None
    with pytest.raises(WireError):
        one(response_stats={"1": half, "2": half})


WRONG = [-1, LARGEST + 1, 1.5, True, "1", None, []]
PLACES = [
    lambda x: {"last_inference": x},
    lambda x: {"inference_count": x},
    lambda x: {"inference_stats": {"success": {"count": x}}},
    lambda x: {"inference_stats": {"cache_miss": {"count": 1, "ns": x}}},
    lambda x: {"batch_stats": [{"batch_size": x}]},
    lambda x: {"batch_stats": [{"batch_size": 1, "compute_output": {"count": 1, "ns": x}}]},
    lambda x: {"response_stats": {"0": {"success": {"count": x, "ns": 1}}}},
    lambda x: {"response_stats": {"7": {"cancel": {"count": 1, "ns": x}}}},
    lambda x: {"memory_usage": [{"type": "GPU", "byte_size": x}]},
]


@pytest.mark.parametrize("number", WRONG)
@pytest.mark.parametrize("place", PLACES)
def test_an_invalid_count_is_rejected(place: Any, number: object) -> None:
    """Negative numbers, fractions and numbers beyond 64 bits are invalid in every field."""
    with pytest.raises(WireError) as refused:
        one(**place(number))

    assert refused.value.reason == "bad_item"


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_stats": [{"batch_size": 1}, {"batch_size": 2}, {"batch_size": 1}]},
        {"batch_stats": [{"batch_size": n} for n in range(4097)]},
        {"memory_usage": [{"type": "CPU", "id": n} for n in range(257)]},
        {"name": "a\nb"},
        {"name": "m" * 257},
        {"name": ""},
        {"version": 1},
        {"version": "v" * 257},
    ],
)
def test_an_invalid_model_is_rejected(fields: dict[str, Any]) -> None:
    """A model with a repeated batch size, too many entries, or a name that is no label value is rejected."""
    with pytest.raises(WireError):
        one(**fields)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"model_stats": {}}',
        b'{"model_stats": [',
        b'{"model_stats": []} x',
        b'{"model_stats":' + b"[" * 200_000,
        b"<html></html>",
        b'{"model_stats": [{"version": "1"}]}',
        b'{"model_stats": [1]}',
    ],
)
def test_an_invalid_answer_is_rejected(body: bytes) -> None:
    """An answer that is truncated, of another kind, or deeply nested is rejected."""
    with pytest.raises(PollError):
        [version_of(piece) for piece in split(body)]


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_rejected(body: bytes) -> None:
    """No other exception is raised."""
    for data in (body, b'{"model_stats": [' + body + b"]}"):
        try:
            for piece in split(data):
                read(piece, has_cache=False)
        except (PollError, WireError):
            pass


def config(**fields: Any) -> ModelConfig:
    """Return a model's configuration with ``fields`` only."""
    return triton_config.decode_config(json.dumps(fields).encode())


def test_instances_are_counted_for_each_gpu() -> None:
    """A group has its count on each GPU; passive instances get no requests."""
    groups = [
        {"kind": "KIND_GPU", "count": 2, "gpus": [0, 1, 3]},
        {"kind": "KIND_GPU", "count": 1, "gpus": []},
        {"kind": "KIND_CPU", "count": 3, "gpus": []},
        {"kind": "KIND_MODEL", "count": 1},
        {"kind": "KIND_CPU", "count": 5, "passive": True},
    ]

    assert config(instance_group=groups).instances == 6 + 1 + 3 + 1
    assert config().instances == 0


def test_valid_metric_tags_are_labels() -> None:
    """Valid tags become labels with Triton's underscore, at most 16; others are dropped."""
    tags = {"team": "blue", "my-tag": "x", "_hidden": "x", "": "x", "long": "x" * 257, "nl": "a\nb"}

    assert config(metric_tags=tags).tags == {"_team": "blue"}
    assert len(config(metric_tags={f"t{n}": "" for n in range(99)}).tags) == 16
