"""Recorded calls of vLLM's stat logger: JSON lines, one object for each call.

A line has ``call``, ``t_mono``, the call's arguments, and ``instance`` if several front ends share
the file. Its objects are translated as in a running engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from sidestep.catalog.buckets import checked
from sidestep.engines.items import encode_item
from sidestep.errors import ConfigError
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep_adapters.recording.format import MAX_SECONDS, Items, StreamStart
from sidestep_adapters.vllm.description import Description, served_name
from sidestep_adapters.vllm.stats import VllmTap


class Call(msgspec.Struct):
    """A call of a stat logger: in process ``instance``, ``at`` seconds after the start."""

    at: float
    instance: str
    name: str
    fields: dict[str, Any]


def calls(path: Path, found: Iterable[bytes]) -> Iterator[Call]:
    """Yield the calls in the lines of the file at ``path``.

    Raises:
        ConfigError: A line is no call; the error names it.
    """
    start: float | None = None
    for number, line in enumerate(found, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            at = float(fields.pop("t_mono"))
            name = str(fields.pop("call"))
        except (
            ArithmeticError,
            AttributeError,
            KeyError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigError(f"{path}: line {number} is no stat-logger call: {error!r}") from None
        start = at if start is None else start
        since = max(at - start, 0.0)
        if not since <= MAX_SECONDS:
            raise ConfigError(f"{path}: line {number} is no stat-logger call: its time is {at}")
        yield Call(since, str(fields.pop("instance", "")), name, fields)


def translated(path: Path, found: Iterable[bytes], namespace: str) -> Iterator[StreamStart | Items]:
    """Yield what the recorded front ends would have sent, each as a stream of its own.

    Raises:
        ConfigError: A line is no call, or cannot be translated.
    """
    front_ends: dict[str, _FrontEnd] = {}
    for number, call in enumerate(calls(path, found), start=1):
        if call.name == "__init__" and call.instance not in front_ends:
            description = description_of(call.fields, len(front_ends), namespace)
            front_ends[call.instance] = _FrontEnd(description)
            yield StreamStart(call.at, description.stream, description.engine_infos)
        front_end = front_ends.get(call.instance)
        if front_end is None:
            raise ConfigError(f"{path}: line {number}: no __init__ call of its process")
        try:
            items = front_end.items(call)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path}: line {number}: {error}") from None
        if items:
            yield Items(call.at, front_end.stream, items)


class _FrontEnd:
    """A recorded process: its tap makes items of the calls at once."""

    def __init__(self, description: Description) -> None:
        self.stream = description.stream
        self._items: list[msgspec.Raw] = []
        self._tap = VllmTap(self._push, self._fail, description.engines)
        self._tap.record_sleep_state()

    def items(self, call: Call) -> list[msgspec.Raw]:
        """Return the items of ``call``; the first one comes with the state before it."""
        fields = call.fields
        if call.name == "__init__":
            return []
        if call.name == "record":
            scheduler, iteration, mm_cache = (
                to_objects(fields.get(f"{name}_stats"))
                for name in ("scheduler", "iteration", "mm_cache")
            )
            self._tap.record(scheduler, iteration, mm_cache, int(fields.get("engine_idx", 0)))
        elif call.name == "record_sleep_state":
            self._tap.record_sleep_state(int(fields.get("sleep", 0)), int(fields.get("level", 0)))
        elif call.name == "record_admission_rejection":
            self._tap.record_admission_rejection(str(fields.get("reason", "")))
        made, self._items = self._items, []
        return made

    def _push(self, item: Any) -> None:
        items = item() if callable(item) else [item]
        self._items += [msgspec.Raw(encode_item(each)) for each in items]

    def _fail(self, problem: str) -> None:
        raise ValueError(problem)


def description_of(fields: dict[str, Any], api_server: int, namespace: str) -> Description:
    """Return the description of the front end that a recorded ``__init__`` call made.

    The call does not have the environment, so it is unknown whether logits were checked for NaNs:
    their counter is exposed, as with the check on.

    Raises:
        ConfigError: The call lacks a required field.
    """
    try:
        observability = fields.get("observability") or {}
        options = {
            "nan_check": True,
            "kv_cache_metrics": observability.get("kv_cache_metrics"),
            "iteration_details": observability.get("enable_logging_iteration_details"),
            "cudagraph": observability.get("cudagraph_metrics"),
        }
        custom = observability.get("custom_histogram_buckets") or {}
        return Description(
            model=served_name(fields["model"]),
            max_model_len=int(fields["max_model_len"]),
            engines=tuple(int(index) for index in fields["engine_indexes"]),
            namespace=namespace,
            api_server=api_server,
            features=tuple(name for name, on in options.items() if on),
            custom_buckets={str(name): checked(name, bounds) for name, bounds in custom.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(f"an __init__ call of the recording lacks a field: {error!r}") from None


def to_objects(value: Any) -> Any:
    """Convert recorded JSON to the objects that vLLM passes: attributes instead of members."""
    if isinstance(value, list):
        return [to_objects(element) for element in value]
    if not isinstance(value, dict):
        return value
    members = {key: to_objects(member) for key, member in value.items()}
    if members.pop("__type__", None) is None:
        return members
    reason = members.get("finish_reason")
    if isinstance(reason, str):
        # An IntEnum in the engine, recorded by its name; an unknown one gets the last index.
        known = reason.lower() in FINISH_REASONS
        index = FINISH_REASONS.index(reason.lower()) if known else len(FINISH_REASONS)
        members["finish_reason"] = index
    return SimpleNamespace(**members)
