"""Every setting, one row each: flag, environment variable, configuration file, documentation."""

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
    "forward.merge": "engines of two exporters are two engines; add them up in PromQL",
}
"""Settings of earlier releases, and what to use instead."""
TABLES = ("buckets", "schemas", "shown_buckets")
"""Of the file: what each bucket family has, and what is shown of families."""
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
VIEWS = ("engine", "pod")

SCHEDULED = ("first", "last")
INTER_TOKEN = ("output", "token")
HISTOGRAMS = ("classic", "native", "both")


def default_endpoint() -> str:
    """An ipc path in a directory of this user's own."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    name = "sidestep" if "XDG_RUNTIME_DIR" in os.environ else f"sidestep-{os.getuid()}"
    return f"ipc://{Path(base) / name / 'ingest.ipc'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        parse: One of ``parsing``'s.
        adjustable: SIGHUP applies a change of it; that of another needs a restart.
        separator: Of several values in the environment variable; ``None`` are blanks.
        shown: A value as an error line has it.
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
        """Attribute of ``Config`` and parameter name."""
        return self.flag.replace(".", "_").replace("-", "_")

    @property
    def variable(self) -> str:
        """Environment variable."""
        return f"SIDESTEP_{self.key.upper()}"


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "web.listen-address",
        "Where to serve the page; repeatable, an empty host means all addresses. Empty: nobody is"
        " served, as where everything is forwarded.",
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
        "What the page shows where the request names no view: each engine by itself, or all"
        " engines as one, as request routers want it. See views.md.",
        parsing.one_of(VIEWS),
        "engine",
        metavar="VIEW",
    ),
    Setting(
        "web.config.file",
        "YAML file of exporter-toolkit's format: TLS, client certificates, passwords, rate limit;"
        " read again when it changes. See security.md.",
        parsing.text,
        "",
        metavar="FILE",
    ),
    Setting(
        "ingest.endpoint",
        "Where engines connect, ipc:// or tcp://; repeatable.",
        parsing.text,
        (),
        repeatable=True,
        metavar="ENDPOINT",
    ),
    Setting(
        "ingest.curve-key",
        "File with the exporter's secret key (sidestep keygen); tcp:// then requires CURVE.",
        parsing.text,
        "",
        metavar="FILE",
    ),
    Setting(
        "ingest.authorized-keys",
        "Directory of the engines' public keys, NAME.pub, read again every second.",
        parsing.text,
        "",
        metavar="DIR",
    ),
    Setting(
        "ingest.allow-plain-tcp",
        "Let tcp:// beyond this host be open to anyone who can reach it.",
        parsing.boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "ingest.ipc-group",
        "Group that may connect to ipc:// paths as well: the directory is made with mode 2770.",
        parsing.text,
        "",
        metavar="GROUP",
    ),
    Setting(
        "forward",
        "Another exporter's ingest endpoint, which all that is counted here is told to. See"
        " forwarding.md.",
        parsing.forward_endpoint,
        "",
        metavar="ENDPOINT",
    ),
    Setting(
        "forward.interval",
        "Seconds between two times that what is new is forwarded, 10 at most.",
        parsing.often,
        1.0,
        metavar="SECONDS",
    ),
    Setting(
        "forward.label",
        "Label that all series get on the way; repeatable, in the variable blanks separate.",
        parsing.named_label,
        (),
        repeatable=True,
        metavar="NAME=VALUE",
        separator=None,
    ),
    Setting(
        "forward.source",
        "What this exporter calls itself: no other that forwards to the same one may, and it stays"
        " the same. By default the host's name.",
        parsing.source,
        "",
        metavar="NAME",
    ),
    Setting(
        "subscribe",
        "Read a stream that an engine publishes by itself: kv-events, forward-pass or load, such"
        " as kv-events=tcp://host:5557,replay=tcp://host:5558; a port may be a range, one for"
        " each rank. Repeatable; in the variable blanks separate. See streams.md.",
        subscriptions.parse,
        (),
        repeatable=True,
        metavar=subscriptions.FORM,
        separator=None,
    ),
    Setting(
        "scrape",
        "Fetch another exporter's page, such as http://host:8002/metrics,label.pod=a, and show its"
        " families beside ours. Repeatable; in the variable blanks separate. See scrape.md.",
        polls.parse,
        (),
        repeatable=True,
        metavar=polls.FORM,
        separator=None,
        shown=polls.without_secrets,
    ),
    Setting(
        "triton",
        "Poll the statistics of a Triton server, http://HOST:8000, and show them beside engines."
        " Repeatable; in the variable blanks separate. See triton.md.",
        triton_servers.parse,
        (),
        repeatable=True,
        metavar=triton_servers.FORM,
        separator=None,
        shown=polls.without_secrets,
    ),
    Setting(
        "limits.memory-soft",
        "Resident memory from which no new streams are taken; 0 is off.",
        parsing.whole,
        384,
        metavar="MIB",
    ),
    Setting(
        "limits.memory-hard",
        "Resident memory at which all connections are cut and the socket is bound anew; 0 is off.",
        parsing.whole,
        512,
        metavar="MIB",
    ),
    Setting(
        "state.dir",
        "Directory for the snapshot that counters outlive this process with; one exporter each,"
        " best in memory. Without it this process's end is a counter reset.",
        parsing.text,
        "",
        metavar="DIR",
    ),
    Setting(
        "metrics.legacy",
        "Also show names that the engines have given up.",
        parsing.boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "metrics.common",
        "Also show families under names that are the same for all engines.",
        parsing.boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "histograms",
        "Which buckets histograms have in the protobuf format, which is served to those who ask for"
        " it unless this is classic; text always has the classic ones. Of both, Prometheus 2.42"
        " keeps the native ones only. See native-histograms.md.",
        parsing.one_of(HISTOGRAMS),
        "classic",
        metavar="KIND",
    ),
    Setting(
        "metrics.drop-label",
        "Label that no engine's series has; those that it alone told apart are combined."
        " Repeatable. See views.md.",
        parsing.label,
        (),
        repeatable=True,
        metavar="NAME",
    ),
    Setting(
        "metrics.allow",
        "Show only engines' families of such names, * and ? standing for others; repeatable.",
        parsing.families,
        (),
        repeatable=True,
        metavar="PATTERN",
    ),
    Setting(
        "metrics.deny",
        "Show no engines' families of such names, whatever is allowed; repeatable.",
        parsing.families,
        (),
        repeatable=True,
        metavar="PATTERN",
    ),
    Setting(
        "metrics.bucket-thinning",
        "Show every such bound of a histogram only, the highest and +Inf among them.",
        parsing.positive,
        1,
        metavar="NUMBER",
    ),
    Setting(
        "slo",
        "Count which requests meet an objective, such as ttft=350ms: ttft, inter_token,"
        " time_per_output_token, e2e or queue; availability; or, with family=, a name and a family of"
        " your choice. Repeatable; in the variable blanks separate. See slo.md.",
        objectives.parse,
        (),
        repeatable=True,
        metavar=objectives.FORM,
        separator=None,
        shown=objectives.shown,
    ),
    Setting(
        "kv.sample-rate",
        "Share of KV blocks whose lifetime is tracked; 0 is off.",
        parsing.share,
        0.01,
        metavar="SHARE",
        adjustable=True,
    ),
    Setting(
        "kv.scale-samples",
        "Count each sampled block for all it stands for.",
        parsing.boolean,
        default=False,
        switch=True,
    ),
    Setting(
        "kv.max-tracked",
        "Sampled KV blocks tracked at once, per engine; more are refused and counted. All"
        " engines together track ten times as many at most, in equal shares.",
        parsing.positive,
        100_000,
        metavar="NUMBER",
    ),
    Setting(
        "intervals.scheduled",
        "Which scheduling of a preempted request ends its queue time and starts its prefill;"
        " the engine takes the first.",
        parsing.one_of(SCHEDULED),
        "first",
        metavar="WHICH",
    ),
    Setting(
        "intervals.inter-token",
        "Whether the gap before an output of several tokens counts once, as in the engine,"
        " or divided among its tokens.",
        parsing.one_of(INTER_TOKEN),
        "output",
        metavar="PER",
    ),
    Setting(
        "requests.max-tracked",
        "Requests in flight followed at once, per engine; all engines together twice as many,"
        " of which each has its share.",
        parsing.positive,
        100_000,
        metavar="NUMBER",
    ),
    Setting(
        "requests.max-age",
        "After so long a request that has not finished is followed no more.",
        parsing.age,
        parsing.DAY,
        metavar="SECONDS",
    ),
    Setting(
        "log.level",
        "Lowest level that is logged.",
        parsing.one_of(LOG_LEVELS),
        "info",
        metavar="LEVEL",
        adjustable=True,
    ),
    Setting(
        "log.format", "Form of a log line.", parsing.one_of(LOG_FORMATS), "text", metavar="FORMAT"
    ),
    Setting(
        "log.stats-interval",
        "Seconds between the lines of engine statistics; 0 is off.",
        parsing.seconds,
        10.0,
        metavar="SECONDS",
    ),
)

CONFIG_FILE = Setting(
    "config.file", "TOML file with these settings; flags win.", parsing.text, "", metavar="FILE"
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
        """What ``new`` changes.

        Returns:
            The settings from now on, what of them is new, as ``flag value``, and the
            flags of what differs but needs a restart.
        """
        differing = [s for s in SETTINGS if getattr(self, s.key) != getattr(new, s.key)]
        values = {s.key: getattr(new, s.key) for s in differing if s.adjustable}
        taken = [f"{s.flag} {values[s.key]}" for s in differing if s.adjustable]
        left = [s.flag for s in differing if not s.adjustable]
        left += [key for key in TABLES if getattr(self, key) != getattr(new, key)]
        return dataclasses.replace(self, **values), taken, left


def read(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Config:
    """Settings from ``flags`` (None where not given), then the environment, then the file.

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
            said = ", ".join(map(setting.shown, many))
            raise ConfigError(f"{source} {said!r}: {error}") from None
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
    """Refuse a setting of an earlier release, given in ``source``.

    Raises:
        ConfigError: ``flag`` is one; the line says what to use instead.
    """
    if flag in REMOVED:
        raise ConfigError(f"{source} is gone: {REMOVED[flag]}")


