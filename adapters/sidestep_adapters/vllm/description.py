"""Descriptions of a vLLM front end's engines for the Hello, read from vLLM's configuration."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sidestep.catalog.buckets import one_two_five
from sidestep.protocol.limits import MAX_LABELS, printable
from sidestep.protocol.messages import (
    BOTH,
    CORE,
    DECODE,
    ENGINE_CORE,
    FRONT_END,
    FRONT_END_STATS,
    KV_SAMPLING,
    KV_TRANSFER,
    LIMITS,
    PREFILL,
    EngineInfo,
)
from sidestep_adapters.publisher.environment import identity, namespace, versions
from sidestep_adapters.vllm.connectors import CACHES, FEATURES
from sidestep_adapters.vllm.ownership import Role, is_tapped

log = logging.getLogger(__name__)

_WIRE_ROLES: Mapping[Role, str] = {"alone": "", "core": CORE, "front_end": FRONT_END}
_KV_ROLES = {"kv_producer": PREFILL, "kv_consumer": DECODE}


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """Description of one vLLM front end and its engines.

    Attributes:
        model: The served model name, the label ``model_name``.
        max_model_len: Maximum tokens of a request.
        engines: vLLM's indexes of the engines.
        namespace: Prefix of all identities, see ``environment.namespace``.
        api_server: This front end's number among ``api_servers`` of its engines.
        features: Options that are on, as the catalogue names them.
        custom_buckets: Histogram bounds by bucket family, where configured.
        info: Info metrics by short name.
        num_spec_tokens: Positions of a speculative draft.
        connector: Class of the KV connector, or empty.
        role: What the process is to the engines.
    """

    model: str
    max_model_len: int
    engines: tuple[int, ...]
    namespace: str
    api_server: int = 0
    features: tuple[str, ...] = ()
    custom_buckets: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    info: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    num_spec_tokens: int = 0
    connector: str = ""
    role: Role = "alone"
    api_servers: int = 1

    @property
    def stream(self) -> str:
        """Return the stream name: stable over restarts, unique among this deployment's processes."""
        return self.identity(f"engine{self.engines[0]}/api{self.api_server}")

    @property
    def core_stream(self) -> str:
        """Return the stream name of the engine core."""
        return self.identity(f"engine{self.engines[0]}/core")

    def identity(self, what: str) -> str:
        """Return an identity within this namespace and model; see ``environment.identity``."""
        return identity(self.namespace, self.model, what)

    @property
    def engine_infos(self) -> list[EngineInfo]:
        """Return the engine descriptions for the Hello, in the order of ``engines``."""
        tokens = one_two_five(self.max_model_len)
        bounds = {"request_tokens": [*tokens], **{k: [*v] for k, v in self.custom_buckets.items()}}
        return [
            EngineInfo(
                id=self.identity(str(index)),
                dialect="vllm",
                labels={"engine": str(index), "model_name": printable(self.model)},
                info={
                    name: {label: printable(value) for label, value in labels.items()}
                    for name, labels in self.info.items()
                },
                bounds=bounds,
                features=list(self.features),
                closed={"position": [str(p) for p in range(self.num_spec_tokens)][:MAX_LABELS]},
                role=_WIRE_ROLES[self.role],
            )
            for index in self.engines
        ]


def describe(
    config: Any, engines: Iterable[int], *, core: bool = False, log_stats: bool = False
) -> Description:
    """Describe the engines of a ``VllmConfig``; options that its release lacks are off.

    Args:
        config: The ``VllmConfig``.
        engines: vLLM's engine indexes.
        core: Whether the caller is the tap in the engine core, which is tapped by definition.
        log_stats: Whether the core sends its statistics to front ends, which may have the plugin.
    """
    model = config.model_config
    observability = getattr(config, "observability_config", None)
    speculative = getattr(config, "speculative_config", None)
    lora = getattr(config, "lora_config", None)
    transfer = getattr(config, "kv_transfer_config", None)
    parallel = getattr(config, "parallel_config", None)
    diffusion = bool(getattr(model, "is_diffusion", False))
    tapped = core or is_tapped(config)
    options = {
        "spec_decode": speculative is not None and not diffusion,
        "diffusion": diffusion,
        "kv_cache_metrics": tapped or getattr(observability, "kv_cache_metrics", False),
        "nan_check": os.environ.get("VLLM_COMPUTE_NANS_IN_LOGITS", "0") not in ("", "0"),
        "kv_consumer": getattr(transfer, "is_kv_consumer", False),
        "watermark": getattr(config, "watermark_config", None) is not None,
        "iteration_details": not tapped
        and getattr(observability, "enable_logging_iteration_details", False),
        ENGINE_CORE: tapped,
        FRONT_END_STATS: log_stats,
        "cudagraph": getattr(observability, "cudagraph_metrics", False),
        "lora": lora is not None,
        "kv_transfer": bool(_connectors(transfer)),
    }
    return Description(
        model=served_name(model.served_model_name),
        max_model_len=model.max_model_len,
        engines=tuple(engines),
        # Cores that Ray starts have Ray's command line.
        namespace=namespace(with_port=getattr(parallel, "data_parallel_backend", "mp") != "ray"),
        api_server=(api_server := _api_server(config)),
        api_servers=max(getattr(parallel, "_api_process_count", 1), api_server + 1),
        features=(
            *(name for name, on in options.items() if on),
            *(FEATURES[name] for name in _connectors(transfer) if name in FEATURES),
        ),
        custom_buckets=getattr(observability, "custom_histogram_buckets", None) or {},
        info={
            **_info(lora, observability, getattr(config, "scheduler_config", None)),
            **_kv_transfer(transfer),
        },
        num_spec_tokens=getattr(speculative, "num_speculative_tokens", None) or 0,
        connector=str(getattr(transfer, "kv_connector", None) or ""),
        role="core" if core else "front_end" if tapped else "alone",
    )


