"""An engine's objects into wire structs, by field name.

The fast way is one call into msgspec, which copies every list: the result owns
its values. Where that finds a value it cannot take, the slow way takes the rest.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from sidestep.protocol.limits import MAX_LABEL_CHARS, MAX_LABELS, MAX_OBSERVATIONS

Struct = TypeVar("Struct", bound=msgspec.Struct)

UNCUT = frozenset(
    {
        "finished_requests",
        "inter_token_latencies_iter",
        "kv_cache_eviction_events",
        "max_num_generation_tokens_iter",
        "n_params_iter",
        "time_to_first_tokens_iter",
    }
)
"""Lists that are split over several items rather than cut: see ``vllm.split``."""

_hints: dict[type, dict[str, Any]] = {}


def to_wire(source: object, struct: type[Struct]) -> tuple[Struct, int]:
    """``source``'s attributes as ``struct``, and how many values had to be left out.

    Attributes that ``struct`` does not know are passed over, absent ones take
    its defaults. The lists in ``UNCUT`` may come out longer than the wire allows.
    """
    try:
        return msgspec.convert(source, struct, from_attributes=True), 0
    except (msgspec.ValidationError, UnicodeError):
        return _field_by_field(source, struct)


def printable(text: object) -> str:
    """``text`` as a label value may be: short, and without control characters."""
    cut = str(text)[:MAX_LABEL_CHARS]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


def _field_by_field(source: object, struct: type[Struct]) -> tuple[Struct, int]:
    hints = _hints.get(struct)
    if hints is None:
        hints = _hints[struct] = get_type_hints(struct, include_extras=True)
    values: dict[str, Any] = {}
    lost = 0
    for name in struct.__struct_fields__:
        value = getattr(source, name, msgspec.UNSET)
        if value is not msgspec.UNSET:
            found, missed = _value(value, hints[name], cut=name not in UNCUT)
            lost += missed
            if found is not msgspec.UNSET:
                values[name] = found
    return struct(**values), lost


def _value(value: Any, hint: Any, *, cut: bool = True) -> tuple[Any, int]:
    """``value`` as ``hint`` wants it, UNSET where nothing of it can be used."""
    try:
        return msgspec.convert(value, hint, from_attributes=True), 0
    except (msgspec.ValidationError, UnicodeError):
        pass
    inner = _plain(hint)
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        return _field_by_field(value, inner)
    if get_origin(inner) is list and isinstance(value, list | tuple):
        pairs = [_value(element, get_args(inner)[0]) for element in value]
        kept = [found for found, _ in pairs if found is not msgspec.UNSET]
        limit = _longest(hint) if cut else len(kept)
        lost = sum(missed for _, missed in pairs) + max(len(kept) - limit, 0)
        return kept[:limit], lost
    if get_origin(inner) is dict and isinstance(value, dict):
        return _mapping(value, get_args(inner)[1])
    try:
        # A bool where a number is meant, a numpy scalar, a number in a string.
        number = inner(value) if inner in (float, int) else None
        return msgspec.convert(number, hint), 0
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
        return msgspec.UNSET, 1


def _mapping(value: dict[Any, Any], hint: Any) -> tuple[dict[str, Any], int]:
    """Keys may be enums of strings."""
    kept: dict[str, Any] = {}
    for key, item in value.items():
        found, _ = _value(item, hint)
        if found is not msgspec.UNSET and len(kept) < MAX_LABELS:
            kept[printable(getattr(key, "value", key))] = found
    return kept, len(value) - len(kept)


def _longest(hint: Any) -> int:
    """How many elements the wire allows."""
    bounds = (getattr(meta, "max_length", None) for meta in getattr(hint, "__metadata__", ()))
    return next((bound for bound in bounds if bound is not None), MAX_OBSERVATIONS)


def _plain(hint: Any) -> Any:
    """The type inside ``Annotated`` and ``X | None``."""
    while get_origin(hint) is not None and hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    options = [option for option in get_args(hint) if option is not type(None)]
    if type(None) in get_args(hint) and len(options) == 1:
        return _plain(options[0])
    return hint
