"""A stand-in for vLLM's NIXL connector on a CPU: its parameters, states and statistics, without the KV.

A prefill engine holds the blocks of a request that it hands over until the decode engine has fetched them,
which a file says. The decode engine waits for ``FETCH_SECONDS`` and computes with whatever its blocks contain.
"""

# ruff: noqa: ARG002 - vLLM gives more than a stand-in needs
from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

FETCH_SECONDS = 0.2
BYTES = 4096


class Fetches(KVConnectorMetadata):  # type: ignore[misc]
    """Requests whose KV is to be fetched, with the names that they have at the other engine."""

    def __init__(self, fetched: dict[str, str], sent: list[str]) -> None:
        self.fetched = fetched
        self.sent = sent


class HandOverConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Both sides of the connector, in scheduler and worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._folder = Path(transfer.get_from_extra_config("folder", "/tmp"))
        self._engine_id = transfer.engine_id
        self._block_size = vllm_config.cache_config.block_size
        self._asked: dict[str, str] = {}
        self._ended: list[str] = []
        self._fetching: dict[str, tuple[str, float]] = {}
        self._sending: set[str] = set()
        self._stats = NixlKVConnectorStats()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """Return how many tokens the other engine has, and that they come later."""
        params = request.kv_transfer_params or {}
        tokens = request.num_prompt_tokens // self._block_size * self._block_size - computed
        return (tokens, True) if params.get("do_remote_prefill") and tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        """Note a request whose KV is to be fetched, once."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            if tokens:
                self._asked[request.request_id] = params["remote_request_id"]
            params["do_remote_prefill"] = False

    def build_connector_meta(self, output: Any) -> Fetches:
        """Return what the worker is to do."""
        made = Fetches(self._asked, self._ended)
        self._asked, self._ended = {}, []
        return made

    def request_finished(
        self, request: Any, blocks: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the blocks of a request that is handed over, and say where they are."""
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self._ended.append(request.request_id)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.request_id,
        }

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Begin to fetch."""
        meta = self._get_connector_metadata()
        now = time.monotonic()
        self._fetching |= {name: (other, now) for name, other in meta.fetched.items()}
        self._sending |= {*meta.sent}

    def get_finished(self, finished: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose KV was fetched by the other engine, and by this one."""
        now = time.monotonic()
        came = {name for name, (_, at) in self._fetching.items() if now - at >= FETCH_SECONDS}
        for name in came:
            (self._folder / self._fetching.pop(name)[0]).touch()
            self._stats.data["transfer_duration"].append(FETCH_SECONDS)
            self._stats.data["post_duration"].append(0.001)
            self._stats.data["bytes_transferred"].append(BYTES)
            self._stats.data["num_descriptors"].append(1)
        sent = {name for name in self._sending if (self._folder / name).exists()}
        self._sending -= sent
        return sent or None, came or None

    def get_kv_connector_stats(self) -> Any:
        """Return the transfers since the last call."""
        return None if self._stats.is_empty() else self._stats.clone_and_reset()

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any:
        """Return statistics as the scheduler adds them up."""
        return NixlKVConnectorStats(data=data or {})

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no layer is loaded."""

    def save_kv_layer(self, *arguments: Any, **more: Any) -> None:
        """Do nothing: no layer is saved."""

    def wait_for_save(self) -> None:
        """Do nothing: no layer is saved."""
