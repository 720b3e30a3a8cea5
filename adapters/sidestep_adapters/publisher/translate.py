"""Translation of an engine's objects into wire structs, by field name.

The fast path is one call of msgspec, which copies every list, so the result owns its values.
If that meets an invalid value, the slow path converts the remaining values one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from sidestep.protocol.limits import COUNT_LIMIT, MAX_LABELS, MAX_OBSERVATIONS, printable
from sidestep.protocol.self_described import Sample

Struct = TypeVar("Struct", bound=msgspec.Struct)

_hints: dict[type, dict[str, Any]] = {}


def to_wire(
    source: object, struct: type[Struct], *, untruncated: frozenset[str] = frozenset()
) -> tuple[Struct, int]:
    """Return ``source``'s attributes as ``struct``, and how many values were left out.

    Attributes that ``struct`` does not know are ignored; missing attributes take its defaults.
    The caller splits the lists in ``untruncated``, which may exceed the wire's limits.
    """
    try:
        return msgspec.convert(source, struct, from_attributes=True), 0
    except (msgspec.ValidationError, UnicodeError):
        return _field_by_field(source, struct, untruncated)


def bounded_count(number: int) -> int:
    """Return an engine's number as an int within the limits of the wire."""
    return min(max(0, int(number)), COUNT_LIMIT)


def is_convertible(value: object, hint: Any) -> bool:
    """Return whether ``value``, or some part of it, can be sent as ``hint``."""
    return _convert(value, hint)[0] is not msgspec.UNSET


def client_count(number: object) -> int | None:
    """Return a number that a client has chosen; None if the wire does not have it, nor the item with it."""
    return number if type(number) is int and 0 <= number <= COUNT_LIMIT else None


def item_parts(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Yield ``samples`` in parts that each fit into one item."""
    part: list[Sample] = []
    held = 0
    for sample in samples:
        size = 1 + len(sample.observations)
        if part and held + size > MAX_OBSERVATIONS:
            yield part
            part, held = [], 0
        part.append(sample)
        held += size
    if part:
        yield part


def _field_by_field(
    source: object, struct: type[Struct], untruncated: frozenset[str]
) -> tuple[Struct, int]:
    hints = _hints.get(struct)
    if hints is None:
        hints = _hints[struct] = get_type_hints(struct, include_extras=True)
    values: dict[str, Any] = {}
    dropped = 0
    for name in struct.__struct_fields__:
        value = getattr(source, name, msgspec.UNSET)
        if value is not msgspec.UNSET:
            found, missed = _convert(value, hints[name], untruncated, cut=name not in untruncated)
            dropped += missed
            if found is not msgspec.UNSET:
                values[name] = found
    return struct(**values), dropped


def _convert(
    value: Any, hint: Any, untruncated: frozenset[str] = frozenset(), *, cut: bool = True
) -> tuple[Any, int]:
    """Return ``value`` converted to ``hint``, UNSET if no part is usable, and the values left out."""
    try:
        return msgspec.convert(value, hint, from_attributes=True), 0
    except (msgspec.ValidationError, UnicodeError):
        pass
    inner = _unwrap(hint)
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        if any(hasattr(value, name) for name in inner.__struct_fields__):
            return _field_by_field(value, inner, untruncated)
    elif get_origin(inner) is list and isinstance(value, list | tuple):
        pairs = [_convert(element, get_args(inner)[0]) for element in value]
        converted = [found for found, _ in pairs if found is not msgspec.UNSET]
        limit = _max_length(hint) if cut else len(converted)
        dropped = sum(missed for _, missed in pairs) + max(len(converted) - limit, 0)
        return converted[:limit], dropped
    elif get_origin(inner) is dict and isinstance(value, dict):
        return _convert_mapping(value, get_args(inner)[1])
    elif inner in (float, int):
        return _number(value, inner, hint)
    return msgspec.UNSET, 1


def _number(value: Any, kind: type[float], hint: Any) -> tuple[Any, int]:
    """Convert a bool, a scalar of numpy, or a number in a string; no part of a number is left out."""
    try:
        number = kind(value)
        if isinstance(value, str) or number == value:
            return msgspec.convert(number, hint), 0
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError):
        pass
    return msgspec.UNSET, 1


def _convert_mapping(value: dict[Any, Any], hint: Any) -> tuple[dict[str, Any], int]:
    """Convert a mapping's values; keys may be enums of strings."""
    converted: dict[str, Any] = {}
    for key, item in value.items():
        found, _ = _convert(item, hint)
        if found is not msgspec.UNSET and len(converted) < MAX_LABELS:
            converted[printable(getattr(key, "value", key))] = found
    return converted, len(value) - len(converted)


def _max_length(hint: Any) -> int:
    bounds = (getattr(meta, "max_length", None) for meta in getattr(hint, "__metadata__", ()))
    return next((bound for bound in bounds if bound is not None), MAX_OBSERVATIONS)


def _unwrap(hint: Any) -> Any:
    """Return the type inside ``Annotated`` and ``X | None``."""
    while get_origin(hint) is not None and hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    options = [option for option in get_args(hint) if option is not type(None)]
    if type(None) in get_args(hint) and len(options) == 1:
        return _unwrap(options[0])
    return hint
