"""Engines' processes on this machine, from /proc: their command lines, variables and packages."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sidestep.config.yaml_reader import read_documents
from sidestep.errors import ConfigError
from sidestep_tools.doctor.endpoint import User
from sidestep_tools.doctor.environment.packages import OWN, SGLANG, VLLM, InstalledEngine, Packages

PROC = Path("/proc")
_STARTS: Sequence[tuple[InstalledEngine, tuple[str, ...]]] = (
    (VLLM, ("vllm", "serve")),
    (VLLM, ("-m", "vllm.entrypoints.cli.main", "serve")),
    (VLLM, ("-m", "vllm.entrypoints.openai.api_server")),
    (SGLANG, ("sglang", "serve")),
    (SGLANG, ("-m", "sglang.launch_server")),
)
"""How the command lines of servers begin, after Python's own options."""


class Process(NamedTuple):
    """The main process of an engine's server.

    Attributes:
        options: Options by name, with dashes; a switch has an empty value.
        environ: Variables; None if they cannot be read.
        user: User that it runs as.
        packages: Packages of its Python environment.
    """

    pid: int
    engine: InstalledEngine
    options: Mapping[str, str]
    environ: Mapping[str, str] | None
    user: User
    packages: Packages

    @property
    def subject(self) -> str:
        """Name of the process in findings."""
        return f"process {self.pid} ({self.engine.title})"


def find() -> Iterator[Process]:
    """Yield the engines' main processes that are visible in /proc."""
    for directory in PROC.glob("[0-9]*"):
        # A process may end at any time.
        with contextlib.suppress(OSError):
            arguments = _strings(directory / "cmdline")
            engine = _engine(arguments)
            if engine is not None and _engine(_strings(_parent(directory) / "cmdline")) is None:
                yield _process(directory, engine, arguments)


def _engine(arguments: Sequence[str]) -> InstalledEngine | None:
    """Return the engine that a command line starts; wrappers such as `docker run` start none."""
    names = [Path(each).name for each in arguments[:1]] + list(arguments[1:])
    if names and names[0].startswith("python"):
        while len(names) > 1 and names[1].startswith("-") and names[1] != "-m":
            del names[1]
        names = [Path(each).name for each in names[1:2]] + names[2:]
    for engine, start in _STARTS:
        if tuple(names[: len(start)]) == start:
            return engine
    return None


def _process(directory: Path, engine: InstalledEngine, arguments: Sequence[str]) -> Process:
    environ = None
    with contextlib.suppress(PermissionError):
        pairs = (each.partition("=") for each in _strings(directory / "environ"))
        environ = {name: value for name, _, value in pairs}
    options = parse_options(arguments)
    if "--config" in options:
        with contextlib.suppress(OSError, ValueError, ConfigError):
            options = {**_configured(directory / "cwd" / options["--config"]), **options}
            del options["--config"]
    return Process(
        int(directory.name),
        engine,
        options,
        environ,
        _user(directory),
        _packages(directory, arguments[0], environ or {}),
    )


def parse_options(arguments: Sequence[str]) -> dict[str, str]:
    """Return the options; engines take underscores for dashes in their names."""
    options = {}
    for given, following in zip(arguments, (*arguments[1:], "-"), strict=False):
        if given.startswith("--"):
            name, equals, value = given.partition("=")
            own = value if equals else "" if following.startswith("-") else following
            options[name.replace("_", "-")] = own
    return options


def _configured(file: Path) -> dict[str, str]:
    """Return the options in a file of --config, as a command line has them."""
    loaded = next(read_documents(file.read_text()), None)
    given = loaded.items() if isinstance(loaded, dict) else ()
    return {
        f"--{str(name).replace('_', '-')}": "" if value is True else str(value)
        for name, value in given
        if value is not False
    }


def _user(directory: Path) -> User:
    lines = (directory / "status").read_text().splitlines()
    found = {name: values.split() for name, _, values in (line.partition(":") for line in lines)}
    groups = (found["Gid"][1], *found["Groups"])
    return User(int(found["Uid"][1]), frozenset(map(int, groups)))


def _packages(directory: Path, program: str, environ: Mapping[str, str]) -> Packages:
    """Return the packages of the environment that ``program``, a Python, belongs to."""
    if "/" in program:
        program = str((directory / "cwd").readlink() / program)
    python = Path(shutil.which(program, path=environ.get("PATH")) or program)
    prefix = python.parent.parent
    if prefix == Path(sys.prefix):
        return OWN
    places = [prefix, *_base(prefix), Path(environ.get("HOME", "/nowhere"), ".local")]
    path = [each for each in environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    for place in places:
        path += map(str, place.glob("lib/python3*/*-packages"))
    return Packages(f"environment {prefix}", path)


def _base(prefix: Path) -> Iterator[Path]:
    """Yield the prefixes whose packages an environment has as well."""
    if prefix == Path("/usr"):
        yield Path("/usr/local")
    with contextlib.suppress(OSError):
        config = (prefix / "pyvenv.cfg").read_text()
        if re.search(r"^include-system-site-packages *= *true", config, re.MULTILINE):
            yield from (Path("/usr"), Path("/usr/local"))


def _parent(directory: Path) -> Path:
    # The name, in parentheses, may contain anything.
    fields = (directory / "stat").read_text().rpartition(")")[2].split()
    return directory.with_name(fields[1])


def _strings(file: Path) -> list[str]:
    return file.read_bytes().decode("utf-8", "replace").rstrip("\0").split("\0")
