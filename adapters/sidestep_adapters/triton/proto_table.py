"""Protobuf message classes made from a table, without generated code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Table = Mapping[str, Mapping[int, tuple[str, str]]]
"""By message and field number: the field's name, and its type, behind ``repeated`` if it is.
A type that is not a scalar names a message of the table.
"""

_REPEATED = "repeated "
_Field = descriptor_pb2.FieldDescriptorProto


def messages(package: str, table: Table, *, syntax: str) -> dict[str, Any]:
    """Return the message classes of ``table`` by name.

    They have a pool of their own: other libraries in the process may have messages with these
    names.

    Args:
        package: The messages' package.
        table: The messages and their fields.
        syntax: ``proto2`` or ``proto3``.
    """
    file = descriptor_pb2.FileDescriptorProto(
        name=f"sidestep/{package}.proto", package=package, syntax=syntax
    )
    for message, fields in table.items():
        described = file.message_type.add(name=message)
        for number, (name, form) in fields.items():
            kind = form.removeprefix(_REPEATED)
            field = described.field.add(name=name, number=number)
            field.label = _Field.LABEL_OPTIONAL if kind == form else _Field.LABEL_REPEATED
            if kind in table:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{package}.{name}") for name in table)
    return {each.name: message_factory.GetMessageClass(each) for each in found}
