"""An engine's objects into wire structs, by field name.

The fast way is one call into msgspec, which copies every list: the result owns
its values. Where that finds a value it cannot take, the slow way takes the rest.
"""

from __future__ import annotations

from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)

_hints: dict[type, dict[str, Any]] = {}


def to_wire(source: object, struct: type[Struct]) -> tuple[Struct, int]:
    """``source``'s attributes as ``struct``, and how many values had to be left out.

    Attributes that ``struct`` does not know are passed over, absent ones take
    its defaults. Lists may come out longer than the wire allows.
    """
    try:
        return msgspec.convert(source, struct, from_attributes=True), 0
    except (msgspec.ValidationError, UnicodeError):
        return _field_by_field(source, struct)


def _field_by_field(source: object, struct: type[Struct]) -> tuple[Struct, int]:
    hints = _hints.get(struct)
    if hints is None:
        hints = _hints[struct] = get_type_hints(struct, include_extras=True)
    values: dict[str, Any] = {}
    lost = 0
    for name in struct.__struct_fields__:
        value = getattr(source, name, msgspec.UNSET)
        if value is not msgspec.UNSET:
            found, missed = _value(value, hints[name])
            lost += missed
            if found is not msgspec.UNSET:
                values[name] = found
    return struct(**values), lost


def _value(value: Any, hint: Any) -> tuple[Any, int]:
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
        return _kept(found for found, _ in pairs), sum(missed for _, missed in pairs)
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
    found = {str(getattr(key, "value", key)): _value(item, hint) for key, item in value.items()}
    kept = {key: item for key, (item, _) in found.items() if item is not msgspec.UNSET}
    return kept, sum(missed for _, missed in found.values())


def _kept(values: Any) -> list[Any]:
    return [value for value in values if value is not msgspec.UNSET]


def _plain(hint: Any) -> Any:
    """The type inside ``Annotated`` and ``X | None``."""
    while get_origin(hint) is not None and hasattr(hint, "__metadata__"):
        hint = get_args(hint)[0]
    options = [option for option in get_args(hint) if option is not type(None)]
    if type(None) in get_args(hint) and len(options) == 1:
        return _plain(options[0])
    return hint
