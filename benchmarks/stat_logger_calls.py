"""Calls of vLLM's stat logger that were recorded as JSON lines, and what the plugin makes of them.

A line has ``call``, ``t_mono``, the call's arguments, and ``instance`` if several front ends share the
file. The files are in tests/data.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec

from sidestep.catalog.buckets import checked
from sidestep.engines.items import encode_item
from sidestep.protocol.iteration_stats import FINISH_REASONS
from sidestep_adapters.recording.format import Items, StreamStart, Writer
from sidestep_adapters.vllm.description import Description, served_name
from sidestep_adapters.vllm.stats import VllmTap

DATA = Path(__file__).parents[1] / "tests" / "data"
NAMESPACE = "recorded"


class Call(NamedTuple):
    """A call: in process ``instance``, ``at`` seconds after the start."""

    at: float
    instance: str
    name: str
    fields: dict[str, Any]


def calls(path: Path) -> Iterator[Call]:
    """Yield the calls in a file, which may be compressed with gzip."""
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    start: float | None = None
    for line in lines:
        fields = json.loads(line)
        at = fields.pop("t_mono")
        start = at if start is None else start
        yield Call(at - start, str(fields.pop("instance", "")), fields.pop("call"), fields)


def convert(path: Path, recording: Path) -> Path:
    """Write a recording with what the front ends would have sent, each as a stream of its own."""
    front_ends: dict[str, _FrontEnd] = {}
    writer = Writer(recording)
    for call in calls(path):
        if call.name == "__init__" and call.instance not in front_ends:
            description = _description(call.fields, len(front_ends))
            front_end = front_ends[call.instance] = _FrontEnd(description)
            infos = description.engine_infos
            for info in infos:
                info.id = info.id.removeprefix(f"{NAMESPACE}/")
            writer.write(StreamStart(call.at, front_end.stream, infos))
        elif items := front_ends[call.instance].items(call):
            writer.write(Items(call.at, front_ends[call.instance].stream, items))
    writer.close()
    return recording


class _FrontEnd:
    """A recorded process: its tap makes items of the calls at once."""

    def __init__(self, description: Description) -> None:
        self.stream = description.stream.removeprefix(f"{NAMESPACE}/")
        self._items: list[msgspec.Raw] = []
        self._tap = VllmTap(self._push, self._fail, description.engines)
        self._tap.record_sleep_state()

    def items(self, call: Call) -> list[msgspec.Raw]:
        """Return the items of ``call``; the first one comes with the state before it."""
        fields = call.fields
        if call.name == "record":
            scheduler, iteration, mm_cache = (
                to_objects(fields[f"{n}_stats"]) for n in ("scheduler", "iteration", "mm_cache")
            )
            self._tap.record(scheduler, iteration, mm_cache, fields["engine_idx"])
        elif call.name == "record_sleep_state":
            self._tap.record_sleep_state(fields["sleep"], fields["level"])
        elif call.name == "record_admission_rejection":
            self._tap.record_admission_rejection(fields["reason"])
        made, self._items = self._items, []
        return made

    def _push(self, item: Any) -> None:
        items = item() if callable(item) else [item]
        self._items += [msgspec.Raw(encode_item(each)) for each in items]

    def _fail(self, problem: str) -> None:
        raise ValueError(problem)


def _description(fields: dict[str, Any], api_server: int) -> Description:
    """Return the description of the front end that a recorded ``__init__`` call made.

    The call does not have the environment, so it is unknown whether logits were checked for NaNs:
    their counter is exposed, as with the check on.
    """
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
        max_model_len=fields["max_model_len"],
        engines=tuple(fields["engine_indexes"]),
        namespace=NAMESPACE,
        api_server=api_server,
        features=tuple(name for name, on in options.items() if on),
        custom_buckets={str(name): checked(name, bounds) for name, bounds in custom.items()},
    )


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
        # An IntEnum in the engine, recorded by its name.
        members["finish_reason"] = FINISH_REASONS.index(reason.lower())
    return SimpleNamespace(**members)
