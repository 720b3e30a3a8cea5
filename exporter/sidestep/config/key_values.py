"""What stands behind the commas of ``--subscribe`` and of polled targets: ``name=value``, each once."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from sidestep.protocol.limits import MAX_LABEL_CHARS, is_printable

LABEL = "label."

Check = Callable[[str, str], None]
"""Of a name behind its prefix and its value; raises ValueError."""

_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,127}")


def read(
    parts: Iterable[str], names: Sequence[str], prefixes: Mapping[str, Check]
) -> dict[str, str]:
    """The options in ``parts``, by their whole names.

    Args:
        parts: Each ``name=value``.
        names: Those that are known.
        prefixes: Of those whose names go on as the user likes.

    Raises:
        ValueError: Completes an error line; of an unknown option it has the name alone, since
            the value may be a secret.
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


def behind(prefix: str, options: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The options of ``prefix`` without it, sorted by name."""
    return tuple(
        sorted(
            (name.removeprefix(prefix), text)
            for name, text in options.items()
            if name.startswith(prefix)
        )
    )


def check_text(name: str, text: str) -> None:
    """Whether ``text`` may be an option's value.

    Raises:
        ValueError: It cannot be a label's either.
    """
    if len(text) > MAX_LABEL_CHARS or not is_printable(text):
        raise ValueError(f"{name}= must be printable, {MAX_LABEL_CHARS} characters at most")


def labels_but(reserved: Collection[str], instead: str = "") -> Check:
    """The check of ``label.NAME=`` where names in ``reserved`` are taken; ``instead`` says what to use."""

    def check(name: str, text: str) -> None:
        if not _LABEL_NAME.fullmatch(name) or name in reserved:
            raise ValueError(f"{name!r} cannot be a label{instead}")
        check_text(f"{LABEL}{name}", text)

    return check
