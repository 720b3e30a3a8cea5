"""Stand-in packages: every name can be imported, none can be called.

The stand-ins import it as a top-level module from PYTHONPATH.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, NoReturn


class Absent(type):
    """A metaclass whose classes have every attribute."""

    def __getattr__(cls, name: str) -> Absent:
        return absent(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        """Refuse every call and construction."""
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} is a stand-in")


@functools.cache
def absent(place: str, name: str) -> Absent:
    """Return a class, which can be a decorator, a base or an annotation."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {"__module__": place})


def stand_in(module: ModuleType, *, without: str = "") -> None:
    """Give ``module`` every name and submodule, except the submodule ``without``."""
    _furnish(module)
    sys.meta_path.append(_Submodules(module.__name__, without))


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder and loader of everything below a package."""

    def __init__(self, package: str, without: str) -> None:
        self._below = f"{package}."
        self._without = f"{package}.{without}"

    def find_spec(
        self, fullname: str, *_: object, **__: object
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._below) or fullname == self._without:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        _furnish(module)


def _furnish(module: ModuleType) -> None:
    contents: dict[str, Any] = module.__dict__
    contents["__path__"] = []
    contents["__getattr__"] = functools.partial(absent, module.__name__)
