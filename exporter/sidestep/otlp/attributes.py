"""Encoder of attributes: to make a message of each would take most of a span's time."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from struct import Struct

from sidestep.exposition.proto_format import sized, varint

SPAN, LOG_RECORD = b"\x4a", b"\x32"
"""Tags of the attributes of a span and of a log record."""
Attribute = str | bool | int | float

_double = Struct("<d").pack
_KEY, _VALUE = b"\x0a", b"\x12"
"""Fields of ``KeyValue``."""
_TEXT, _BOOL, _INT, _DOUBLE = b"\x0a", b"\x10", b"\x18", b"\x21"
"""Fields of ``AnyValue``."""
DOUBLE_BYTES = 9


def encoded(tag: bytes, attributes: Iterable[tuple[str, Attribute | None]]) -> bytes:
    """Encode attributes as fields of a message; those without a value are left out.

    Args:
        tag: Tag of the fields.
        attributes: Names and values; an empty text is none.
    """
    parts = []
    for key, value in attributes:
        if isinstance(value, float):
            parts.append(_double_head(tag, key) + _double(value))
        elif isinstance(value, str):
            if value:
                text = sized(_TEXT, value.encode())
                parts.append(sized(tag, _encoded_key(key) + sized(_VALUE, text)))
        elif value is not None:
            # A bool is an int, too.
            number = (_BOOL if isinstance(value, bool) else _INT) + varint(value)
            parts.append(sized(tag, _encoded_key(key) + sized(_VALUE, number)))
    return b"".join(parts)


@functools.lru_cache(256)
def _encoded_key(key: str) -> bytes:
    return sized(_KEY, key.encode())


@functools.lru_cache(256)
def _double_head(tag: bytes, key: str) -> bytes:
    """Return all of an attribute but its eight bytes."""
    head = _encoded_key(key) + _VALUE + bytes((DOUBLE_BYTES,)) + _DOUBLE
    return tag + varint(len(head) + DOUBLE_BYTES - 1) + head
