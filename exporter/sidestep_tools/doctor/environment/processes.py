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

from sidestep.diagnosis.finding import Code, Finding
from sidestep.errors import ConfigError
from sidestep.http.yaml_reader import read_documents
from sidestep_tools.doctor.endpoint import User
from sidestep_tools.doctor.environment.packages import (
    OWN,
    SGLANG,
    VLLM,
    Engine,
    Packages,
    allows_plugin,
)

# fmt: off
NOT_READABLE = Code("SD020", "info", "An engine's variables cannot be read",
    "The engine's process belongs to another user, so only its command line was checked.",
    "Run the command as the engine's user, or as root.")
SCHEDULER = Code("SD021", "error", "The tap's path is wrong",
    "vLLM's --scheduler-cls names a class of sidestep that does not exist, so vLLM does not start.",
    "Write --scheduler-cls sidestep_adapters.vllm.scheduler.SidestepScheduler.")
NO_METRICS = Code("SD022", "error", "SGLang runs without --enable-metrics",
    "Without --enable-metrics SGLang makes no collectors, and the plugin has nothing to send.",
    "Start SGLang with --enable-metrics; SIDESTEP_SGLANG_MODE=instead removes what it costs.")
RUST_FRONT_END = Code("SD023", "error", "vLLM's Rust front end loads no plugins",
    "VLLM_USE_RUST_FRONTEND is set and the tap is not configured, so nothing is sent.",
    "Add the tap: --scheduler-cls sidestep_adapters.vllm.scheduler.SidestepScheduler.")
NO_STATISTICS = Code("SD024", "info", "--disable-log-stats has no effect on the front end",
    "vLLM computes statistics if a stat-logger plugin is installed, even with --disable-log-stats.",
    "To save their cost, use the tap (--scheduler-cls) and set VLLM_PLUGINS to a list without sidestep.")
KILLED = Code("SD025", "warning", "vLLM kills its processes before they can send their last items",
    "With several API servers, or with the tap, and vLLM's default --shutdown-timeout 0, SIGTERM kills them within milliseconds: items of the last moments are lost.",
    "Start vLLM with --shutdown-timeout 30.")
WORKERS = Code("SD026", "warning", "SGLang's tokenizer workers do not load the plugin",
    "With --tokenizer-worker-num above 1, TTFT, inter-token and end-to-end latency and the counts of ended requests are on SGLang's own page only.",
    "Start SGLang with one tokenizer worker, or scrape its page as well (--scrape).")
# fmt: on
CODES = tuple(each for each in tuple(vars().values()) if isinstance(each, Code))

PROC = Path("/proc")
TAPS = (
    "sidestep_adapters.vllm.scheduler.SidestepScheduler",
    "sidestep_adapters.vllm_scheduler.SidestepScheduler",
)
_STARTS: Sequence[tuple[Engine, tuple[str, ...]]] = (
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
    engine: Engine
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


def check(process: Process) -> Iterator[Finding]:
    """Yield what is wrong with a process's command line."""
    if process.environ is None:
        yield NOT_READABLE.on(process.subject, f"user {process.user.uid} runs it")
    environ = process.environ or {}
    yield from check_options(process.engine, process.options, environ, process.subject)


def check_options(
    engine: Engine, options: Mapping[str, str], environ: Mapping[str, str], subject: str
) -> Iterator[Finding]:
    """Yield what is wrong with an engine's options."""
    if engine is SGLANG:
        yield from _sglang(options, subject)
        return
    chosen = options.get("--scheduler-cls", "")
    if "sidestep" in chosen and not is_tapped(options):
        yield SCHEDULER.on(subject, f"--scheduler-cls is {chosen}")
    if environ.get("VLLM_USE_RUST_FRONTEND") == "1" and not is_tapped(options):
        yield RUST_FRONT_END.on(subject, "VLLM_USE_RUST_FRONTEND is 1")
    if "--disable-log-stats" in options and allows_plugin(VLLM, environ):
        yield NO_STATISTICS.on(subject, "--disable-log-stats is set, and the plugin is installed")
    # Of data parallelism vLLM starts one API server for each rank.
    servers = options.get("--api-server-count", options.get("--data-parallel-size", "1"))
    if (servers != "1" or is_tapped(options)) and options.get("--shutdown-timeout", "0") == "0":
        what = "the tap is configured" if servers == "1" else f"it has {servers} API servers"
        yield KILLED.on(subject, f"{what}, and --shutdown-timeout is 0")


def is_tapped(options: Mapping[str, str]) -> bool:
    """Return whether an engine with these options runs sidestep's scheduler."""
    return options.get("--scheduler-cls") in TAPS


def _sglang(options: Mapping[str, str], subject: str) -> Iterator[Finding]:
    # A file that cannot be read may have it.
    if "--enable-metrics" not in options and "--config" not in options:
        yield NO_METRICS.on(subject, "--enable-metrics is not set")
    workers = options.get("--tokenizer-worker-num", "1")
    if workers != "1":
        yield WORKERS.on(subject, f"--tokenizer-worker-num is {workers}")


def _engine(arguments: Sequence[str]) -> Engine | None:
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


def _process(directory: Path, engine: Engine, arguments: Sequence[str]) -> Process:
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
