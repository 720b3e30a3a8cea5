"""The command ``sidestep run``: starts an engine with the variables and options that sidestep needs."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple, NoReturn

import msgspec

from sidestep.config.engine_settings import default_endpoint
from sidestep.config.yaml_reader import read_documents
from sidestep.diagnosis.finding import Finding
from sidestep.errors import ConfigError
from sidestep.protocol.limits import escape
from sidestep_tools.doctor import checks, endpoint, environment
from sidestep_tools.doctor.environment import ENGINES, TAP, VLLM, InstalledEngine, Start

MODULES = {"vllm": r"vllm\.entrypoints\..+", "sglang": r"sglang\.launch_server"}
"""Modules that start an engine by ``python -m``, by the engine's package."""
INTERPRETER = re.compile(
    r"""#!(?:/bin/sh\n'''exec' )?\s*(?:/usr/bin/env )?["']?([^"'\n]*python[\d.]*)"""
)
"""Matches the first lines of a console script; installers write a long path as a command of sh."""
SHUTDOWN_TIMEOUT_SINCE = (0, 18)
"""vLLM's first release that has ``--shutdown-timeout``."""
STATISTICS_SINCE = (0, 20)
"""vLLM's first release that goes without statistics in mode ``instead``."""
ISOLATING = {"docker", "podman", "nerdctl", "kubectl", "ssh", "sudo"}
"""Launchers whose command does not get the variables of this process."""
SENDERS_FAULTS = {each.code for each in (endpoint.MALFORMED, endpoint.BAD_KEYS, endpoint.NO_KEYS)}
"""Findings on an endpoint that the start of an exporter does not mend."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class Launch(NamedTuple):
    """An engine's start, to which sidestep adds what it needs and the user has not set.

    Attributes:
        release: The engine's release; empty if it is not known.
        options: Options of the command line, and of the file that ``--config`` names.
        notes: Lines that say what sidestep has set, what it has kept, and why.
    """

    engine: InstalledEngine
    release: environment.Version
    environ: dict[str, str]
    words: list[str]
    options: dict[str, str]
    notes: list[str]

    def set_variable(self, name: str, value: str, why: str) -> None:
        """Set a variable that is not set."""
        if self.environ.get(name):
            self.notes.append(f"kept {name}={self.environ[name]}, as you have set it")
            return
        self.environ[name] = value
        self.notes.append(f"set {name}={value}: {why}")

    def add_option(self, name: str, value: str, why: str) -> None:
        """Add an option that is not given; a switch has an empty value."""
        given = " ".join(filter(None, (name, self.options.get(name, value))))
        if name in self.options:
            self.notes.append(f"kept {given}, as you have set it")
            return
        self.options[name] = value
        self.words.extend(filter(None, (name, value)))
        self.notes.append(f"added {given}: {why}")

    @property
    def start(self) -> Start:
        """The start, as doctor checks it."""
        return Start(self.engine, self.environ, self.options)


def find_engine(words: Sequence[str]) -> tuple[InstalledEngine, int]:
    """Return the engine that a command line starts, and the index of the command that starts it.

    A launcher such as ``numactl`` may stand before the command.

    Raises:
        ConfigError: It starts neither vLLM nor SGLang.
    """
    engines = {each.package: each for each in ENGINES}
    for index, (word, following) in enumerate(itertools.pairwise(words)):
        if following == "serve" and PurePath(word).name in engines:
            return engines[PurePath(word).name], index
        package = following.partition(".")[0]
        if word == "-m" and package in engines and re.fullmatch(MODULES[package], following):
            before = [i for i in range(index) if PurePath(words[i]).name.startswith("python")]
            if before:
                return engines[package], before[-1]
    raise ConfigError(
        f"`{shlex.join(words):.100}` starts no engine that sidestep knows: give `vllm serve`,"
        " `python -m vllm.entrypoints.openai.api_server`, `python -m sglang.launch_server` or `sglang serve`;"
        " in a script, write `sidestep run --` before it"
    )


def take_assignments(launcher: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split the words before an engine's command into those that stay and the variables that ``env`` sets.

    Raises:
        ConfigError: The launcher keeps variables from the engine.
    """
    names = [PurePath(each).name for each in launcher]
    for name in ISOLATING.intersection(names):
        raise ConfigError(
            f"{name} keeps variables from the engine: write `sidestep run --` behind it, before the engine's command"
        )
    if "env" not in names:
        return [*launcher], {}
    found = [ASSIGNMENT.fullmatch(each) for each in launcher]
    if {"-i", "-", "--ignore-environment"}.intersection(launcher):
        raise ConfigError("env -i keeps variables from the engine: leave out -i")
    stay = [word for word, each in zip(launcher, found, strict=True) if not each]
    return stay, {each[1]: each[2] for each in found if each}


def search_path(program: str, environ: Mapping[str, str]) -> list[str] | None:
    """Return the directories in which a program's Python looks for packages; None if unknown.

    Raises:
        ConfigError: There is no such Python.
    """
    found = shutil.which(program, path=environ.get("PATH"))
    if found and not PurePath(found).name.startswith("python"):
        with Path(found).open("rb") as file:
            first = INTERPRETER.match(file.read(1024).decode(errors="replace"))
        if first and not shutil.which(first[1]):
            raise ConfigError(f"{found}: its Python {first[1]} does not exist")
        found = first and first[1]
    if not found:
        return None
    code = "import json, sys; print(json.dumps([sys.executable, *sys.path]))"
    done = subprocess.run(  # noqa: S603
        [found, "-c", code], capture_output=True, text=True, check=False, env=environ
    )
    return list(map(str, json.loads(done.stdout))) if done.returncode == 0 else None