def _check_forwarding(values: Mapping[str, Any]) -> None:
    """What no setting by itself can say.

    Raises:
        ConfigError: What is counted would be seen nowhere, or it would be told to itself.
    """
    endpoint, names = values["forward"], [name for name, _ in values["forward_label"]]
    if not endpoint:
        if not values["web_listen_address"]:
            raise ConfigError(
                "nobody would see what is counted: give --web.listen-address or --forward"
            )
        if names:
            raise ConfigError("--forward.label: there is no --forward to add it to")
    if any(is_reached(endpoint, bound) for bound in values["ingest_endpoint"]):
        raise ConfigError(f"--forward {endpoint}: this is where engines connect to this exporter")
    if len(set(names)) < len(names):
        raise ConfigError("--forward.label: give each label once")


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
        return (text.split(setting.separator) if setting.repeatable else text), setting.variable
    if setting.flag in file:
        return file[setting.flag], f"{file_name}: {setting.flag}"
    return setting.default, f"default of --{setting.flag}"


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """One level of tables less: what was below a key has the key before its own."""
    return {
        f"{section}.{key}" if key else section: value
        for section, keys in tree.items()
        for key, value in (keys.items() if isinstance(keys, dict) else {"": keys}.items())
    }


def _read_file(name: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The settings of a file, and its tables by what they are of."""
    try:
        tree = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also what tomllib lets through
        raise ConfigError(f"{name} is not TOML: {error}") from None
    tables = {key: _table(name, key, tree.pop(key, {})) for key in TABLES}
    own = tree.pop("slo", None)
    found = _flat(_flat(tree))
    if own is not None:
        # The names in this table are the operator's own.
        found["slo"] = list(own.items()) if isinstance(own, dict) else own
    known_flags = {setting.flag for setting in SETTINGS}
    for key in found:
        refuse_removed(key, f"{name}: {key}")
        if key not in known_flags:
            raise ConfigError(f"{name}: {key.rstrip('.')} is no setting; see sidestep serve --help")
    return found, tables


def _table(name: str, key: str, own: object) -> dict[str, Any]:
    """What a file says under ``key``, of each bucket family or of families by their names."""
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
