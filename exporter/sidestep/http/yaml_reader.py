"""A YAML file into a msgspec struct: PyYAML's safe loader under limits, errors in one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from typing import TypeVar

import msgspec
import yaml

from sidestep.errors import ConfigError

MAX_DEPTH = 16
_PLACE = re.compile(r"(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?", re.DOTALL)
"""An error of msgspec: what it expected, and the path."""
Struct = TypeVar("Struct", bound=msgspec.Struct)


class _Loader(yaml.SafeLoader):
    """Read mappings, lists, text, booleans and null: a number stays the text that it is.

    Nothing of a file expands: an alias is the same object once more, and neither merge keys nor
    tags are read.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way
        first: [pair for pair in resolvers if pair[0].endswith((":bool", ":null"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Refuse nesting without end, tags, and characters that no file name or header can have."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if self.depth > MAX_DEPTH:
            raise _refused(event, f"it is nested more than {MAX_DEPTH} deep")
        if getattr(event, "tag", None) is not None:
            raise _refused(event, "it has a tag")
        text = event.value if isinstance(event, yaml.ScalarEvent) else ""
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise _refused(event, "it has a character that cannot be")
        self.depth += 1
        node = super().compose_node(parent, index)  # type: ignore[arg-type]
        self.depth -= 1
        return node

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        """Refuse a key that a mapping has twice."""
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            names = Counter(str(key.value) for key, _ in node.value)
            twice = names.most_common(1)[0][0]
            raise _refused(node, f"{twice} stands there twice")
        return found


def _refused(where: yaml.Event | yaml.Node, why: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=why, problem_mark=where.start_mark)  # type: ignore[arg-type]


def read(text: str, kind: type[Struct]) -> Struct:
    """Read the one document of a file; an empty one is ``kind`` with its defaults.

    Raises:
        ConfigError: It is not YAML, with the line, or not ``kind``, with the path of the key.
    """
    try:
        found = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{line}is not YAML: {error.problem}") from None
    # What PyYAML lets through of an escape that is no character, or of a version's digits.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"is not YAML: {error}") from None
    try:
        return msgspec.convert({} if found is None else found, kind)
    except msgspec.ValidationError as error:
        why, where = _PLACE.fullmatch(str(error)).groups("")  # type: ignore[union-attr]
        raise ConfigError(f"{where or 'the file'}: {why}") from None
