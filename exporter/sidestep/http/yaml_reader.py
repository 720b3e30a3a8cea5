"""Values of a YAML file, read by what is expected of them: a wrong one is one line.

The file is walked as nodes and never built as objects: an alias costs what it is, not what it
would expand to, and a number keeps its own spelling.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from decimal import Decimal

import yaml

from sidestep.errors import ConfigError

NAMES = "tag:yaml.org,2002:"
_NUMBER = re.compile(r"\+?[0-9]{1,9}")
_DURATION = re.compile(r"\+?(?:[0-9]{1,15}(?:\.[0-9]{0,15})?(?:ns|us|µs|μs|ms|s|m|h))+")
_PART = re.compile(r"([0-9.]+)([a-zµμ]+)")
_UNITS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}


class Value:
    """One value of a file, with what an error line needs: the file, the line, the key.

    Nothing (``key:`` alone) is what the toolkit makes of it: as good as the key left out.
    """

    def __init__(self, node: yaml.Node | None, source: str, path: str = "") -> None:
        self.source = source
        self.path = path
        self._node = node

    @property
    def empty(self) -> bool:
        """Whether there is nothing after the key."""
        return self._node is None or self._node.tag == f"{NAMES}null"

    def refused(self, why: str) -> ConfigError:
        """The error that says ``why`` this value cannot be."""
        line = self._node.start_mark.line + 1 if self._node is not None else 1
        return ConfigError(f"{self.source}, line {line}: {self.path or 'the file'} {why}")

    def items(self) -> Iterator[tuple[str, Value]]:
        """The keys of a mapping and their values; a key that stands twice is a mistake.

        Raises:
            ConfigError: It is no mapping, or has a key twice or one that is no text.
        """
        if self.empty:
            return
        if not isinstance(self._node, yaml.MappingNode):
            raise self.refused("must be a mapping of keys to values")
        seen: set[str] = set()
        for key, node in self._node.value:
            name = Value(key, self.source, f"a key of {self.path or 'the file'}").text()
            value = Value(node, self.source, f"{self.path}.{name}" if self.path else name)
            if name in seen:
                raise value.refused("stands there twice; keep one")
            seen.add(name)
            yield name, value

    def fields(self, known: Collection[str]) -> dict[str, Value]:
        """The keys of a mapping that has these alone.

        Raises:
            ConfigError: As ``items``, or there is a key that nobody knows.
        """
        found: dict[str, Value] = {}
        for name, value in self.items():
            if name not in known:
                raise value.refused(f"is no key of this file; known are {', '.join(known)}")
            found[name] = value
        return found

    def elements(self) -> tuple[Value, ...] | None:
        """The elements of a list; None where there is nothing.

        Raises:
            ConfigError: It is no list.
        """
        if self.empty:
            return None
        if not isinstance(self._node, yaml.SequenceNode):
            raise self.refused("must be a list")
        nodes = enumerate(self._node.value)
        return tuple(Value(node, self.source, f"{self.path}[{i}]") for i, node in nodes)

    def text(self) -> str:
        """A text, or a number as it is written.

        Raises:
            ConfigError: It is a list or a mapping, or holds what no file or name can.
        """
        if self.empty:
            return ""
        if not isinstance(self._node, yaml.ScalarNode):
            raise self.refused("must be a text")
        found = str(self._node.value)
        if "\0" in found or any("\ud800" <= char <= "\udfff" for char in found):
            raise self.refused("has a character that cannot be")
        return found

    def boolean(self, *, default: bool) -> bool:
        """Yes or no, unquoted.

        Raises:
            ConfigError: It is neither.
        """
        if self.empty:
            return default
        if self._node is None or self._node.tag != f"{NAMES}bool":
            raise self.refused("must be true or false")
        return str(self._node.value).lower() in ("true", "yes", "on")

    def number(self) -> int:
        """A whole number, 0 where there is nothing.

        Raises:
            ConfigError: It is none.
        """
        given = self.text()
        if given and not _NUMBER.fullmatch(given):
            raise self.refused("must be a whole number")
        return int(given or 0)

    def seconds(self) -> float:
        """A duration as Go writes it, ``1m30s``; 0 where there is nothing.

        Raises:
            ConfigError: It is none. A number without a unit is one: for Go it means
                nanoseconds, which nobody wants.
        """
        given = self.text()
        if given in ("", "0"):
            return 0.0
        if not _DURATION.fullmatch(given):
            raise self.refused("must be a duration with its unit, as 500ms, 1s or 1m30s")
        return float(sum(Decimal(part) * _UNITS[unit] for part, unit in _PART.findall(given)))


def parse(text: str, source: str) -> Value:
    """The file's one document.

    Raises:
        ConfigError: It is no YAML; one line with where.
    """
    try:
        return Value(yaml.compose(text, Loader=yaml.SafeLoader), source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{source}{line}: is not YAML: {error.problem}") from None
    except RecursionError:
        raise ConfigError(f"{source}: is not YAML: it is nested without end") from None
    # What PyYAML lets through of an escape that is no character, or of a version's digits.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{source}: is not YAML: {error}") from None
