"""Manifests as YAML nodes, which keep the order of keys and the style of each value."""

from __future__ import annotations

from typing import Any

import yaml

MAP, SEQ = "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"


def unshared(node: yaml.Node) -> yaml.Node:
    """Copy a node, so that none of its parts is at two places by an anchor."""
    if isinstance(node, yaml.MappingNode):
        pairs = [(unshared(key), unshared(value)) for key, value in node.value]
        return yaml.MappingNode(node.tag, pairs, flow_style=node.flow_style)
    if isinstance(node, yaml.SequenceNode):
        items = [unshared(each) for each in node.value]
        return yaml.SequenceNode(node.tag, items, flow_style=node.flow_style)
    return yaml.ScalarNode(node.tag, node.value, style=getattr(node, "style", None))


def dump(node: yaml.Node) -> str:
    """Return the text of a document."""
    text: str = yaml.serialize(node, Dumper=yaml.SafeDumper, allow_unicode=True, width=1 << 20)
    return text


def represent(value: Any) -> yaml.Node:
    """Return a value as a node."""
    representer = yaml.representer.SafeRepresenter(default_flow_style=False, sort_keys=False)
    return unshared(representer.represent_data(value))


def construct(node: yaml.Node) -> Any:
    """Return a node as a value."""
    return yaml.constructor.SafeConstructor().construct_document(node)


def child(node: yaml.Node, key: str) -> yaml.Node | None:
    """Return the value of a key in a mapping, or None."""
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    return next((value for name, value in pairs if name.value == key), None)


def put(node: yaml.Node, key: str, value: yaml.Node) -> None:
    """Set a key of a mapping; a new one is the last."""
    for index, (name, _) in enumerate(node.value):
        if name.value == key:
            node.value[index] = (name, value)
            return
    node.value.append((represent(key), value))


def inner(node: yaml.Node, key: str) -> yaml.Node:
    """Return the mapping at a key, which is made if there is none."""
    found = child(node, key)
    if not isinstance(found, yaml.MappingNode):
        found = yaml.MappingNode(MAP, [], flow_style=False)
        put(node, key, found)
    return found


def items(node: yaml.Node, key: str) -> list[yaml.Node]:
    """Return the items of the list at a key, which is made if there is none."""
    found = child(node, key)
    if not isinstance(found, yaml.SequenceNode) or not found.value:
        found = yaml.SequenceNode(SEQ, [], flow_style=False)
        put(node, key, found)
    values: list[yaml.Node] = found.value
    return values
