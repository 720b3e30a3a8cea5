"""The families that each field of Triton's statistics changes, as docs/triton-fields.md lists them."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

from intakes import Fed
from pages import parse
from sidestep.ingest.local_stream import ServerFeed
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.triton.rows import CACHE, EXECUTES, FAILURES, ROWS
from sidestep_adapters.triton.statistics import read
from sidestep_adapters.triton.wire import TritonStats
from triton_fields import DOCUMENT, documented_fields

FIELDS = documented_fields()
MODEL = EngineInfo(
    "t/m/1", "triton", {"model": "m", "version": "1"}, features=[CACHE, EXECUTES, FAILURES]
)
LABELS = {"name", "version", "response_stats[].key"}
"""Fields that are labels."""
STAGES = ("compute_input", "compute_infer", "compute_output")


def timed(*names: str) -> dict[str, Any]:
    """Return ten events of each kind, of a millisecond each."""
    return {name: {"count": 10, "ns": 10_000_000} for name in names}


STATISTICS: dict[str, Any] = {
    "name": "m",
    "version": "1",
    "last_inference": 5000,
    "inference_count": 10,
    "execution_count": 10,
    "inference_stats": timed("success", "fail", "queue", *STAGES, "cache_hit", "cache_miss"),
    "response_stats": {
        "0": timed(*STAGES[1:], "success", "fail", "empty_response", "cancel"),
    },
    "batch_stats": [{"batch_size": 1, **timed(*STAGES)}],
    "memory_usage": [{"type": "GPU", "id": 0, "byte_size": 100}],
}


def page(statistics: dict[str, Any]) -> dict[str, Any]:
    """Return the samples of each family after one poll."""
    fed = Fed()
    feed = ServerFeed(fed.intake, "triton t")
    feed.mark_seen(0.0)
    stats = read(json.dumps(statistics).encode(), has_cache=True)
    feed.apply(MODEL, TritonStats(0, 10.0, 1000.0, stats, 1))
    return {name: family.samples for name, family in parse(fed.page).items()}


def changed(field: str) -> set[str]:
    """Return the families whose samples are others if ``field`` is."""
    statistics = copy.deepcopy(STATISTICS)
    *path, last = field.replace("[]", "").split(".")
    parent: Any = statistics
    for name in path:
        parent = parent[name]
        if isinstance(parent, list):
            parent = parent[0]
        elif "0" in parent:
            parent = parent["0"]
    parent[last] = "CPU" if last == "type" else parent[last] + 1_000_000
    before, after = page(STATISTICS), page(statistics)
    return {name for name in before | after if before.get(name) != after.get(name)}


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in LABELS])
def test_a_field_feeds_the_documented_families(field: str) -> None:
    """No other family changes; a field without families changes nothing."""
    families = {name.removesuffix("_total") for name in re.findall(r"`(\w+)`", FIELDS[field])}
    is_left_out = FIELDS[field].startswith("none: ")

    assert changed(field) == (set() if is_left_out else families)


def test_every_family_of_models_is_documented() -> None:
    """A family comes from a field, from the differences of two polls, or from the configuration."""
    listed = set(re.findall(r"`((?:nv|sidestep)_\w+)`", DOCUMENT.read_text()))
    of_models = {row.name for row in ROWS if row.shared} - {"sidestep_triton_resets_total"}

    assert listed == of_models
