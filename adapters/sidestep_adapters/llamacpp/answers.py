"""Answers of llama-server in JSON: only the fields that are needed, and no text of a request."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from sidestep.errors import PollError
from sidestep.protocol.limits import Count, printable

JSON = "application/json"
ROUTER = "router"
MAX_SLOTS = 4096
MAX_MODELS = 4096
T = TypeVar("T")


class Defaults(msgspec.Struct, frozen=True):
    """The part of ``/props`` about the context of a slot."""

    n_ctx: Count = 0


class Props(msgspec.Struct):
    """``/props``.

    Attributes:
        role: ``ROUTER`` for a server that starts a process for each model.
    """

    role: str = ""
    total_slots: Count = 0
    model_alias: str = ""
    model_path: str = ""
    is_sleeping: bool = False
    default_generation_settings: Defaults = Defaults()

    @property
    def name(self) -> str:
        """The model's alias, or else the name of its file."""
        return printable(self.model_alias or self.model_path.replace("\\", "/").rpartition("/")[2])

    @property
    def context(self) -> int:
        """Tokens that fit into all slots."""
        return self.total_slots * self.default_generation_settings.n_ctx


class Slot(msgspec.Struct):
    """One slot of ``/slots``."""

    is_processing: bool = False
    n_prompt_tokens: Count = 0


class Status(msgspec.Struct, frozen=True):
    """Status of a router's model."""

    value: str = ""


class Model(msgspec.Struct):
    """One model of a router's ``/models``."""

    id: str
    status: Status = Status()


class Models(msgspec.Struct):
    """A router's ``/models``."""

    data: Annotated[list[Model], Meta(max_length=MAX_MODELS)] = []


Slots = Annotated[list[Slot], Meta(max_length=MAX_SLOTS)]


def decode(body: bytes, kind: type[T]) -> T:
    """Decode an answer."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise PollError("bad_answer", str(error)) from None
