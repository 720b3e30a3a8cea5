"""Check of a Python environment's packages: the engine, its release, and sidestep's plugin."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from typing import NamedTuple

from sidestep.diagnosis.finding import Code, Finding
from sidestep_tools.doctor.checks import Check, run

_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
Version = tuple[int, ...]


class InstalledEngine(NamedTuple):
    """An engine that loads sidestep's plugin.

    Attributes:
        package: Name of its distribution.
        first: The oldest release that loads the plugin.
        last: The newest release that it was tested with.
        group: Entry points that the engine loads.
        allowed: Variable with the list of plugins that may be loaded.
        mode: Variable that says whether the engine computes its own metrics as well.
    """

    title: str
    package: str
    first: Version
    last: Version
    group: str
    allowed: str
    mode: str


VLLM = InstalledEngine(
    "vLLM", "vllm", (0, 11, 1), (0, 33), "vllm.stat_logger_plugins", "VLLM_PLUGINS",
    "SIDESTEP_VLLM_MODE",
)  # fmt: skip
SGLANG = InstalledEngine(
    "SGLang", "sglang", (0, 5, 11), (0, 5, 23), "sglang.srt.plugins", "SGLANG_PLUGINS",
    "SIDESTEP_SGLANG_MODE",
)  # fmt: skip
ENGINES = (VLLM, SGLANG)


class Packages(NamedTuple):
    """The packages of a Python environment.

    Attributes:
        name: What findings call it.
        path: Directories in which Python looks for packages.
        running: An engine that runs there, if one does.
    """

    name: str
    path: Sequence[str]
    running: InstalledEngine | None = None

    def find(self, package: str) -> Distribution | None:
        """Return a package's metadata."""
        return next(iter(distributions(name=package, path=list(self.path))), None)

    @property
    def engines(self) -> dict[InstalledEngine, str]:
        """Installed engines and their versions."""
        found = {each: self.find(each.package) for each in ENGINES}
        return {engine: each.version for engine, each in found.items() if each is not None}

    @property
    def has_sources(self) -> bool:
        """Whether sidestep can be imported."""
        # Path.is_dir raises where a directory cannot be entered.
        folders = (os.path.join(each, "sidestep_adapters") for each in self.path)  # noqa: PTH118
        return any(map(os.path.isdir, folders))

    @property
    def is_without_plugin(self) -> bool:
        """Whether an engine is there and sidestep is not installed."""
        return bool(self.running or self.engines) and self.find("sidestep") is None


OWN = Packages(f"environment {sys.prefix}", sys.path)


def _numbers(text: str) -> Version:
    found = _NUMBERS.match(text)
    # A build from a checkout without tags has a version of its own, such as 0.1.dev1.
    return tuple(map(int, found[0].split("."))) if found and "dev" not in text else ()


def _too_old(packages: Packages) -> list[str]:
    found = packages.engines.items()
    return [_release(each, text) for each, text in found if () < _numbers(text) < each.first]


def _untested(packages: Packages) -> list[str]:
    found = ((each, text, _numbers(text)) for each, text in packages.engines.items())
    return [_release(each, text) for each, text, v in found if v[: len(each.last)] > each.last]


def _release(engine: InstalledEngine, text: str) -> str:
    first, last = (".".join(map(str, each)) for each in (engine.first, engine.last))
    return f"{engine.title} {text}; sidestep supports {first} to {last}"


def _without_entry_point(packages: Packages) -> list[str]:
    if packages.is_without_plugin:
        return ["no package sidestep is installed"] * packages.has_sources
    sidestep = packages.find("sidestep")
    engines = packages.engines or filter(None, [packages.running])
    return [
        f"sidestep {sidestep.version} has no entry point of the group {each.group}"
        for each in engines
        if sidestep and not sidestep.entry_points.select(group=each.group)
    ]


# fmt: off
CHECKS: Sequence[Check[Packages]] = (
    Check(Code("SD001", "error", "sidestep is not installed beside the engine",
        "The Python environment of the engine has no package `sidestep`, so the engine loads no plugin.",
        "Install sidestep with the engine's own pip: PREFIX/bin/python -m pip install, with the wheel or the repository."),
        lambda p: p.is_without_plugin and not p.has_sources, "no package sidestep is installed"),
    Check(Code("SD002", "error", "The plugin's entry point is missing",
        "sidestep can be imported, but its metadata (`sidestep-*.dist-info`) does not name the plugin: its sources are on the path without having been installed, or the release is too old.",
        "Install sidestep by pip, or copy its `.dist-info` directory as well."),
        _without_entry_point),
    Check(Code("SD004", "error", "The engine's release is too old",
        "The engine's release is older than those that load sidestep's plugin, and its log does not mention it.",
        "Upgrade the engine, or let the exporter scrape the engine's page (--scrape)."),
        _too_old),
    Check(Code("SD005", "warning", "The engine's release is newer than those tested",
        "The engine's release is newer than those that this release of sidestep was tested with. A field that it renamed is missing on the page.",
        "Upgrade sidestep, and compare the exporter's page with the engine's own."),
        _untested),
    Check(Code("SD006", "warning", "No engine is installed",
        "The Python environment has neither vLLM nor SGLang.",
        "Run the command with the engine's Python, in the engine's container: PREFIX/bin/python -m sidestep doctor --environment."),
        lambda p: not (p.running or p.engines), "neither vLLM nor SGLang is installed"),
)
# fmt: on


def check(packages: Packages) -> Iterator[Finding]:
    """Yield what is wrong with the packages."""
    return run(CHECKS, packages, packages.name)
