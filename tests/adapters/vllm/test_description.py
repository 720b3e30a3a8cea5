"""Descriptions of engines, read from vLLM's configuration of any release."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sidestep import __version__
from sidestep.protocol.messages import EngineInfo
from sidestep_adapters.vllm.description import describe, is_supported


def config(**fields: Any) -> SimpleNamespace:
    """Return the minimal VllmConfig of any release."""
    model = SimpleNamespace(served_model_name="tiny", max_model_len=100)
    return SimpleNamespace(**{"model_config": model, **fields})


def test_the_oldest_configuration_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options that a release lacks are off."""
    monkeypatch.setenv("SIDESTEP_NAMESPACE", "ns")
    monkeypatch.delenv("VLLM_COMPUTE_NANS_IN_LOGITS", raising=False)
    description = describe(config(), [0, 1])
    first, second = description.engine_infos

    assert description.features == ()
    assert description.stream == "ns/tiny/engine0/api0"
    assert (first.id, second.id) == ("ns/tiny/0", "ns/tiny/1")
    assert first.labels == {"engine": "0", "model_name": "tiny"}
    assert first.bounds["request_tokens"] == [1, 2, 5, 10, 20, 50, 100]


def test_options_become_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features have the catalogue's names and the labels whose series start at 0."""
    monkeypatch.setenv("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
    description = describe(
        config(
            speculative_config=SimpleNamespace(num_speculative_tokens=2),
            lora_config=SimpleNamespace(max_loras=4),
            scheduler_config=SimpleNamespace(max_num_seqs=128, max_num_batched_tokens=512),
            kv_transfer_config=SimpleNamespace(
                is_kv_consumer=True,
                kv_connector="MultiConnector",
                kv_connector_extra_config={"connectors": [{"kv_connector": "NixlConnector"}]},
            ),
            parallel_config=SimpleNamespace(_api_process_rank=3),
            observability_config=SimpleNamespace(
                kv_cache_metrics=True,
                custom_histogram_buckets={"request_latency": [1.0, 2.0]},
            ),
        ),
        [2],
    )
    (info,) = description.engine_infos

    assert set(description.features) == {
        "spec_decode", "nan_check", "lora", "kv_consumer", "kv_cache_metrics", "nixl", "kv_transfer",
    }  # fmt: skip
    assert description.stream.endswith("/engine2/api3")
    assert info.closed == {"position": ["0", "1"]}
    (many,) = dataclasses.replace(description, num_spec_tokens=500).engine_infos
    assert msgspec.convert(msgspec.to_builtins(many), EngineInfo) == many
    assert info.info.pop("versions") == {
        "vllm": "of an unknown release",
        "sidestep": __version__,
    }
    limits = {"max_running_requests": "128", "max_step_tokens": "512"}
    transfer = {"role": "both", "connectors": "NixlConnector"}
    assert info.info == {"lora": {"max_lora": "4"}, "limits": limits, "kv_transfer": transfer}
    assert info.bounds["request_latency"] == [1.0, 2.0]


def multi(*parts: tuple[str, str]) -> dict[str, Any]:
    """Return the configuration of a MultiConnector."""
    named = [{"kv_connector": name, "kv_role": role} for name, role in parts]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": named},
    }


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        ({}, None),
        (
            {"kv_connector": "P2pNcclConnector", "kv_role": "kv_producer"},
            "prefill P2pNcclConnector",
        ),
        (
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
            "both OffloadingConnector cached",
        ),
        (
            multi(("NixlConnector", "kv_producer"), ("MooncakeConnector", "kv_consumer")),
            "both NixlConnector,MooncakeConnector",
        ),
        (
            multi(("LMCacheConnectorV1", "kv_both"), ("OffloadingConnector", "kv_both")),
            "both LMCacheConnectorV1,OffloadingConnector cached",
        ),
    ],
)
def test_the_role_follows_from_the_connectors(
    transfer: dict[str, Any], expected: str | None
) -> None:
    """Caches beside a connector do not change it; what caches alone load is cached."""
    described = describe(config(kv_transfer_config=SimpleNamespace(**transfer)), [0])
    found = described.engine_infos[0].info.get("kv_transfer")

    assert (found and " ".join(found.values())) == expected
    assert ("kv_transfer" in described.features) == (expected is not None)


def test_long_names_do_not_merge_engines() -> None:
    """The distinguishing end of an identity is kept."""
    model = SimpleNamespace(served_model_name="m" * 400, max_model_len=10)
    description = describe(SimpleNamespace(model_config=model), [0, 1])
    first, second = description.engine_infos

    assert first.id != second.id
    assert max(len(first.id), len(description.stream)) <= 256


@pytest.mark.parametrize(
    ("release", "is_new"),
    [
        ("0.11.0", False), ("0.11.1+cpu", True), ("1.0", True), ("0.1.dev1+g12ab", True),
    ],
)  # fmt: skip
def test_an_older_release_sends_nothing(
    release: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_new: bool,
) -> None:
    """One line says which release is needed; what cannot be compared is taken for a new one."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=release))
    assert is_supported() is is_new
    assert len(caplog.messages) == (not is_new)
    assert all("install 0.11.1 or later" in message for message in caplog.messages)
