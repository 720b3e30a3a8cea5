"""Readers of YAML by PyYAML's safe loaders, with limits and one-line errors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any, TypeVar

import msgspec
import yaml

from sidestep.errors import ConfigError

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
        """Reject a duplicate key; a merge key may also occur once only."""
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for name, count in names.items():
            if count > 1:
                raise _refused(node, f"{name} is a duplicate key")
        return super().construct_mapping(node, deep)  # type: ignore[misc,no-any-return]


class _Loader(_UniqueKeys, yaml.SafeLoader):
    """Loader of settings: mappings, lists, text, booleans and null. A number stays text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML does
        first: [pair for pair in resolvers if pair[0].endswith((":bool", ":null"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _refused(where: yaml.Event | yaml.Node, why: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=why, problem_mark=where.start_mark)  # type: ignore[arg-type]


class _Documents(_UniqueKeys, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader of manifests, as Kubernetes reads them: a date is text, and so is a lone equals sign."""

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
        _check(content, _Documents)
        yield from yaml.load_all(content, Loader=_Documents)
    # A date such as 2024-99-99 is a ValueError, and a list as a key is a TypeError.
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(_one_line(error)) from None


def read_nodes(content: str) -> yaml.Node | None:
    """Return the nodes of the only document of a file, without merge keys; None: it is empty.

    Raises:
        ConfigError: As of ``read_documents``.
    """
    list(read_documents(content))
    loader = _Documents(content)
    try:
        node: yaml.Node | None = loader.get_single_node()
        if node is not None:
            # It replaces merge keys.
            loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(_one_line(error)) from None
    return node


def _check(content: bytes | str, loader: type[Any]) -> None:
    """Refuse too many nodes, with aliases expanded, and too many levels, before anything is built."""
    nodes, aliased = 0, 0
    anchors: dict[str, int] = {}
    above: list[tuple[str, int]] = []
    for event in yaml.parse(content, Loader=loader):
        if isinstance(event, yaml.AliasEvent):
            # An alias within its own node has no size yet: it would never end.
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
        if loader is _Loader:
            _check_setting(event)


def _check_setting(event: yaml.Event) -> None:
    """Refuse tags, and characters that file names and headers cannot have."""
    if getattr(event, "tag", None) is not None:
        raise _refused(event, "it has a tag")
    text = event.value if isinstance(event, yaml.ScalarEvent) else ""
    if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise _refused(event, "it has an invalid character")


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
        _check(text, _Loader)
        found = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe one
    # PyYAML raises ValueErrors for an escape that is not a character and for the digits of a version.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(_one_line(error)) from None
    try:
        return msgspec.convert({} if found is None else found, kind)
    except msgspec.ValidationError as error:
        why, where = _PLACE.fullmatch(str(error)).groups("")  # type: ignore[union-attr]
        raise ConfigError(f"{where or 'the file'}: {why}") from None
