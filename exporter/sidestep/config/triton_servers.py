"""Parser of ``--triton``: a server whose statistics are polled, and its models."""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple
from urllib.parse import urlsplit

from sidestep.config import parsing, scrape_targets
from sidestep.protocol.limits import MAX_LABEL_CHARS, is_printable

FORM = "URL[,option=value...]"
INTERVAL = 0.25
"""Seconds between polls by default: what a model does after the last one before its unload is lost."""
MODEL = "model="
MAX_MODELS = 256
OWN_LABELS = frozenset(
    {"batch_size", "id", "model", "outcome", "response", "stage", "state", "type", "version"}
)
"""Labels of Triton's families, which a user cannot give."""
SERVER = scrape_targets.Form(
    options=("model", "metrics"),
    reserved=frozenset({"le", "quantile", "origin"}) | OWN_LABELS,
    interval=INTERVAL,
)
PAGE = scrape_targets.Form(path="/metrics")

_VERSION = re.compile(r"[1-9][0-9]{0,17}")


class ModelChoice(NamedTuple):
    """Models to poll, of one ``model=``.

    Attributes:
        name: A model's name, or a pattern of names.
        version: Their only version; empty for all.
    """

    name: str
    version: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """One Triton server.

    Attributes:
        target: Its URL, without the path of the statistics, and how to poll it.
        metrics: URL of its own metrics page, whose families are exposed unless the statistics
            have them; empty for none.
    """

    target: scrape_targets.Target
    models: tuple[ModelChoice, ...] = ()
    metrics: str = ""


def parse(value: object) -> Server:
    """Return the server of one ``--triton``."""
    first, *rest = (part.strip() for part in parsing.text(value).split(","))
    if first.startswith(("grpc://", "grpcs://")):
        raise ValueError("must be Triton's HTTP port, such as http://HOST:8000, not its gRPC port")
    models = tuple(_choice(part.removeprefix(MODEL)) for part in rest if part.startswith(MODEL))
    others = [part for part in rest if not part.startswith(MODEL)]
    target, given = scrape_targets.target(",".join((first.rstrip("/"), *others)), SERVER)
    if len(models) > MAX_MODELS:
        raise ValueError(f"no more than {MAX_MODELS} models can be named; use a pattern")
    metrics = given.get("metrics", "")
    if urlsplit(target.url).query:
        raise ValueError("a URL of Triton's API has no query")
    return Server(target, models, scrape_targets.address(metrics, PAGE) if metrics else "")


def _choice(text: str) -> ModelChoice:
    """Return the choice ``NAME`` or ``NAME/VERSION``: a name has no slash."""
    name, slash, version = text.partition("/")
    if not name or len(name) > MAX_LABEL_CHARS or not is_printable(name):
        raise ValueError(f"model= must be printable, 1 to {MAX_LABEL_CHARS} characters")
    if slash and not _VERSION.fullmatch(version):
        raise ValueError("model=NAME/VERSION needs a whole number as the version")
    return ModelChoice(name, version)
