"""What vLLM's configuration says about the engines of one front end, for the hello."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sidestep.catalog.buckets import one_two_five
from sidestep.protocol.messages import KV_SAMPLING, EngineInfo
from sidestep_adapters.publisher.environment import identity, namespace
from sidestep_adapters.publisher.translate import printable
from sidestep_adapters.vllm.connectors import FEATURES
from sidestep_adapters.vllm.ownership import is_tapped


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """What vLLM's configuration says about the engines of one front end.

    Attributes:
        model: The served model name, the label ``model_name``.
        api_server: This front end's number among its engine's API servers.
        features: Options that are on, as the catalogue names them.
        info: Info metrics by short name.
        num_spec_tokens: Positions of a draft.
        connector: Class of the KV connector, or empty.
        tapped: Whether the engine's core tells of itself.
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
    tapped: bool = False

    @property
    def stream(self) -> str:
        """Stable over restarts, and apart from every other process of this deployment."""
        return self.identity(f"engine{self.engines[0]}/api{self.api_server}")

    @property
    def core_stream(self) -> str:
        """Likewise, of the engine's core."""
        return self.identity(f"engine{self.engines[0]}/core")

    def identity(self, what: str) -> str:
        """See ``environment.identity``."""
        return identity(self.namespace, self.model, what)

    @property
    def engine_infos(self) -> list[EngineInfo]:
        """For the hello, in the order of ``engines``."""
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
                closed={"position": [str(p) for p in range(self.num_spec_tokens)]},
            )
            for index in self.engines
        ]


def describe(config: Any, engines: Iterable[int], *, core: bool = False) -> Description:
    """Read a ``VllmConfig``; options that its release does not have are off.

    ``core``: for the tap, which need not ask whether it is there.
    """
    model = config.model_config
    observability = getattr(config, "observability_config", None)
    speculative = getattr(config, "speculative_config", None)
    lora = getattr(config, "lora_config", None)
    transfer = getattr(config, "kv_transfer_config", None)
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
        "engine_core": tapped,
        "cudagraph": getattr(observability, "cudagraph_metrics", False),
        "lora": lora is not None,
    }
    return Description(
        model=served_name(model.served_model_name),
        max_model_len=model.max_model_len,
        engines=tuple(engines),
        namespace=namespace(),
        api_server=_api_server(config),
        features=(*(name for name, on in options.items() if on), *_connector_features(transfer)),
        custom_buckets=getattr(observability, "custom_histogram_buckets", None) or {},
        info=_info(lora, observability),
        num_spec_tokens=getattr(speculative, "num_speculative_tokens", None) or 0,
        connector=str(getattr(transfer, "kv_connector", None) or ""),
        tapped=tapped,
    )


def _info(lora: Any, observability: Any) -> dict[str, dict[str, str]]:
    info = {} if lora is None else {"lora": {"max_lora": str(lora.max_loras)}}
    if getattr(observability, "kv_cache_metrics", False):
        rate = getattr(observability, "kv_cache_metrics_sample", None)
        info |= {} if rate is None else {KV_SAMPLING: {"rate": str(rate)}}
    return info


def with_cache(description: Description, config: Any, prefix: str = "") -> Description:
    """``description`` with the cache configuration, every field of it, as a label."""
    labels = {name: printable(value) for name, value in config.cache_config.metrics_info().items()}
    return dataclasses.replace(
        description, info={**description.info, f"{prefix}cache_config": labels}
    )


def served_name(name: Any) -> str:
    """The first of a model's names is the one on the page."""
    return str(name[0] if isinstance(name, list | tuple) and name else name)


def _connector_features(transfer: Any) -> list[str]:
    """Options of the catalogue that the KV connector stands for, or those it is made of."""
    extra = getattr(transfer, "kv_connector_extra_config", None)
    inner = extra.get("connectors") if isinstance(extra, dict) else None
    parts = [part for part in inner or () if isinstance(part, dict)]
    names = [getattr(transfer, "kv_connector", None), *(p.get("kv_connector") for p in parts)]
    return [FEATURES[name] for name in names if isinstance(name, str) and name in FEATURES]


def _api_server(config: Any) -> int:
    """This process's number among several API servers; older releases name the process only."""
    rank = getattr(getattr(config, "parallel_config", None), "_api_process_rank", None)
    if isinstance(rank, int) and rank >= 0:
        return rank
    from multiprocessing import current_process  # noqa: PLC0415 - only where it is needed

    number = current_process().name.rpartition("_")[2]
    return int(number) if number.isdecimal() else 0
