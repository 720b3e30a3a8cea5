"""All settings, from flags, the environment and the configuration file."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sidestep.catalog import buckets
from sidestep.catalog.buckets import Bounds
from sidestep.config import parsing, variables
from sidestep.config.engine_settings import EngineSettings
from sidestep.config.output_settings import OutputSettings
from sidestep.config.setting import Setting
from sidestep.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT = "default of"
"""Beginning of the origin of a value that nobody has set."""
TABLES = ("buckets", "schemas", "shown_buckets")
"""Bounds and schemas by bucket family, and exposed bounds by metric family."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(OutputSettings, EngineSettings):
    """All settings, validated. The name of a field is its flag with underscores."""

    # Tables of the file, without flags.
    buckets: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)
    schemas: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shown_buckets: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)
    given: Sequence[str] = dataclasses.field(default=(), compare=False)
    """A line for each setting without its default: the value without secrets, and where it is set."""

    @property
    def has_sources(self) -> bool:
        """True if the exporter polls or subscribes by itself."""
        return bool(self.subscribe or self.scrape or self.triton or self.engine)

    def adjusted(self, new: Config) -> tuple[Config, list[str], list[str]]:
        """Apply the adjustable settings of ``new``.

        Returns:
            The resulting settings; the applied changes, as ``flag value``; and the flags of
            changed settings that need a restart.
        """
        changed = [s for s in SETTINGS if getattr(self, s.key) != getattr(new, s.key)]
        values = {s.key: getattr(new, s.key) for s in changed if s.adjustable}
        applied = [f"{s.flag} {_text(values[s.key])}" for s in changed if s.adjustable]
        pending = [s.flag for s in changed if not s.adjustable]
        pending += [key for key in TABLES if getattr(self, key) != getattr(new, key)]
        return dataclasses.replace(self, **values, given=new.given), applied, pending


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


SETTINGS: tuple[Setting, ...] = tuple(
    field.metadata["setting"] for field in dataclasses.fields(Config) if field.metadata
)
CONFIG_FILE = Setting(
    "--config.file FILE",
    "TOML file with these settings; flags and environment variables take precedence.",
    unset="none",
)


def read(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Read settings from ``flags`` (None where not given), then the environment, then the file.

    Raises:
        ConfigError: One line that names the setting, where it came from and what is wrong.
    """
    if found := variables.unknown(environ, [s.variable for s in (*SETTINGS, CONFIG_FILE)]):
        raise ConfigError(variables.description(found))
    file_name = flags.get("config_file") or environ.get(CONFIG_FILE.variable, "")
    file, tables = read_file(file_name) if file_name else ({}, {})
    known = {setting.flag for setting in SETTINGS}
    for key in file:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else "see sidestep serve --help"
            raise ConfigError(f"{file_name}: {key.rstrip('.')} is not a setting; {remedy}")
    settings = {s: _find(s, flags, environ, file, file_name) for s in SETTINGS}
    values = {setting.key: _parsed(setting, *each) for setting, each in settings.items()}
    given = [*_given(settings)]
    given += [
        f"{key} of {', '.join(table)} ({file_name})" for key, table in tables.items() if table
    ]
    config = Config(**values, **tables, given=given)
    _check(config)
    return config


def _given(settings: Mapping[Setting, tuple[Any, str]]) -> Iterator[str]:
    for setting, (value, origin) in settings.items():
        if not origin.startswith(DEFAULT):
            values = value if isinstance(value, list | tuple) else [value]
            yield f"{setting.flag} {', '.join(map(setting.shown, values))} ({origin})"


def _find(
    setting: Setting,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    file_name: str,
) -> tuple[Any, str]:
    """Return the value of ``setting`` and its origin for an error line."""
    flag = flags.get(setting.key)
    if flag is not None and flag != ():
        return flag, f"--{setting.flag}"
    text = environ.get(setting.variable)
    if text:
        return (text.split(setting.separator) if setting.repeatable else text), setting.variable
    if setting.flag in file:
        return file[setting.flag], f"{file_name}: {setting.flag}"
    return setting.default, f"{DEFAULT} --{setting.flag}"


def _parsed(setting: Setting, given: Any, origin: str) -> Any:
    """Parse the value, or the values of a repeatable setting."""
    many = given if isinstance(given, list | tuple) and setting.repeatable else [given]
    if not many and setting.default:
        raise ConfigError(f"{origin}: give at least one")
    try:
        parsed = tuple(setting.parse(one) for one in many)
    except ValueError as error:
        values_text = ", ".join(map(setting.shown, many))
        raise ConfigError(f"{origin} {values_text!r}: {error}") from None
    if not setting.repeatable:
        return parsed[0]
    try:
        return setting.collect(parsed)
    except ValueError as error:
        raise ConfigError(f"{setting.key}: {error}") from None


def _check(config: Config) -> None:
    """Check settings that depend on others."""
    least, most = config.health_min_threshold, config.health_max_threshold
    if least > most:
        raise ConfigError(
            f"--health.min-threshold {least:g}: must not exceed --health.max-threshold {most:g}"
        )
    if len({*config.tenants_show}) > parsing.MAX_TENANTS:
        raise ConfigError(f"--tenants.show: give {parsing.MAX_TENANTS} tenants at most")
    outputs = config.requests_log, config.otlp_traces_endpoint, config.otlp_logs_endpoint
    if config.requests_log_if and not any(outputs):
        raise ConfigError(
            "--requests.log.if: requires --requests.log, --otlp.traces-endpoint or"
            " --otlp.logs-endpoint"
        )
    if not config.web_listen_address and not config.otlp_endpoint:
        raise ConfigError(
            "metrics are neither served nor sent: set --web.listen-address or --otlp.endpoint"
        )


def read_file(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values in the file by flag, and its ``TABLES``."""
    try:
        tree = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # RecursionError escapes tomllib
        raise ConfigError(f"{name} is not TOML: {error}") from None
    tables = {key: _table(name, key, tree.pop(key, {})) for key in TABLES}
    # The operator chooses the names in these tables.
    objectives, prices = tree.pop("slo", None), tree.get("prices")
    models = prices.pop("model", None) if isinstance(prices, dict) else None
    found = _flat(_flat(tree))
    for flag, named in (("slo", objectives), ("prices.model", models)):
        if named is not None:
            found[flag] = list(named.items()) if isinstance(named, dict) else named
    return found, tables


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten one level of tables: join the keys of each table to its own with a dot."""
    return {
        f"{section}.{key}" if key else section: value
        for section, keys in tree.items()
        for key, value in (keys.items() if isinstance(keys, dict) else {"": keys}.items())
    }


def _table(name: str, key: str, table: object) -> dict[str, Any]:
    """Return the table ``key`` of a file, by bucket family or by metric family pattern."""
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: {key} must be a table")
    found: dict[str, Any] = {}
    for family, value in table.items():
        if key == "shown_buckets":
            try:
                parsing.family_pattern(family)
            except ValueError as error:
                raise ConfigError(f"{name}: shown_buckets {family!r}: {error}") from None
        elif family not in buckets.DEFAULTS:
            known = ", ".join(sorted(buckets.DEFAULTS))
            raise ConfigError(f"{name}: {key}.{family} is unknown; known are {known}")
        if key == "schemas":
            found[family] = buckets.checked_schema(f"{name}: {key}.{family}", value)
        elif isinstance(value, list):
            found[family] = buckets.checked(f"{name}: {key}.{family}", value)
        else:
            raise ConfigError(f"{name}: {key}.{family} must be a list of numbers")
    return found
