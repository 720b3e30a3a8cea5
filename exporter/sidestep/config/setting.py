"""A setting: its flag, environment variable and key in the file, its help, parser and default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sidestep.config import parsing
from sidestep.config.variables import PREFIX, TOPIC_BY_SECTION


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting, whose value a flag, an environment variable or a key of the file gives.

    Attributes:
        usage: The flag, and the placeholder of its value; a flag without one is a switch.
        parse: Parser of one value; it raises ValueError with the end of an error line.
        default: Parsed like a given value; that of a repeatable setting is a tuple.
        unset: Text of help and documents about an empty default: what applies without a value.
        collect: Of a repeatable setting, checks all parsed values together.
        separator: Separator of values in the environment variable; ``None``: white space.
        shown: Formats a value for an error line, without secrets.
        adjustable: Whether SIGHUP applies a change; other settings need a restart.
    """

    usage: str
    help: str
    parse: Callable[[object], Any] = parsing.text
    default: Any = ""
    unset: str = ""
    collect: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple
    separator: str | None = ","
    shown: Callable[[object], str] = str
    adjustable: bool = False

    @property
    def flag(self) -> str:
        """The flag without its dashes, which is also the key in the file."""
        return self.usage.partition(" ")[0].removeprefix("--")

    @property
    def metavar(self) -> str:
        """Placeholder of the value; empty for a switch."""
        return self.usage.partition(" ")[2]

    @property
    def key(self) -> str:
        """Attribute name in ``Config``."""
        return self.flag.replace(".", "_").replace("-", "_")

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"{PREFIX}{self.key.upper()}"

    @property
    def repeatable(self) -> bool:
        """True if the setting has several values."""
        return isinstance(self.default, tuple)

    @property
    def topic(self) -> str:
        """The group that the setting belongs to in help and documents."""
        return TOPIC_BY_SECTION[self.flag.partition(".")[0]]

    @property
    def default_text(self) -> str:
        """The default, or what applies without one."""
        if self.unset:
            return f"unset: {self.unset}"
        if self.repeatable:
            return f"default: {', '.join(self.default)}"
        shown = (
            f"{self.default:g}" if isinstance(self.default, float) else str(self.default).lower()
        )
        return f"default: {shown}"


def option(*args: Any, **kwargs: Any) -> Any:
    """Declare a field of ``Config`` by the arguments of its ``Setting``."""
    return dataclasses.field(metadata={"setting": Setting(*args, **kwargs)})
