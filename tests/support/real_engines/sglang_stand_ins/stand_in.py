"""What a stand-in package is made of: every name is there, and none can be used.

Beside its stand-ins on PYTHONPATH, it is imported as a module of its own.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any, NoReturn


class Absent(type):
    """Of the classes that stand for names: their own names are there, too."""

    def __getattr__(cls, name: str) -> Absent:
        return absent(f"{cls.__module__}.{cls.__qualname__}", name)

    def __call__(cls, *_: object, **__: object) -> NoReturn:
        """Refuse, whatever it is that would be made or called."""
        raise NotImplementedError(f"{cls.__module__}.{cls.__qualname__} is a stand-in")


@functools.cache
def absent(place: str, name: str) -> Absent:
    """A class, as it may be called, made a base of, or named in an annotation.

    Raises:
        AttributeError: A special name: whoever looks for one acts on what it finds.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name, (), {"__module__": place})


def stand_in(module: ModuleType, *, without: str = "") -> None:
    """Give ``module`` every name and every submodule, save the one ``without``."""
    _furnish(module)
    sys.meta_path.append(_Submodules(module.__name__, without))


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads whatever is below a package."""

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
