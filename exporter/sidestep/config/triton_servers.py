"""What ``--triton`` says: which server's statistics are polled, and of which models."""

from __future__ import annotations

import dataclasses
from urllib.parse import urlsplit

from sidestep.config import parsing
from sidestep.config import scrape_targets as polls
from sidestep.protocol.limits import MAX_LABEL_CHARS, is_printable

FORM = "URL[,option=value...]"
MODEL = "model="
MAX_MODELS = 256
OWN_LABELS = frozenset(
    {"batch_size", "id", "model", "outcome", "response", "stage", "state", "type", "version"}
)
"""Labels of Triton's families."""
SERVER = polls.Form(
    schemes=("http", "https", "grpc", "grpcs"),
    options=("model", "metrics"),
    reserved=frozenset({"le", "quantile", "origin"}) | OWN_LABELS,
)
PAGE = polls.Form(path="/metrics")


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """One Triton server.

    Attributes:
        target: Its URL, without any path of Triton's, and how it is polled.
        models: Names or patterns of names; empty: all.
        metrics: URL of its own page, of which what statistics do not know is passed on;
            empty: none.
    """

    target: polls.Target
    models: tuple[str, ...] = ()
    metrics: str = ""

    @property
    def is_grpc(self) -> bool:
        """Whether it is asked over gRPC."""
        return self.target.url.startswith("grpc")


def parse(value: object) -> Server:
    """The server of one ``--triton``.

    Raises:
        ValueError: Completes an error line.
    """
    first, *rest = (part.strip() for part in parsing.text(value).split(","))
    models = tuple(part.removeprefix(MODEL) for part in rest if part.startswith(MODEL))
    others = [part for part in rest if not part.startswith(MODEL)]
    target, given = polls.target(",".join((first.rstrip("/"), *others)), SERVER)
    if len(models) > MAX_MODELS:
        raise ValueError(f"no more than {MAX_MODELS} models can be named; use a pattern")
    for model in models:
        if not model or len(model) > MAX_LABEL_CHARS or not is_printable(model):
            raise ValueError(f"model= must be printable, 1 to {MAX_LABEL_CHARS} characters")
    metrics = given.get("metrics", "")
    found = Server(target, models, polls.address(metrics, PAGE) if metrics else "")
    if found.is_grpc and urlsplit(target.url).path:
        raise ValueError("a URL of gRPC has no path")
    return found


def checked(found: tuple[Server, ...]) -> tuple[Server, ...]:
    """All servers.

    Raises:
        ValueError: There are too many, or one twice; completes an error line.
    """
    polls.checked(tuple(server.target for server in found))
    return found
