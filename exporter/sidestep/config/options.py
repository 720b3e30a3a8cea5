"""Options after the commas of ``--scrape``, ``--subscribe``, ``--triton`` and ``--engine``: ``name=value``, each once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sidestep.config.parsing import is_label_name
from sidestep.protocol.limits import MAX_LABEL_CHARS, is_printable

LABEL = "label."

Check = Callable[[str, str], None]
"""Checks the name after a prefix, and the value; raises ValueError."""


def parse(
    parts: Iterable[str], names: Sequence[str], prefixes: Mapping[str, Check]
) -> dict[str, str]:
    """Return the values of the options in ``parts`` by name.

    ``prefixes`` are known beginnings of names that the user completes, with a check of each.

    Raises:
        ValueError: Completes an error line; that of an unknown option does not contain the value,
            which may be a secret.
    """
    found: dict[str, str] = {}
    for part in parts:
        name, equals, text = part.partition("=")
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        if not equals or not (prefix or name in names):
            known = [f"{one}=" for one in names] + [f"{one}NAME=" for one in prefixes]
            raise ValueError(f"{name!r} is no option; known {_listed(known)}")
        if prefix:
            prefixes[prefix](name.removeprefix(prefix), text)
        else:
            check_text(name, text)
        if name in found:
            raise ValueError(f"{name}= is given twice")
        found[name] = text
    return found


def _listed(names: Sequence[str]) -> str:
    *others, last = names
    return f"are {', '.join(others)} and {last}" if others else f"is {last}"


def with_prefix(prefix: str, options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the options whose name begins with ``prefix``, without it, sorted by name."""
    return tuple(
        sorted(
            (name.removeprefix(prefix), text)
            for name, text in options.items()
            if name.startswith(prefix)
        )
    )


def check_text(name: str, text: str) -> None:
    """Reject a value that could not be a label's."""
    if len(text) > MAX_LABEL_CHARS or not is_printable(text):
        raise ValueError(f"{name}= must be printable, {MAX_LABEL_CHARS} characters at most")


def label_check(reserved: Collection[str], instead: str = "") -> Check:
    """Return the check of ``label.NAME=`` that rejects ``reserved`` names; ``instead`` is a hint."""

    def check(name: str, text: str) -> None:
        if not is_label_name(name) or name in reserved:
            raise ValueError(f"{name!r} cannot be a label{instead}")
        check_text(f"{LABEL}{name}", text)

    return check


def check_unique(names: Iterable[str], end: str = "") -> None:
    """Reject a name that occurs more than once."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{name} is given twice{end}")
        seen.add(name)


def collector(
    name_of: Callable[[Any], str], most: int, end: str
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return the check of all values of a setting: at most ``most``, and each name once."""

    def collect(found: tuple[Any, ...]) -> tuple[Any, ...]:
        check_unique(map(name_of, found), end)
        if len(found) > most:
            raise ValueError(f"there are {len(found)}; give {most} at most")
        return found

    return collect
