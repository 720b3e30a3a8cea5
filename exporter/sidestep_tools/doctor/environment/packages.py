"""Checks of a Python environment's packages: the engine, its release, and sidestep's plugin."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

from sidestep.diagnosis.finding import Code, Finding

# fmt: off
NO_PLUGIN = Code("SD001", "error", "sidestep is not installed beside the engine",
    "The Python environment of the engine has no package `sidestep`, so the engine loads no plugin.",
    "Install sidestep with the engine's own pip: PREFIX/bin/python -m pip install, with the wheel or the repository.")
NO_ENTRY_POINT = Code("SD002", "error", "The plugin's entry point is missing",
    "sidestep can be imported, but its metadata (`sidestep-*.dist-info`) does not name the plugin: its sources are on the path without having been installed, or the release is too old.",
    "Install sidestep by pip, or copy its `.dist-info` directory as well.")
NOT_ALLOWED = Code("SD003", "error", "The engine may not load the plugin",
    "The list of allowed plugins (`VLLM_PLUGINS`, `SGLANG_PLUGINS`) does not contain `sidestep`. vLLM compares names as they are, spaces included.",
    "Add sidestep to the list, without spaces, or unset the variable. With vLLM's tap (--scheduler-cls) the plugin is not needed.")
TOO_OLD = Code("SD004", "error", "The engine's release is too old",
    "The engine's release is older than those that load sidestep's plugin, and its log does not mention it.",
    "Upgrade the engine, or let the exporter scrape the engine's page (--scrape).")
UNTESTED = Code("SD005", "warning", "The engine's release is newer than those tested",
    "The engine's release is newer than those that this release of sidestep was tested with. A field that it renamed is missing on the page.",
    "Upgrade sidestep, and compare the exporter's page with the engine's own.")
NO_ENGINE = Code("SD006", "warning", "No engine is installed",
    "The Python environment has neither vLLM nor SGLang.",
    "Run the command with the engine's Python, in the engine's container: PREFIX/bin/python -m sidestep doctor --environment.")
OLD_PYTHON = Code("SD007", "error", "Python is too old",
    "The engine runs on a Python older than 3.10, on which sidestep cannot be imported.",
    "Run the engine on Python 3.10 or later.")
OLD_LIBRARY = Code("SD008", "error", "A library of the plugin is missing or too old",
    "The plugin needs msgspec and pyzmq in the engine's environment.",
    "Install the named release with the engine's own pip.")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))

PYTHON = (3, 10)
LIBRARIES = ("msgspec", "pyzmq")
"""Packages that the plugin needs; the exporter and the command line need more."""
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_PYTHON_DIRECTORY = re.compile(r"python(\d+)\.(\d+)")

Version = tuple[int, ...]


class Engine(NamedTuple):
    """An engine that loads sidestep's plugin.

    Attributes:
        package: Name of its distribution.
        first: The oldest release that loads the plugin.
        last: The newest release that it was tested with.
        group: Entry points that the engine loads.
        allowed: Variable with the list of plugins that may be loaded.
    """

    title: str
    package: str
    first: Version
    last: Version
    group: str
    allowed: str


VLLM = Engine("vLLM", "vllm", (0, 11, 1), (0, 33), "vllm.stat_logger_plugins", "VLLM_PLUGINS")
SGLANG = Engine("SGLang", "sglang", (0, 5, 11), (0, 5, 23), "sglang.srt.plugins", "SGLANG_PLUGINS")
ENGINES = (VLLM, SGLANG)


class Packages(NamedTuple):
    """The packages of a Python environment.

    Attributes:
        name: What findings call it.
        path: Directories in which Python looks for packages.
    """

    name: str
    path: Sequence[str]

    def find(self, package: str) -> Distribution | None:
        """Return a package's metadata."""
        return next(iter(distributions(name=package, path=list(self.path))), None)


OWN = Packages(f"environment {sys.prefix}", sys.path)


def check(packages: Packages, expected: Engine | None = None) -> Iterator[Finding]:
    """Yield what is wrong with the packages; ``expected`` is an engine that runs there."""
    name = packages.name
    yield from _python(packages)
    found = [each for each in ENGINES if packages.find(each.package) is not None]
    for engine in found:
        yield from _release(packages, engine)
    if not found and expected is None:
        yield NO_ENGINE.on(name, "neither vLLM nor SGLang is installed")
        return
    sidestep = packages.find("sidestep")
    if sidestep is None:
        code = NO_ENTRY_POINT if _has_sources(packages) else NO_PLUGIN
        yield code.on(name, "no package sidestep is installed")
        return
    for engine in found or filter(None, [expected]):
        if not sidestep.entry_points.select(group=engine.group):
            text = f"sidestep {sidestep.version} has no entry point of the group {engine.group}"
            yield NO_ENTRY_POINT.on(name, text)
    yield from _libraries(packages, sidestep)


def allows_plugin(engine: Engine, environ: Mapping[str, str]) -> bool:
    """Return whether the engine may load the plugin; SGLang takes an empty list for none."""
    given = environ.get(engine.allowed)
    if engine is SGLANG:
        return not given or "sidestep" in map(str.strip, given.split(","))
    return given is None or "sidestep" in given.split(",")


def check_allowed(engine: Engine, environ: Mapping[str, str], subject: str) -> Iterator[Finding]:
    """Yield a finding if the engine may not load the plugin."""
    if not allows_plugin(engine, environ):
        yield NOT_ALLOWED.on(subject, f"{engine.allowed} is {environ[engine.allowed]!r}")


def _release(packages: Packages, engine: Engine) -> Iterator[Finding]:
    found = packages.find(engine.package)
    text = "" if found is None else found.version
    version = _numbers(text)
    # A build from a checkout without tags has a version of its own, such as 0.1.dev1.
    if not version or "dev" in text:
        return
    tested = f"sidestep supports {_dotted(engine.first)} to {_dotted(engine.last)}"
    if version < engine.first:
        yield TOO_OLD.on(packages.name, f"{engine.title} {text}; {tested}")
    elif version[: len(engine.last)] > engine.last:
        yield UNTESTED.on(packages.name, f"{engine.title} {text}; {tested}")


def _python(packages: Packages) -> Iterator[Finding]:
    for directory in packages.path:
        for part in Path(directory).parts:
            named = _PYTHON_DIRECTORY.fullmatch(part)
            version = named and (int(named[1]), int(named[2]))
            if version and version < PYTHON:
                yield OLD_PYTHON.on(packages.name, f"packages are in {directory}")
                return


def _libraries(packages: Packages, sidestep: Distribution) -> Iterator[Finding]:
    for line in sidestep.requires or ():
        package, _, least = line.partition(">=")
        if package not in LIBRARIES:
            continue
        found = packages.find(package)
        if found is None:
            yield OLD_LIBRARY.on(packages.name, f"{package} is missing, sidestep needs {line}")
        elif _numbers(found.version) < _numbers(least):
            yield OLD_LIBRARY.on(packages.name, f"{package} is {found.version}, needed is {line}")


def _has_sources(packages: Packages) -> bool:
    # Path.is_dir raises where a directory cannot be entered.
    folders = (os.path.join(each, "sidestep_adapters") for each in packages.path)  # noqa: PTH118
    return any(map(os.path.isdir, folders))


def _numbers(text: str) -> Version:
    found = _NUMBERS.match(text.strip())
    return tuple(map(int, found[0].split("."))) if found else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
