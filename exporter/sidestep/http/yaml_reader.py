"""Reader of YAML into a msgspec struct: PyYAML's safe loader with limits and short errors."""

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
"""Matches an error of msgspec: the expectation and the path."""
Struct = TypeVar("Struct", bound=msgspec.Struct)


class _Loader(yaml.SafeLoader):
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

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        """Reject a duplicate key."""
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            names = Counter(str(key.value) for key, _ in node.value)
            twice = names.most_common(1)[0][0]
            raise _refused(node, f"{twice} is a duplicate key")
        return found


def _refused(where: yaml.Event | yaml.Node, why: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=why, problem_mark=where.start_mark)  # type: ignore[arg-type]


def read(text: str, kind: type[Struct]) -> Struct:
    """Read the only document of a file; an empty one is ``kind`` with its defaults.

    Raises:
        ConfigError: Invalid YAML, with the line, or an invalid value, with the path of the key.
    """
    try:
        found = yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe one
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ConfigError(f"{line}is not YAML: {error.problem}") from None
    # PyYAML raises these for an escape that is not a character and for the digits of a version.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"is not YAML: {error}") from None
    try:
        return msgspec.convert({} if found is None else found, kind)
    except msgspec.ValidationError as error:
        why, where = _PLACE.fullmatch(str(error)).groups("")  # type: ignore[union-attr]
        raise ConfigError(f"{where or 'the file'}: {why}") from None
