"""All settings, one row each: flag, environment variable, configuration key and help text."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from sidestep.catalog import buckets
from sidestep.catalog.buckets import Bounds
from sidestep.catalog.slo import Objective
from sidestep.config import parsing, subscriptions, triton_servers
from sidestep.config import scrape_targets as polls
from sidestep.config import slo as objectives
from sidestep.config.scrape_targets import Target
from sidestep.config.subscriptions import Subscription
from sidestep.errors import ConfigError
from sidestep.transport.reach import is_reached

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REMOVED = {
    "forward.merge": "engines of different exporters are separate; sum them in PromQL",
}
"""Settings of earlier releases, and what to use instead."""
TABLES = ("buckets", "schemas", "shown_buckets")
"""Tables of the file: bounds and schemas by bucket family, and exposed bounds by metric family."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
VIEWS = ("engine", "pod")

SCHEDULED = ("first", "last")
INTER_TOKEN = ("output", "token")
HISTOGRAMS = ("classic", "native", "both")


def default_endpoint() -> str:
    """Return an ipc path in a directory that belongs to this user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = "sidestep" if "XDG_RUNTIME_DIR" in os.environ else f"sidestep-{os.getuid()}"
    return f"ipc://{Path(base) / name / 'ingest.ipc'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        parse: Parser of one value.
        adjustable: Whether SIGHUP applies a change; other settings need a restart.
        separator: Separator of values in the environment variable; ``None``: white space.
        shown: Formats a value for an error line, without secrets.
    """

    flag: str
    help: str
    parse: Callable[[object], Any]
    default: Any
    repeatable: bool = False
    switch: bool = False
    metavar: str = ""
    adjustable: bool = False
    separator: str | None = ","
    shown: Callable[[object], str] = str

    @property
    def key(self) -> str:
        """Attribute name in ``Config`` and parameter name."""
        return self.flag.replace(".", "_").replace("-", "_")

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"SIDESTEP_{self.key.upper()}"


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "web.listen-address",
        "Address to serve metrics on; repeatable. An empty host means all addresses; an empty value"
        " disables the HTTP server, for an exporter that only forwards.",
        parsing.addresses,
        ("127.0.0.1:9857",),
        repeatable=True,
        metavar="HOST:PORT",
    ),
    Setting(
        "web.telemetry-path", "Path of the metrics page.", parsing.path, "/metrics", metavar="PATH"
    ),
    Setting(
        "web.default-view",
        "View of the metrics page if the request names none: each engine separately, or all engines"
        " aggregated, as request routers expect. See views.md.",
        parsing.one_of(VIEWS),
        "engine",
        metavar="VIEW",
    ),
    Setting(
        "web.config.file",
        "YAML file in the exporter-toolkit format: TLS, client certificates, passwords, rate limit;"
        " reloaded when it changes. See security.md.",
        parsing.text,
        "",
        metavar="FILE",
    ),
    Setting(
        "ingest.endpoint",
        "Endpoint that engines connect to, ipc:// or tcp://; repeatable.",
        parsing.text,
        (),
        repeatable=True,
        metavar="ENDPOINT",
    ),
    Setting(
        "ingest.curve-key",
        "File with the exporter's secret key (sidestep keygen); tcp:// endpoints then require CURVE.",
        parsing.text,
        "",
        metavar="FILE",
    ),
    Setting(
        "ingest.authorized-keys",
        "Directory of the engines' public keys, NAME.pub, reloaded every second.",
        parsing.text,
        "",
        metavar="DIR",
    ),
    Setting(
        "ingest.allow-plain-tcp",
        "Allow tcp:// endpoints that other hosts can reach without authentication.",
        parsing.boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "ingest.ipc-group",
        "Group that may also connect to ipc:// paths; their directory is created with mode 2770.",
        parsing.text,
        "",
        metavar="GROUP",
    ),
    Setting(
        "forward",
        "Ingest endpoint of an upstream exporter to forward all metrics to. See forwarding.md.",
        parsing.forward_endpoint,
        "",
        metavar="ENDPOINT",
    ),
    Setting(
        "forward.interval",
        "Seconds between forwards of changed metrics, at most 10.",
        parsing.often,
        1.0,
        metavar="SECONDS",
    ),
    Setting(
        "forward.label",
        "Label to add to all forwarded series; repeatable, space-separated in the variable.",
        parsing.named_label,
        (),
        repeatable=True,
        metavar="NAME=VALUE",
        separator=None,
    ),
    Setting(
        "forward.source",
        "Name of this exporter, unique among those that forward to the same upstream and stable over"
        " restarts. Default: the host name.",
        parsing.source,
        "",
        metavar="NAME",
    ),
    Setting(
        "subscribe",
        "Stream of an engine's own publisher to read: kv-events, forward-pass or load, such"
        " as kv-events=tcp://host:5557,replay=tcp://host:5558; a port range has one port per"
        " rank. Repeatable; space-separated in the variable. See streams.md.",
        subscriptions.parse,
        (),
        repeatable=True,
        metavar=subscriptions.FORM,
        separator=None,
    ),
    Setting(
        "scrape",
        "Metrics page of another exporter to scrape, such as http://host:8002/metrics,label.pod=a;"
        " its families are exposed too. Repeatable; space-separated in the variable. See"
        " scrape.md.",
        polls.parse,
        (),
        repeatable=True,
        metavar=polls.FORM,
        separator=None,
        shown=polls.without_secrets,
    ),
    Setting(
        "triton",
        "Triton server to poll statistics from, http://HOST:8000; its models are exposed as engines."
        " Repeatable; space-separated in the variable. See triton.md.",
        triton_servers.parse,
        (),
        repeatable=True,
        metavar=triton_servers.FORM,
        separator=None,
        shown=polls.without_secrets,
    ),
    Setting(
        "limits.memory-soft",
        "Resident memory from which new streams are rejected; 0 disables the limit.",
        parsing.whole,
        384,
        metavar="MIB",
    ),
    Setting(
        "limits.memory-hard",
        "Resident memory at which all connections are closed and the socket is bound again; 0"
        " disables the limit.",
        parsing.whole,
        512,
        metavar="MIB",
    ),
    Setting(
        "state.dir",
        "Directory for the snapshot that keeps counters across restarts; one directory per exporter,"
        " preferably on a memory-backed volume. Without it a restart is a counter reset.",
        parsing.text,
        "",
        metavar="DIR",
    ),
    Setting(
        "metrics.legacy",
        "Also expose metric names that the engines have removed.",
        parsing.boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "metrics.common",
        "Also expose families under names that are common to all engines.",
        parsing.boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "histograms",
        "Buckets of histograms in the protobuf format, which is negotiated unless this is classic;"
        " text formats always have classic buckets. With both, Prometheus 2.42 stores only native"
        " histograms. See native-histograms.md.",
        parsing.one_of(HISTOGRAMS),
        "classic",
        metavar="KIND",
    ),
    Setting(
        "metrics.drop-label",
        "Label to drop from all engine series; series that become equal are merged. Repeatable."
        " See views.md.",
        parsing.label,
        (),
        repeatable=True,
        metavar="NAME",
    ),
    Setting(
        "metrics.allow",
        "Expose only engine families whose name matches, with wildcards * and ?; repeatable.",
        parsing.families,
        (),
        repeatable=True,
        metavar="PATTERN",
    ),
    Setting(
        "metrics.deny",
        "Do not expose engine families whose name matches, even if allowed; repeatable.",
        parsing.families,
        (),
        repeatable=True,
        metavar="PATTERN",
    ),
    Setting(
        "metrics.bucket-thinning",
        "Expose only every NUMBER-th bucket bound of a histogram, including the highest and +Inf.",
        parsing.positive,
        1,
        metavar="NUMBER",
    ),
    Setting(
        "slo",
        "Count which requests meet an objective, such as ttft=350ms: ttft, inter_token,"
        " time_per_output_token, e2e or queue; availability; or any name with family=FAMILY."
        " Repeatable; space-separated in the variable. See slo.md.",
        objectives.parse,
        (),
        repeatable=True,
        metavar=objectives.FORM,
        separator=None,
        shown=objectives.shown,
    ),
    Setting(
        "kv.sample-rate",
        "Share of KV blocks whose lifetime is tracked; 0 disables tracking.",
        parsing.share,
        0.01,
        metavar="SHARE",
        adjustable=True,
    ),
    Setting(
        "kv.scale-samples",
        "Scale KV block histograms up by the sample rate: a sampled block counts as 1/rate blocks.",
        parsing.boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "kv.max-tracked",
        "Maximum sampled KV blocks tracked at once, per engine; more are refused and counted. All"
        " engines together track at most ten times as many, in equal shares.",
        parsing.positive,
        100_000,
        metavar="NUMBER",
    ),
    Setting(
        "intervals.scheduled",
        "Scheduling of a preempted request that ends its queue time and starts its prefill; the"
        " engine uses the first.",
        parsing.one_of(SCHEDULED),
        "first",
        metavar="WHICH",
    ),
    Setting(
        "intervals.inter-token",
        "Whether the interval before an output of several tokens is one observation, as in the"
        " engine, or is divided among its tokens.",
        parsing.one_of(INTER_TOKEN),
        "output",
        metavar="PER",
    ),
    Setting(
        "requests.max-tracked",
        "Maximum requests in flight tracked at once, per engine; all engines together track at most"
        " twice as many, in equal shares.",
        parsing.positive,
        100_000,
        metavar="NUMBER",
    ),
    Setting(
        "requests.max-age",
        "Age at which a request that has not finished is no longer tracked.",
        parsing.age,
        parsing.DAY,
        metavar="SECONDS",
    ),
    Setting(
        "log.level",
        "Lowest log level that is written.",
        parsing.one_of(LOG_LEVELS),
        "info",
        metavar="LEVEL",
        adjustable=True,
    ),
    Setting(
        "log.format", "Format of log lines.", parsing.one_of(LOG_FORMATS), "text", metavar="FORMAT"
    ),
    Setting(
        "log.stats-interval",
        "Seconds between log lines of engine statistics; 0 disables them.",
        parsing.seconds,
        10.0,
        metavar="SECONDS",
    ),
)

