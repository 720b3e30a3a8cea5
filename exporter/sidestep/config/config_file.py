"""The TOML configuration file: settings by flag, and tables of histogram buckets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sidestep.catalog import buckets
from sidestep.config import parsing
from sidestep.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLES = ("buckets", "schemas", "shown_buckets")
"""Bounds and schemas by bucket family, and exposed bounds by metric family."""


def read_file(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values in the file by flag, and its ``TABLES``.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an invalid table.
    """
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
            _check_pattern(name, family)
        elif family not in buckets.DEFAULTS:
            known = ", ".join(sorted(buckets.DEFAULTS))
            raise ConfigError(f"{name}: {key}.{family} is unknown; known are {known}")
        if key == "schemas":
            found[family] = buckets.checked_schema(family, value)
        elif isinstance(value, list):
            found[family] = buckets.checked(family, value)
        else:
            raise ConfigError(f"{name}: {key}.{family} must be a list of numbers")
    return found


def _check_pattern(name: str, pattern: str) -> None:
    try:
        parsing.family_pattern(pattern)
    except ValueError as error:
        raise ConfigError(f"{name}: shown_buckets {pattern!r}: {error}") from None
