"""Decoding of Triton's model configurations, as far as metrics need them, and of its index of models."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from sidestep.errors import PollError
from sidestep.protocol.limits import MAX_LABEL_CHARS, is_printable
from sidestep_adapters.triton.statistics import decode
from sidestep_adapters.triton.wire import Whole

MAX_TAGS = 16
MAX_INSTANCES = 1 << 40
MAX_PART_BYTES = 32 << 10
"""Maximum bytes of a configuration's instance groups or tags: decoding blocks the event loop."""

_TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_]{0,126}")


class ModelConfig(msgspec.Struct, frozen=True):
    """Configuration of a model; the defaults stand for an unknown one.

    Attributes:
        tags: Additional labels of its series, named as on Triton's own page.
        instances: Concurrent executions of all instances; 0 if unknown.
        has_cache: Whether its responses may come from the response cache.
        executes: False for an ensemble, whose executions are those of its members.
    """

    tags: Mapping[str, str] = {}
    instances: int = 0
    has_cache: bool = False
    executes: bool = True


class _Group(msgspec.Struct, gc=False):
    """One entry of ``instance_group``."""

    kind: str = ""
    count: Whole = 1
    gpus: list[int] = []
    passive: bool = False


class _Cache(msgspec.Struct):
    enable: bool = False


class _Config(msgspec.Struct):
    platform: str = ""
    instance_group: msgspec.Raw = msgspec.Raw(b"[]")
    metric_tags: msgspec.Raw = msgspec.Raw(b"{}")
    response_cache: _Cache | None = None


_config = msgspec.json.Decoder(_Config)
_groups = msgspec.json.Decoder(list[_Group])
_given = msgspec.json.Decoder(dict[str, str])


def decode_config(body: bytes) -> ModelConfig:
    """Decode the answer to ``/v2/models/NAME/config``."""
    found = decode(_config, body)
    groups = decode(_groups, _checked(found.instance_group))
    tags = decode(_given, _checked(found.metric_tags))
    has_cache = found.response_cache is not None and found.response_cache.enable
    executes = found.platform != "ensemble"
    instances = sum(map(_instances, groups)) if executes else 0
    return ModelConfig(_tags(tags), min(instances, MAX_INSTANCES), has_cache, executes)


def _checked(part: msgspec.Raw) -> bytes:
    raw = bytes(part)
    if len(raw) > MAX_PART_BYTES:
        raise PollError("bad_answer", f"more than {MAX_PART_BYTES >> 10} KiB of groups or tags")
    return raw


def _instances(group: _Group) -> int:
    """Return the instances that execute requests; passive ones do not."""
    if group.passive:
        return 0
    return group.count * (max(len(group.gpus), 1) if group.kind == "KIND_GPU" else 1)


def _tags(found: Mapping[str, str]) -> dict[str, str]:
    """Return the tags that are valid labels; Triton puts ``_`` before their names."""
    named = (
        (f"_{key}", text)
        for key, text in sorted(found.items())
        if _TAG.fullmatch(key) and len(text) <= MAX_LABEL_CHARS and is_printable(text)
    )
    return dict(list(named)[:MAX_TAGS])