def prepare(launch: Launch, *, tap: bool) -> None:
    """Add what sidestep needs.

    Raises:
        ConfigError: SGLang should be tapped.
    """
    engine, release, environ = launch.engine, launch.release, launch.environ
    why = f"sidestep counts in place of {engine.title}, whose own page loses these families"
    if engine is VLLM and () < release < STATISTICS_SINCE:
        why += "; this release still builds its statistics"
    launch.set_variable(
        "SIDESTEP_ENDPOINT", default_endpoint(), "where this user's `sidestep serve` listens"
    )
    launch.set_variable(engine.mode, "instead", f"{why} ({engine.mode}=beside keeps them)")
    if not launch.start.allows_plugin:
        given = environ[engine.allowed]
        environ[engine.allowed] = ",".join(filter(None, (given, "sidestep")))
        launch.notes.append(f"added sidestep to {engine.allowed}={given}, which lacks it")
    if engine is not VLLM:
        if tap:
            raise ConfigError("--tap is vLLM's: SGLang's plugin sends everything by itself")
        if "--enable-metrics" not in launch.options:
            launch.add_option("--enable-metrics", "", "without it SGLang counts nothing")
        return
    if tap:
        launch.add_option("--scheduler-cls", TAP, "the tap in the engine's core")
    elif "--headless" in launch.options:
        launch.notes.append(
            "nothing is sent from here without --tap: --headless starts no front end"
        )
    if environment.why_killed(launch.start) and (not release or release >= SHUTDOWN_TIMEOUT_SINCE):
        launch.add_option("--shutdown-timeout", "30", "with 0, processes end before they sent all")


def _file_options(words: Sequence[str]) -> dict[str, str]:
    """Return the options in the file of ``--config``; both engines read YAML."""
    name = environment.parse_options(words).get("--config")
    if not name:
        return {}
    try:
        found = list(read_documents(Path(name).read_bytes()))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    settings = found[0] if found and isinstance(found[0], dict) else {}
    given = {key: value for key, value in settings.items() if value not in (None, False)}
    return {f"--{key}".replace("_", "-"): str(value) for key, value in given.items()}


def run(words: Sequence[str], *, tap: bool) -> NoReturn:
    """Replace this process by the engine, whose signals and exit code are then its own.

    Raises:
        ConfigError: The command starts no engine, or sidestep is not installed in its environment.
    """
    engine, index = find_engine(words)
    launcher, variables = take_assignments(words[:index])
    words, environ = [*launcher, *words[index:]], {**os.environ, **variables}
    if shutil.which(words[0], path=environ.get("PATH")) is None:
        raise ConfigError(f"{words[0]}: no such command, or it may not be executed")
    path = search_path(words[len(launcher)], environ)
    version = environment.installed(path).get(engine, "") if path else ""
    if path and not version:
        raise ConfigError(f"{path[0]} has no package {engine.package}")
    options = {**_file_options(words), **environment.parse_options(words)}
    release = environment.numbers(version)
    launch = Launch(engine, release, environ, words, options, [])
    prepare(launch, tap=tap)
    found = list(_findings(launch, path))
    for finding in found:
        if finding.severity == "error":
            raise ConfigError(f"{finding.text}. {finding.remedy}")
    for line in (
        f"starting {engine.title} {version or 'of an unknown release'}",
        *launch.notes,
        *(f"{each.code} {each.severity}: {each.text}. {each.remedy}" for each in found),
    ):
        sys.stderr.write(f"sidestep: {escape(line)}\n")
    sys.stderr.flush()
    try:
        os.execvpe(launch.words[0], launch.words, launch.environ)  # noqa: S606
    except OSError as error:
        raise ConfigError(f"{launch.words[0]}: {error.strerror}") from None


def _findings(launch: Launch, path: Sequence[str] | None) -> Iterator[Finding]:
    """Yield what doctor finds in the environment and in the command line that are about to start."""
    if path is None:
        launch.notes.append("whether sidestep is installed is not checked: its Python is not known")
    else:
        for finding in checks.run(environment.PACKAGES, path[1:], path[0]):
            remedy = finding.remedy.replace("PREFIX/bin/python", path[0])
            yield msgspec.structs.replace(finding, remedy=remedy)
    subject = launch.engine.title
    yield from checks.run((*environment.ALLOWED, *environment.OPTIONS), launch.start, subject)
    yield from checks.run(environment.VARIABLES, launch.environ, subject)
    address = launch.environ["SIDESTEP_ENDPOINT"]
    for finding in endpoint.check(address, launch.environ):
        text = f"{address}: {finding.text}"
        if finding.code in SENDERS_FAULTS:
            yield msgspec.structs.replace(finding, text=f"SIDESTEP_ENDPOINT={text}")
        else:
            launch.notes.append(f"no exporter yet: {text}")