CONFIG_FILE = Setting(
    "config.file",
    "TOML file with these settings; flags and environment variables take precedence.",
    parsing.text,
    "",
    metavar="FILE",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All settings, validated."""

    web_listen_address: tuple[tuple[str, int], ...]
    web_telemetry_path: str
    web_default_view: Literal["engine", "pod"]
    web_config_file: str
    ingest_endpoint: tuple[str, ...]
    ingest_curve_key: str
    ingest_authorized_keys: str
    ingest_allow_plain_tcp: bool
    ingest_ipc_group: str
    forward: str
    forward_interval: float
    forward_label: tuple[tuple[str, str], ...]
    forward_source: str
    subscribe: tuple[Subscription, ...]
    scrape: tuple[Target, ...]
    triton: tuple[triton_servers.Server, ...]
    limits_memory_soft: int
    limits_memory_hard: int
    state_dir: str
    metrics_legacy: bool
    metrics_common: bool
    histograms: Literal["classic", "native", "both"]
    metrics_drop_label: tuple[str, ...]
    metrics_allow: tuple[str, ...]
    metrics_deny: tuple[str, ...]
    metrics_bucket_thinning: int
    slo: tuple[Objective, ...]
    kv_sample_rate: float
    kv_scale_samples: bool
    kv_max_tracked: int
    intervals_scheduled: Literal["first", "last"]
    intervals_inter_token: Literal["output", "token"]
    requests_max_tracked: int
    requests_max_age: float
    log_level: str
    log_format: str
    log_stats_interval: float
    buckets: Mapping[str, Bounds]
    schemas: Mapping[str, int]
    shown_buckets: Mapping[str, Bounds]

    def adjusted(self, new: Config) -> tuple[Config, list[str], list[str]]:
        """Apply the adjustable settings of ``new``.

        Returns:
            The resulting settings; the applied changes, as ``flag value``; and the flags of
            changed settings that need a restart.
        """
        differing = [s for s in SETTINGS if getattr(self, s.key) != getattr(new, s.key)]
        values = {s.key: getattr(new, s.key) for s in differing if s.adjustable}
        taken = [f"{s.flag} {values[s.key]}" for s in differing if s.adjustable]
        left = [s.flag for s in differing if not s.adjustable]
        left += [key for key in TABLES if getattr(self, key) != getattr(new, key)]
        return dataclasses.replace(self, **values), taken, left


def read(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Read settings from ``flags`` (None where not given), then the environment, then the file.

    Raises:
        ConfigError: One line that names the setting, where it came from and what is wrong.
    """
    file_name = flags.get("config_file") or environ.get(CONFIG_FILE.variable, "")
    file, tables = _read_file(file_name) if file_name else ({}, {key: {} for key in TABLES})
    for flag in REMOVED:
        variable = f"SIDESTEP_{flag.upper().replace('.', '_').replace('-', '_')}"
        if environ.get(variable):
            refuse_removed(flag, variable)
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        given, source = _find(setting, flags, environ, file, file_name)
        many = given if isinstance(given, list | tuple) and setting.repeatable else [given]
        if not many and setting.default:
            raise ConfigError(f"{source}: give at least one")
        try:
            parsed = tuple(setting.parse(one) for one in many)
        except ValueError as error:
            values_text = ", ".join(map(setting.shown, many))
            raise ConfigError(f"{source} {values_text!r}: {error}") from None
        values[setting.key] = parsed if setting.repeatable else parsed[0]
    checks: dict[str, Callable[[Any], Any]] = {
        "subscribe": subscriptions.checked,
        "scrape": polls.checked,
        "triton": triton_servers.checked,
        "slo": objectives.checked,
    }
    for key, check in checks.items():
        try:
            values[key] = check(values[key])
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from None
    values["ingest_endpoint"] = values["ingest_endpoint"] or (default_endpoint(),)
    values["web_listen_address"] = tuple(filter(None, values["web_listen_address"]))
    _check_forwarding(values)
    return Config(
        **values,
        buckets=tables["buckets"],
        schemas=tables["schemas"],
        shown_buckets=tables["shown_buckets"],
    )


def refuse_removed(flag: str, source: str) -> None:
    """Reject a setting that earlier releases had, given in ``source``.

    Raises:
        ConfigError: ``flag`` was removed; the text names the replacement.
    """
    if flag in REMOVED:
        raise ConfigError(f"{source} was removed: {REMOVED[flag]}")


def _check_forwarding(values: Mapping[str, Any]) -> None:
    """Check the forwarding settings together.

    Raises:
        ConfigError: Metrics are neither served nor forwarded, or the exporter forwards to itself.
    """
    endpoint, names = values["forward"], [name for name, _ in values["forward_label"]]
    if not endpoint:
        if not values["web_listen_address"]:
            raise ConfigError(
                "metrics are neither served nor forwarded: set --web.listen-address or --forward"
            )
        if names:
            raise ConfigError("--forward.label: requires --forward")
    if any(is_reached(endpoint, bound) for bound in values["ingest_endpoint"]):
        raise ConfigError(f"--forward {endpoint}: this is the exporter's own ingest endpoint")
    if len(set(names)) < len(names):
        raise ConfigError("--forward.label: give each label once")


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
    return setting.default, f"default of --{setting.flag}"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten one level of tables: join the keys of each table to its own with a dot."""
    return {
        f"{section}.{key}" if key else section: value
        for section, keys in tree.items()
        for key, value in (keys.items() if isinstance(keys, dict) else {"": keys}.items())
    }


def _read_file(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings of a file and its ``TABLES``."""
    try:
        tree = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # RecursionError escapes tomllib
        raise ConfigError(f"{name} is not TOML: {error}") from None
    tables = {key: _table(name, key, tree.pop(key, {})) for key in TABLES}
    own = tree.pop("slo", None)
    found = _flat(_flat(tree))
    if own is not None:
        # The operator chooses the names in this table.
        found["slo"] = list(own.items()) if isinstance(own, dict) else own
    known_flags = {setting.flag for setting in SETTINGS}
    for key in found:
        refuse_removed(key, f"{name}: {key}")
        if key not in known_flags:
            raise ConfigError(
                f"{name}: {key.rstrip('.')} is not a setting; see sidestep serve --help"
            )
    return found, tables


def _table(name: str, key: str, own: object) -> dict[str, Any]:
    """Return the table ``key`` of a file, by bucket family or by metric family pattern."""
    if not isinstance(own, dict):
        raise ConfigError(f"{name}: {key} must be a table")
    found: dict[str, Any] = {}
    for family, value in own.items():
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
        parsing.families(pattern)
    except ValueError as error:
        raise ConfigError(f"{name}: shown_buckets {pattern!r}: {error}") from None
