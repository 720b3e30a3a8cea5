"""Every setting, one row each: flag, environment variable, configuration file, documentation."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sidestep import buckets
from sidestep.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PATH = re.compile(r"[A-Za-z0-9._/-]+")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")


def default_endpoint() -> str:
    """An ipc path in a directory of this user's own."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = "sidestep" if "XDG_RUNTIME_DIR" in os.environ else f"sidestep-{os.getuid()}"
    return f"ipc://{Path(base) / name / 'ingest.ipc'}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")  # noqa: TRY004 - read() turns it into one line
    return value


def _path(value: object) -> str:
    path = _text(value)
    if not path.startswith("/"):
        raise ValueError("must begin with /")
    if path == "/" or path.startswith(("/-/", "/api/")) or not _PATH.fullmatch(path):
        raise ValueError("must be a path of its own, of letters, digits and ._-/")
    return path


def _address(value: object) -> tuple[str, int]:
    """``host:port``, ``:port`` or ``[v6]:port``; an empty host is every address."""
    host, colon, port = _text(value).rpartition(":")
    if not colon or not port.isdecimal() or not 0 <= int(port) <= 65535:  # noqa: PLR2004
        raise ValueError("must be host:port")
    return host.strip("[]"), int(port)


def _seconds(value: object) -> float:
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= 86400.0:  # noqa: PLR2004 - a day
        raise ValueError("must be a number of seconds, 0 to 86400")
    return seconds


def _boolean(value: object) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ValueError("must be true or false") from None


def _one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return parse


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting; ``parse`` raises ValueError with the words that complete the error line."""

    flag: str
    help: str
    parse: Callable[[object], Any]
    default: Any
    repeatable: bool = False
    switch: bool = False
    metavar: str = ""

    @property
    def key(self) -> str:
        """Attribute of ``Config`` and parameter name."""
        return self.flag.replace(".", "_").replace("-", "_")

    @property
    def variable(self) -> str:
        """Environment variable; a repeatable setting's is separated by commas."""
        return f"SIDESTEP_{self.key.upper()}"


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "web.listen-address",
        "Where to serve the page; repeatable, an empty host means all addresses.",
        _address,
        ("127.0.0.1:9857",),
        repeatable=True,
        metavar="HOST:PORT",
    ),
    Setting("web.telemetry-path", "Path of the metrics page.", _path, "/metrics", metavar="PATH"),
    Setting(
        "ingest.endpoint",
        "Where engines connect, ipc:// or tcp://; repeatable.",
        _text,
        (),
        repeatable=True,
        metavar="ENDPOINT",
    ),
    Setting(
        "metrics.legacy",
        "Also show names that the engines have given up.",
        _boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "log.level", "Lowest level that is logged.", _one_of(LOG_LEVELS), "info", metavar="LEVEL"
    ),
    Setting("log.format", "Form of a log line.", _one_of(LOG_FORMATS), "text", metavar="FORMAT"),
    Setting(
        "log.stats-interval",
        "Seconds between the lines of engine statistics; 0 is off.",
        _seconds,
        10.0,
        metavar="SECONDS",
    ),
)

CONFIG_FILE = Setting(
    "config.file", "TOML file with these settings; flags win.", _text, "", metavar="FILE"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All settings, validated."""

    web_listen_address: tuple[tuple[str, int], ...]
    web_telemetry_path: str
    ingest_endpoint: tuple[str, ...]
    metrics_legacy: bool
    log_level: str
    log_format: str
    log_stats_interval: float
    buckets: Mapping[str, buckets.Bounds]


def read(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Settings from ``flags`` (None where not given), then the environment, then the file.

    Raises:
        ConfigError: One line that names the setting, where it came from and what is wrong.
    """
    file_name = flags.get("config_file") or environ.get(CONFIG_FILE.variable, "")
    file, bounds = _read_file(file_name) if file_name else ({}, {})
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        given, source = _find(setting, flags, environ, file, file_name)
        many = given if isinstance(given, list | tuple) and setting.repeatable else [given]
        if not many and setting.default:
            raise ConfigError(f"{source}: give at least one")
        try:
            parsed = tuple(setting.parse(one) for one in many)
        except ValueError as error:
            shown = ", ".join(map(str, many))
            raise ConfigError(f"{source} {shown!r}: {error}") from None
        values[setting.key] = parsed if setting.repeatable else parsed[0]
    values["ingest_endpoint"] = values["ingest_endpoint"] or (default_endpoint(),)
    return Config(**values, buckets=bounds)


def _find(
    setting: Setting,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    file_name: str,
) -> tuple[Any, str]:
    """The value of ``setting`` and where it came from, for an error line."""
    flag = flags.get(setting.key)
    if flag is not None and flag != ():
        return flag, f"--{setting.flag}"
    text = environ.get(setting.variable)
    if text:
        return (text.split(",") if setting.repeatable else text), setting.variable
    if setting.flag in file:
        return file[setting.flag], f"{file_name}: {setting.flag}"
    return setting.default, f"default of --{setting.flag}"


def _read_file(name: str) -> tuple[dict[str, Any], dict[str, buckets.Bounds]]:
    try:
        tree = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is not TOML: {error}") from None
    own = tree.pop("buckets", {})
    if not isinstance(own, dict):
        raise ConfigError(f"{name}: buckets must be a table")
    bounds: dict[str, buckets.Bounds] = {}
    for family, values in own.items():
        if family not in buckets.DEFAULTS:
            known = ", ".join(sorted(buckets.DEFAULTS))
            raise ConfigError(f"{name}: buckets.{family} is unknown; known are {known}")
        if not isinstance(values, list):
            raise ConfigError(f"{name}: buckets.{family} must be a list of numbers")
        bounds[family] = buckets.checked(family, values)
    found = {
        f"{section}.{key}": value
        for section, keys in tree.items()
        for key, value in (keys.items() if isinstance(keys, dict) else {"": keys}.items())
    }
    known_flags = {setting.flag for setting in SETTINGS}
    for key in found:
        if key not in known_flags:
            raise ConfigError(f"{name}: {key.rstrip('.')} is no setting; see sidestep serve --help")
    return found, bounds
