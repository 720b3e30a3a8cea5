"""What is asked of a Triton server, whichever way, and what to do where it does not answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from sidestep.engines.triton.wire import ModelStats
from sidestep.errors import WireError
from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.statistics import ModelVersion

UNKNOWN_MODEL_PREFIX = "Request for unknown model: "
"""With ``--model-namespacing`` the statistics of all models answer so, whatever the models."""
_PORT = "see whether the URL is that of Triton's own HTTP port, by default 8000, or gRPC port, 8001"
_ADVICE: Mapping[str, str] = {
    "unreachable": "see whether Triton runs, has loaded its models and listens there",
    "slow": "a model that is loaded over HTTP blocks all of Triton's HTTP port until it is there;"
    " nothing is lost meanwhile",
    "restricted": "give the header that it expects, such as header.NAME=@/FILE",
    "unsupported": "only Triton has statistics, and not if built with TRITON_ENABLE_STATS=OFF",
    "not_ready": "it starts or ends",
    "unknown_model": "the model is not there",
    "unreadable": "the file is read again with every poll",
    "http_401": "give the password, such as header.Authorization=@/FILE",
}


def advice(cause: str) -> str:
    """What to do about a poll that failed."""
    return _ADVICE.get(cause, _PORT)


def detail(error: WireError) -> str:
    """What is wrong with an answer that was read, for an error that has a cause of its own."""
    return str(error).removeprefix(f"{error.reason}: ")


class Server(Protocol):
    """One server's answers; each question may raise ``PollError``, whose cause is the outcome."""

    async def extensions(self) -> Sequence[str]:
        """What it can do."""

    async def statistics(self, model: str = "") -> Sequence[bytes]:
        """Of all models or of one: an opaque piece for each version that is ready."""

    async def ready(self) -> Sequence[str]:
        """Names of models of which a version is ready."""

    async def config(self, model: str) -> ModelConfig:
        """Of one model."""

    def version_of(self, piece: bytes) -> ModelVersion:
        """Whose statistics ``piece`` is.

        Raises:
            WireError: It does not say.
        """

    def stats(self, piece: bytes, has_cache: bool) -> ModelStats:
        """What ``piece`` says, of a model with or without a response cache.

        Raises:
            WireError: It contradicts itself.
        """
