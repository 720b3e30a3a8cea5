"""The API of a Triton server, the same over HTTP and gRPC, and advice about failed polls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from sidestep_adapters.triton.model_config import ModelConfig
from sidestep_adapters.triton.statistics import ModelVersion
from sidestep_adapters.triton.wire import ModelStats

T = TypeVar("T")

UNKNOWN_MODEL_PREFIX = "Request for unknown model: "
"""Beginning of the answer to a query for all models from a server with ``--model-namespacing``."""
_PORT = "check that the URL is that of Triton's own HTTP port, by default 8000, or gRPC port, 8001"
_ADVICE: Mapping[str, str] = {
    "unreachable": "check that Triton runs, has loaded its models and listens there",
    "slow": "a model that is loaded over HTTP blocks Triton's HTTP port until it is loaded;"
    " no counts are lost meanwhile",
    "restricted": "set the header that the server expects, such as header.NAME=@/FILE",
    "unsupported": "only Triton has statistics, unless it was built with TRITON_ENABLE_STATS=OFF",
    "not_ready": "the server is starting or stopping",
    "unknown_model": "the server does not have the model",
    "unreadable": "every poll reads the file again",
    "http_401": "set the password, such as header.Authorization=@/FILE",
}


def advice(cause: str) -> str:
    """Return what to do about a failed poll."""
    return _ADVICE.get(cause, _PORT)


def find_cause(causes: Iterable[tuple[T, str, str]], status: T, text: str) -> str:
    """Return the cause of a failed query, the first that matches; empty if none does.

    Args:
        causes: Status, a part of the server's text, and their cause.
        status: Status of the answer.
        text: The server's text.
    """
    matches = (cause for known, part, cause in causes if known == status and part in text)
    return next(matches, "")


class ServerApi(Protocol):
    """One server's API; a query connects as needed.

    Each query may raise ``PollError``, whose cause is the poll's outcome.
    """

    def check(self) -> None:
        """Read all files that queries need, once before the first query.

        Raises:
            ConfigError: A file cannot be read, or is invalid.
        """

    async def close(self) -> None:
        """Close the connection."""

    async def extensions(self) -> Sequence[str]:
        """Return the names of the server's extensions."""

    async def statistics(self, model: str = "", version: str = "") -> Sequence[bytes]:
        """Return the statistics of all models, of one, or of one of its versions.

        Returns:
            An undecoded piece for each ready version.
        """

    async def ready(self) -> Sequence[str]:
        """Return the names of models that have a ready version."""

    async def config(self, model: str) -> ModelConfig:
        """Return the configuration of one model."""

    def version_of(self, piece: bytes) -> ModelVersion:
        """Return the model and version of ``piece``.

        Raises:
            PollError: ``piece`` does not have them.
        """

    def stats(self, piece: bytes, has_cache: bool) -> ModelStats:
        """Decode the statistics ``piece``; ``has_cache`` says if the model has a response cache.

        Raises:
            WireError: ``piece`` is invalid.
        """
