"""Readers of YAML, into a msgspec struct or as it is: PyYAML's safe loaders with limits and short errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, TypeVar

import msgspec
import yaml

from sidestep.errors import ConfigError

MAX_DEPTH = 16
MAX_BYTES = 64 << 20
"""Most bytes of a file of documents."""
MAX_NODES, MAX_ALIASED, MAX_NESTED = 1_000_000, 100_000, 100
"""Most nodes of a file, nodes that its aliases repeat, and levels."""
_PLACE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
"""Matches an error of msgspec: the expectation and the path."""
Struct = TypeVar("Struct", bound=msgspec.Struct)


class _UniqueKeys:
    """Constructor of mappings whose keys are distinct."""

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        """Reject a duplicate key; merge keys come once, and their values yield to others."""
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                raise _refused(node, f"{name} is a duplicate key")
        return super().construct_mapping(node, deep)  # type: ignore[misc,no-any-return]


class _Loader(_UniqueKeys, yaml.SafeLoader):
    """Reads mappings, lists, text, booleans and null; a number stays text.

    The content does not expand: an alias is the same object again, and merge keys and tags are
    not read.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML does
        first: [pair for pair in resolvers if pair[0].endswith((":bool", ":null"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Reject deep nesting, tags, and characters that file names and headers cannot have."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if self.depth > MAX_DEPTH:
            raise _refused(event, f"it is nested more than {MAX_DEPTH} deep")
        if getattr(event, "tag", None) is not None:
            raise _refused(event, "it has a tag")
        text = event.value if isinstance(event, yaml.ScalarEvent) else ""
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise _refused(event, "it has an invalid character")
        self.depth += 1
        node = super().compose_node(parent, index)  # type: ignore[arg-type]
        self.depth -= 1
        return node


def _refused(where: yaml.Event | yaml.Node, why: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=why, problem_mark=where.start_mark)  # type: ignore[arg-type]


class _Documents(_UniqueKeys, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads what Kubernetes does: a date is text, and so is a lone equals sign."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML does
        first: [pair for pair in resolvers if not pair[0].endswith((":timestamp", ":value"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_documents(content: bytes | str) -> Iterator[Any]:
    """Yield the documents of a file.

    Raises:
        ConfigError: It is not YAML, or too much of it; names the line.
    """
    if len(content) > MAX_BYTES:
        raise ConfigError(f"it is longer than {MAX_BYTES >> 20} MiB")
    try:
        _check_size(content)
        yield from yaml.load_all(content, Loader=_Documents)
    # Values that are none, such as 2024-99-99, are ValueErrors; a key may be a list, which has no hash.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(_one_line(error)) from None


def _check_size(content: bytes | str) -> None:
    """Refuse too many nodes, with aliases expanded, and too deep ones, before anything is built."""
    nodes, aliased = 0, 0
    anchors: dict[str, int] = {}
    above: list[tuple[str, int]] = []
    for event in yaml.parse(content, Loader=_Documents):
        if isinstance(event, yaml.AliasEvent):
            # Unknown for an alias within the node itself, which never ends.
            aliased += anchors.get(event.anchor or "", MAX_ALIASED + 1)
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
        if isinstance(event, yaml.CollectionStartEvent):
            above.append((event.anchor or "", nodes + aliased))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = above.pop()
            anchors[anchor] = nodes + aliased - before + 1
        elif isinstance(event, yaml.ScalarEvent):
            anchors[event.anchor or ""] = 1
        if nodes > MAX_NODES or aliased > MAX_ALIASED or len(above) > MAX_NESTED:
            raise _refused(event, "it has too many nodes, aliases or levels")


def _one_line(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = f"line {mark.line + 1}: " if mark is not None else ""
    return " ".join(f"{line}is not YAML: {getattr(error, 'problem', None) or error}".split())


def read(text: str, kind: type[Struct]) -> Struct:
    """Read the only document of a file; an empty one is ``kind`` with its defaults.

    Raises:
        ConfigError: Invalid YAML, with the line, or an invalid value, with the path of the key.
    """
    try:
        found = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe one
    # PyYAML raises ValueErrors for an escape that is not a character and for the digits of a version.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(_one_line(error)) from None
    try:
        return msgspec.convert({} if found is None else found, kind)
    except msgspec.ValidationError as error:
        why, where = _PLACE.fullmatch(str(error)).groups("")  # type: ignore[union-attr]
        raise ConfigError(f"{where or 'the file'}: {why}") from None