def _info(lora: Any, observability: Any, scheduler: Any) -> dict[str, dict[str, str]]:
    info = versions("vllm")
    info |= {} if lora is None else {"lora": {"max_lora": str(getattr(lora, "max_loras", ""))}}
    names = {"max_running_requests": "max_num_seqs", "max_step_tokens": "max_num_batched_tokens"}
    limits = {ours: getattr(scheduler, theirs, None) for ours, theirs in names.items()}
    known = {name: str(limit) for name, limit in limits.items() if limit is not None}
    info |= {LIMITS: known} if known else {}
    if getattr(observability, "kv_cache_metrics", False):
        rate = getattr(observability, "kv_cache_metrics_sample", None)
        info |= {} if rate is None else {KV_SAMPLING: {"rate": str(rate)}}
    return info


def with_cache(description: Description, config: Any, prefix: str = "") -> Description:
    """Return ``description`` with each field of the cache configuration as a label."""
    labels = {name: printable(value) for name, value in config.cache_config.metrics_info().items()}
    return dataclasses.replace(
        description, info={**description.info, f"{prefix}cache_config": labels}
    )


def with_missing(
    description: Description, fields: Mapping[str, Mapping[str, str]], prefix: str = ""
) -> Description:
    """Return ``description`` with the fields that the release lacks, as ``FieldCheck`` finds them."""
    found = {f"{prefix}{name}": labels for name, labels in fields.items()}
    return dataclasses.replace(description, info={**description.info, **found})


def served_name(name: Any) -> str:
    """Return the first served model name, the one that vLLM exposes."""
    return str(name[0] if isinstance(name, list | tuple) and name else name)


def _connectors(transfer: Any) -> dict[str, Any]:
    """Return the roles of the KV connector, and of the connectors it combines, by their names."""
    extra = getattr(transfer, "kv_connector_extra_config", None)
    inner = extra.get("connectors") if isinstance(extra, dict) else None
    parts = [part for part in inner or () if isinstance(part, dict)]
    own = getattr(transfer, "kv_connector", None), getattr(transfer, "kv_role", None)
    named = [own, *((part.get("kv_connector"), part.get("kv_role")) for part in parts)]
    return {name: role for name, role in named if isinstance(name, str) and name}


def _kv_transfer(transfer: Any) -> dict[str, dict[str, str]]:
    """Return the engine's role, and its connectors but for a MultiConnector around others.

    Caches that an engine has beside a connector do not change its role; without such a connector,
    what they load counts as cached.
    """
    found = _connectors(transfer)
    if not found:
        return {}
    outer, *_ = found
    names = [name for name in found if name != "MultiConnector"] or [outer]
    roles = {found[name] or found[outer] for name in names if name not in CACHES}
    if found[outer] in _KV_ROLES:
        roles = {found[outer]}
    role = _KV_ROLES.get(roles.pop(), BOTH) if len(roles) == 1 else BOTH
    has_caches_only = role == BOTH and CACHES.issuperset(names)
    labels = {"role": role, "connectors": printable(",".join(names))}
    return {KV_TRANSFER: {**labels, **({"external": "cached"} if has_caches_only else {})}}


def is_supported() -> bool:
    """Return whether sidestep supports the release of vLLM that runs; log why not."""
    release = str(getattr(sys.modules.get("vllm"), "__version__", ""))
    numbers = tuple(int(part) for part in release.split(".")[:2] if part.isdecimal())
    # A build from a source tree without tags is 0.1.dev1 or so.
    is_old = bool(numbers) and "dev" not in release and (numbers < (0, 11) or release == "0.11.0")
    if is_old:
        log.error(
            "sidestep: vLLM %s is too old: nothing is sent to the exporter; install 0.11.1 or later",
            printable(release),
        )
    return not is_old


def _api_server(config: Any) -> int:
    """Return this process's number among several API servers.

    Older releases have the number in the process name only.
    """
    rank = getattr(getattr(config, "parallel_config", None), "_api_process_rank", None)
    if isinstance(rank, int) and rank >= 0:
        return rank
    from multiprocessing import current_process  # noqa: PLC0415 - only older releases need it

    number = current_process().name.rpartition("_")[2]
    return int(number) if number.isdecimal() else 0
