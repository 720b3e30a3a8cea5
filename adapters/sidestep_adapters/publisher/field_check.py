"""Fields that an engine's objects lack, because its release renamed or removed them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec

from sidestep.protocol.limits import printable
from sidestep.protocol.messages import ABSENT, MISSING, MISSING_FIELDS
from sidestep_adapters.publisher.translate import is_convertible

log = logging.getLogger(__name__)


class Fields(NamedTuple):
    """The fields that an adapter reads, and what is known of the engine's releases.

    Paths are those of the catalogue without ``[]``.

    Attributes:
        parts: The wire structs that name the fields, by the first name of their paths.
        since: First release of a field that older supported releases do not have, by path.
        substitutes: By path, another field of the same object with the same content.
        unread: Paths of fields that are not the engine's, or that no metric needs.
        implied: Fields in ``since`` that may be missing silently: other fields have their content.
    """

    parts: Mapping[str, type[msgspec.Struct]]
    since: Mapping[str, str] = {}
    substitutes: Mapping[str, str] = {}
    unread: Collection[str] = ()
    implied: Collection[str] = ()

    def structs(self) -> Iterator[tuple[str, type[msgspec.Struct]]]:
        """Yield the path of each struct whose fields are read, and the struct."""
        for name, struct in self.parts.items():
            yield from (each for each in _nested(struct, name) if each[0] not in self.unread)


class FieldCheck:
    """Finds missing fields in the first object of each kind; in the publisher thread.

    Args:
        package: The engine's package, whose release is logged.
        fields: The fields that the adapter reads.
        found: Called with the engine's info that names all missing fields, whenever more are found.
        is_owned: Returns whether the process sends the field at a path.

    Attributes:
        missing: Fields that the release lacks, by path: ``ABSENT`` if that is known of the release,
            else ``MISSING``.
    """

    def __init__(
        self,
        package: str,
        fields: Fields,
        found: Callable[[Mapping[str, dict[str, str]]], None],
        is_owned: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.missing: dict[str, str] = {}
        self._package = package
        self._fields = fields
        self._found = found
        self._is_owned = is_owned
        self._unseen = [(path.split("."), struct) for path, struct in fields.structs()]

    def check(self, **parts: object) -> None:
        """Check objects of kinds that have not been seen yet, in ``parts`` or nested in them."""
        before = len(self.missing)
        for place in [*self._unseen]:
            names, struct = place
            found: Any = parts.get(names[0])
            for name in names[1:]:
                found = _value(found, name, None)
                if isinstance(found, list) or type(found) is tuple:
                    found = found[0] if found else None
            if found is not None:
                self._unseen.remove(place)
                self._look(".".join(names), struct, found)
        if len(self.missing) > before:
            described = {path.replace(".", "__"): each for path, each in self.missing.items()}
            self._found({MISSING_FIELDS: described})

    def _look(self, path: str, struct: type[msgspec.Struct], source: object) -> None:
        release = str(getattr(sys.modules.get(self._package), "__version__", ""))
        hints = get_type_hints(struct, include_extras=True)
        paths = [f"{path}.{n}" for n, hint in hints.items() if not _is_usable(source, n, hint)]
        statuses = {each: self._status(each, source, release) for each in paths}
        lacks = {each: status for each, status in statuses.items() if status}
        self.missing |= lacks
        if unknown := [field for field, status in lacks.items() if status == MISSING]:
            log.warning(
                "sidestep: %s %s has no field %s: the exporter has no samples of the metrics that need"
                " it; install a release of sidestep that knows this release",
                self._package,
                printable(release) or "of an unknown release",
                ", ".join(unknown),
            )

    def _status(self, path: str, source: object, release: str) -> str:
        """Return the status of a field that ``source`` lacks; empty if nothing needs it."""
        fields = self._fields
        substitute = fields.substitutes.get(path)
        if substitute is not None and hasattr(source, substitute):
            return ""
        if path in fields.unread or not self._is_owned(path):
            return ""
        if _numbers(release) >= _numbers(fields.since.get(path, "")):
            return MISSING
        return "" if path in fields.implied else ABSENT


def _value(source: object, name: str, default: object) -> Any:
    """Return an attribute; ``default`` if there is none, or it raises an exception."""
    try:
        return getattr(source, name, default)
    except Exception:  # noqa: BLE001 - a property may do anything
        return default


def _is_usable(source: object, name: str, hint: Any) -> bool:
    """Return whether an attribute is of a type that can be sent; numbers differ from object to object."""
    found = _value(source, name, msgspec.UNSET)
    return found is not msgspec.UNSET and (
        isinstance(found, int | float) or is_convertible(found, hint)
    )


def _nested(struct: type[msgspec.Struct], path: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    yield path, struct
    for name, hint in get_type_hints(struct).items():
        for inner in _structs(hint):
            yield from _nested(inner, f"{path}.{name}")


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    """Yield the structs that a type such as ``list[S] | None`` names."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in get_args(hint):
        yield from _structs(argument)


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers of a release; none, which precede all others, of an unknown one."""
    parts = release.partition("+")[0].split(".")[:3]
    return tuple(int(part) for part in parts if part.isdecimal())
