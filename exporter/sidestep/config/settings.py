"""All settings: ``Config`` declares each with its flag, help, parser and default, and ``read`` fills it."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from sidestep.catalog.buckets import Bounds
from sidestep.catalog.prices import Price
from sidestep.catalog.slo import Objective
from sidestep.config import (
    engine_targets,
    objectives,
    otlp_options,
    parsing,
    prices,
    scrape_targets,
    subscriptions,
    triton_servers,
    variables,
)
from sidestep.config.config_file import TABLES, read_file
from sidestep.config.engine_targets import EngineTarget
from sidestep.config.scrape_targets import Target
from sidestep.config.subscriptions import Subscription
from sidestep.config.topics import topic_of
from sidestep.config.triton_servers import Server
from sidestep.errors import ConfigError


def temporary_directory() -> str:
    """Return the directory for temporary files.

    Raises:
        ConfigError: None can be written.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise ConfigError(
            "no directory for temporary files can be written: set TMPDIR to one, such as a mounted volume"
        ) from None


def default_endpoint() -> str:
    """Return an ipc path in a directory that belongs to this user."""
    base = os.environ.get("XDG_RUNTIME_DIR") or temporary_directory()
    name = "sidestep" if "XDG_RUNTIME_DIR" in os.environ else f"sidestep-{os.getuid()}"
    return f"ipc://{Path(base) / name / 'ingest.ipc'}"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting; a flag, an environment variable and a key of the file have its value.

    Attributes:
        usage: The flag, and the placeholder of its value; a flag without one is a switch.
        help: The text in ``--help`` and in docs/configuration.md.
        parse: Parser of one value; it raises ValueError with the end of an error line.
        default: Parsed like a given value; that of a repeatable setting is a tuple.
        unset: What applies without a value, for help and documents; of a setting with an empty default.
        collect: Of a repeatable setting, checks all parsed values together.
        separator: Separator of values in the environment variable; ``None``: white space.
        shown: Formats a value for an error line, without secrets.
        adjustable: Whether SIGHUP applies a change; other settings need a restart.
    """

    usage: str
    help: str
    parse: Callable[[object], Any] = parsing.text
    default: Any = ""
    unset: str = ""
    collect: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple
    separator: str | None = ","
    shown: Callable[[object], str] = str
    adjustable: bool = False

    @property
    def flag(self) -> str:
        """The flag without its dashes, which is also the key in the file."""
        return self.usage.partition(" ")[0].removeprefix("--")

    @property
    def metavar(self) -> str:
        """Placeholder of the value; empty for a switch."""
        return self.usage.partition(" ")[2]

    @property
    def key(self) -> str:
        """Attribute name in ``Config``."""
        return self.flag.replace(".", "_").replace("-", "_")

    @property
    def variable(self) -> str:
        """Name of the environment variable."""
        return f"{variables.PREFIX}{self.key.upper()}"

    @property
    def repeatable(self) -> bool:
        """True if the setting has several values."""
        return isinstance(self.default, tuple)

    @property
    def topic(self) -> str:
        """The group that the setting belongs to in help and documents."""
        return topic_of(self.flag)

    @property
    def default_text(self) -> str:
        """The default, or what applies without one."""
        if self.unset:
            return f"unset: {self.unset}"
        if self.repeatable:
            return f"default: {', '.join(self.default)}"
        shown = (
            f"{self.default:g}" if isinstance(self.default, float) else str(self.default).lower()
        )
        return f"default: {shown}"


def option(*args: Any, **kwargs: Any) -> Any:
    """Declare a field of ``Config`` by the arguments of its ``Setting``."""
    return dataclasses.field(metadata={"setting": Setting(*args, **kwargs)})


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All settings, validated. The name of a field is its flag with underscores."""

    web_listen_address: tuple[tuple[str, int], ...] = option(
        "--web.listen-address HOST:PORT",
        "Address to serve metrics on; repeatable. An empty host means all addresses; an empty value"
        " disables the HTTP server, for an exporter that only pushes.",
        parsing.optional_address,
        ("127.0.0.1:9857",),
        collect=lambda addresses: tuple(filter(None, addresses)),
    )
    web_telemetry_path: str = option(
        "--web.telemetry-path PATH", "Path of the metrics page.", parsing.path, "/metrics"
    )
    web_default_view: Literal["engine", "pod"] = option(
        "--web.default-view VIEW",
        "View of the metrics page if the request names none: each engine separately, or all engines"
        " aggregated, as request routers expect. See views.md.",
        parsing.one_of("engine", "pod"),
        "engine",
    )
    web_disable_ui: bool = option(
        "--web.disable-ui",
        "Serve no live page and keep no history for it: / has only links, and /api/v1/live does not"
        " exist. See live.md.",
        parsing.boolean,
        default=False,
    )
    web_config_file: str = option(
        "--web.config.file FILE",
        "YAML file in the exporter-toolkit format: TLS, client certificates, passwords, rate limit;"
        " reloaded when it changes. See security.md.",
        unset="plain HTTP, without passwords",
    )
    web_allowed_hosts: tuple[str, ...] = option(
        "--web.allowed-hosts NAME",
        "Name that requests over loopback may have as their host, besides addresses, localhost and names"
        " without a dot; repeatable. For a proxy on this machine that keeps the name of its own request. See"
        " security.md.",
        parsing.host_name,
        (),
        unset="none",
    )
    ingest_endpoint: tuple[str, ...] = option(
        "--ingest.endpoint ENDPOINT",
        "Endpoint that engines connect to, ipc:// or tcp://; repeatable.",
        parsing.ingest_endpoint,
        default=(),
        collect=lambda endpoints: endpoints or (default_endpoint(),),
        unset="ipc://$XDG_RUNTIME_DIR/sidestep/ingest.ipc; without that variable,"
        " ipc:///tmp/sidestep-UID/ingest.ipc",
    )
    ingest_curve_key: str = option(
        "--ingest.curve-key FILE",
        "File with the exporter's secret key (sidestep keygen); tcp:// endpoints then require CURVE.",
        unset="tcp:// endpoints do not use CURVE",
    )
    ingest_authorized_keys: str = option(
        "--ingest.authorized-keys DIR",
        "Directory of the engines' public keys, NAME.pub, reloaded every second.",
        unset="tcp:// endpoints do not use CURVE",
    )
    ingest_allow_plain_tcp: bool = option(
        "--ingest.allow-plain-tcp",
        "Allow tcp:// endpoints that other hosts can reach without authentication.",
        parsing.boolean,
        default=False,
    )
    ingest_ipc_group: str = option(
        "--ingest.ipc-group GROUP",
        "Group that may also connect to ipc:// paths; their directory is created with mode 2770.",
        unset="only the exporter's own user may connect",
    )
    otlp_endpoint: str = option(
        "--otlp.endpoint URL",
        "Receiver of OpenTelemetry (OTLP) to push all metrics to, such as http://collector:4318; a URL"
        " with a path is used as it is. Needs the extra otlp. OpenTelemetry's variables have further"
        " settings, such as OTEL_EXPORTER_OTLP_HEADERS. See opentelemetry.md.",
        otlp_options.endpoint("/v1/metrics"),
        shown=scrape_targets.without_secrets,
        unset="metrics are not pushed",
    )
    otlp_traces_endpoint: str = option(
        "--otlp.traces-endpoint URL",
        "Receiver of OpenTelemetry to send spans of each request that ends to, where the tap sends"
        " events; a URL as that of --otlp.endpoint, which may be the same. See opentelemetry.md.",
        otlp_options.endpoint("/v1/traces"),
        shown=scrape_targets.without_secrets,
        unset="no spans are sent",
    )
    otlp_logs_endpoint: str = option(
        "--otlp.logs-endpoint URL",
        "Receiver of OpenTelemetry to send a log record of each request that ends to, where the tap"
        " sends events; a URL as that of --otlp.endpoint, which may be the same.",
        otlp_options.endpoint("/v1/logs"),
        shown=scrape_targets.without_secrets,
        unset="no log records are sent",
    )
    otlp_interval: float = option(
        "--otlp.interval SECONDS",
        "Seconds between pushes of metrics to the receiver.",
        otlp_options.interval,
        15.0,
    )
    subscribe: tuple[Subscription, ...] = option(
        f"--subscribe {subscriptions.FORM}",
        "Stream of an engine's own publisher to read: kv-events, forward-pass or load, such"
        " as kv-events=tcp://host:5557,replay=tcp://host:5558; a port range has one port per"
        " rank. Repeatable; space-separated in the variable. See streams.md.",
        subscriptions.parse,
        (),
        collect=subscriptions.collect,
        separator=None,
        unset="none",
    )
    scrape: tuple[Target, ...] = option(
        f"--scrape {scrape_targets.FORM}",
        "Metrics page of another exporter to scrape, such as http://host:8002/metrics,label.pod=a;"
        " its families are exposed too. Repeatable; space-separated in the variable. See"
        " scrape.md.",
        scrape_targets.parse,
        (),
        collect=scrape_targets.collect,
        separator=None,
        shown=scrape_targets.without_secrets,
        unset="none",
    )
    triton: tuple[Server, ...] = option(
        f"--triton {triton_servers.FORM}",
        "Triton server to poll statistics from, http://HOST:8000; its models are exposed as engines."
        " Repeatable; space-separated in the variable. See triton.md.",
        triton_servers.parse,
        (),
        collect=triton_servers.collect,
        separator=None,
        shown=scrape_targets.without_secrets,
        unset="none",
    )
    engine: tuple[EngineTarget, ...] = option(
        f"--engine {engine_targets.FORM}",
        "Engine's server to poll, such as llamacpp=http://127.0.0.1:8080; its models are exposed as"
        " engines. Repeatable; space-separated in the variable. See llamacpp.md.",
        engine_targets.parse,
        (),
        collect=engine_targets.collect,
        separator=None,
        shown=scrape_targets.without_secrets,
        unset="none",
    )
    limits_memory_soft: int = option(
        "--limits.memory-soft MIB",
        "Resident memory from which new streams are rejected; 0 disables the limit.",
        parsing.whole,
        384,
    )
    limits_memory_hard: int = option(
        "--limits.memory-hard MIB",
        "Resident memory at which all connections are closed and the socket is bound again; 0"
        " disables the limit.",
        parsing.whole,
        512,
    )
    state_dir: str = option(
        "--state.dir DIR",
        "Directory for the snapshot that keeps counters across restarts; one directory per exporter,"
        " preferably on a memory-backed volume.",
        unset="a restart is a counter reset",
    )
    shutdown_linger: float = option(
        "--shutdown.linger SECONDS",
        "Maximum seconds after SIGTERM during which the exporter still answers, until a scrape has"
        " the last counts of all engines; 0 stops it at once. See reliability.md.",
        parsing.seconds,
        16.0,
    )
    metrics_legacy: bool = option(
        "--metrics.legacy",
        "Also expose metric names that the engines have removed.",
        parsing.boolean,
        default=False,
    )
    metrics_common: bool = option(
        "--metrics.common",
        "Also expose families under names that are common to all engines.",
        parsing.boolean,
        default=False,
    )
    histograms: Literal["classic", "native", "both"] = option(
        "--histograms KIND",
        "Buckets of histograms in the protobuf format, which is negotiated unless this is classic;"
        " text formats always have classic buckets. With both, Prometheus 2.42 stores only native"
        " histograms. See native-histograms.md.",
        parsing.one_of("classic", "native", "both"),
        "classic",
    )
    metrics_drop_label: tuple[str, ...] = option(
        "--metrics.drop-label NAME",
        "Label to drop from all engine series; series that become equal are merged. Repeatable."
        " See views.md.",
        parsing.droppable_label,
        (),
        unset="none",
    )
    metrics_allow: tuple[str, ...] = option(
        "--metrics.allow PATTERN",
        "Expose only engine families whose name matches, with wildcards * and ?; repeatable.",
        parsing.family_pattern,
        (),
        unset="all families",
    )
    metrics_deny: tuple[str, ...] = option(
        "--metrics.deny PATTERN",
        "Do not expose engine families whose name matches, even if allowed; repeatable.",
        parsing.family_pattern,
        (),
        unset="none",
    )
    metrics_bucket_thinning: int = option(
        "--metrics.bucket-thinning NUMBER",
        "Expose only every NUMBER-th bucket bound of a histogram, including the highest and +Inf.",
        parsing.positive,
        1,
    )
    slo: tuple[Objective, ...] = option(
        f"--slo {objectives.FORM}",
        "Count which requests meet an objective, such as ttft=350ms: ttft, inter_token,"
        " time_per_output_token, e2e or queue; availability; or any name with family=FAMILY."
        " Repeatable; space-separated in the variable. See slo.md.",
        objectives.parse,
        (),
        collect=objectives.collect,
        separator=None,
        shown=objectives.shown,
        unset="none",
    )
    kv_sample_rate: float = option(
        "--kv.sample-rate SHARE",
        "Share of KV blocks whose lifetimes and lookups are tracked; 0 disables tracking.",
        parsing.share,
        0.01,
        adjustable=True,
    )
    kv_scale_samples: bool = option(
        "--kv.scale-samples",
        "Scale KV block histograms up by the sample rate: a sampled block counts as 1/rate blocks.",
        parsing.boolean,
        default=False,
    )
    kv_max_tracked: int = option(
        "--kv.max-tracked NUMBER",
        "Maximum sampled KV blocks tracked at once, per engine; more are refused and counted. All"
        " engines together track at most ten times as many, in equal shares.",
        parsing.positive,
        100_000,
    )
    kv_curve_half_life: float = option(
        "--kv.curve-half-life SECONDS",
        "Seconds after which a lookup in the prefix cache counts half in the hit ratio of caches of other"
        " sizes; 0 disables that estimate.",
        parsing.seconds,
        3600.0,
    )
    intervals_scheduled: Literal["first", "last"] = option(
        "--intervals.scheduled WHICH",
        "Scheduling of a preempted request that ends its queue time and starts its prefill, where the"
        " tap sends events; vLLM's own front end uses the first.",
        parsing.one_of("first", "last"),
        "first",
    )
    intervals_inter_token: Literal["output", "token"] = option(
        "--intervals.inter-token PER",
        "Whether the interval before an output of several tokens is one observation, as in the"
        " engine, or is divided among its tokens, where the tap sends events.",
        parsing.one_of("output", "token"),
        "output",
    )
    requests_max_tracked: int = option(
        "--requests.max-tracked NUMBER",
        "Maximum requests in flight tracked at once, per engine; all engines together track at most"
        " twice as many, in equal shares.",
        parsing.positive,
        100_000,
    )
    requests_max_age: float = option(
        "--requests.max-age SECONDS",
        "Age at which a request that has not finished is no longer tracked.",
        parsing.positive_seconds,
        parsing.DAY,
    )
    requests_log: str = option(
        "--requests.log FILE",
        "File to write a JSON line to for each request that ends, where the tap sends events; - is the"
        " standard output. See requests.md.",
        unset="no lines are written",
    )
    requests_log_if: str = option(
        "--requests.log.if CONDITION",
        "Condition on the requests that get a record, in all outputs, such as 'ttft > 2s or reason = abort'.",
        unset="every request gets one",
    )
    requests_log_share: float = option(
        "--requests.log.share SHARE",
        "Share of the requests that get a record, chosen by a hash of their ids.",
        parsing.share,
        1.0,
    )
    requests_log_size: int = option(
        "--requests.log.size MIB",
        "Size from which on the file is renamed to FILE.1, and so on.",
        parsing.positive,
        100,
    )
    requests_log_files: int = option(
        "--requests.log.files NUMBER",
        "Files kept, the present one included.",
        parsing.positive,
        5,
    )
    tenants_by: str = option(
        "--tenants.by WHAT",
        "What a request's tenant is, where engines send requests: cache-salt, adapter, priority, id-prefix"
        " (the part of the request's id before its first hyphen) or header:NAME (SGLang's custom label of"
        " that name). See tenants.md.",
        parsing.optional(parsing.tenant_rule),
        "",
        unset="tenants are not counted",
    )
    tenants_max: int = option(
        "--tenants.max NUMBER",
        "Most tenants that have series of their own, 120 at most; all others are __other__.",
        parsing.tenants,
        100,
    )
    tenants_show: tuple[str, ...] = option(
        "--tenants.show NAME",
        "Tenant that always has series of its own; repeatable.",
        parsing.text,
        (),
        unset="the tenants with the most requests",
    )
    prices_model: tuple[Price, ...] = option(
        f"--prices.model {prices.FORM}",
        "Prices of a million tokens of a model, which counters of cost add up, such as"
        " llama,input=0.5,cached=0.05,output=1.5; MODEL is the label model_name, or * for all others;"
        " without cached, cached tokens cost as much as computed ones. Repeatable; space-separated in"
        " the variable. See tenants.md.",
        prices.parse,
        (),
        collect=prices.collect,
        separator=None,
        shown=prices.shown,
        unset="cost is not counted",
        adjustable=True,
    )
    prices_gpu_hour: float | None = option(
        "--prices.gpu-hour PRICE",
        "Price of an hour of a GPU, exposed for recording rules.",
        prices.gpu_hour,
        unset="not exposed",
        adjustable=True,
    )
    health_min_threshold: float = option(
        "--health.min-threshold SECONDS",
        "Least seconds for which a step may last before the engine counts as stalled, however short its"
        " steps have been; requests, outputs and heartbeats are waited for 1.5 times as long. See"
        " health.md.",
        parsing.min_threshold,
        5.0,
    )
    health_max_threshold: float = option(
        "--health.max-threshold SECONDS",
        "Seconds for which a step may last before the engine counts as stalled, however long its steps"
        " have been.",
        parsing.positive_seconds,
        120.0,
    )
    log_level: str = option(
        "--log.level LEVEL",
        "Lowest log level that is written.",
        parsing.one_of("debug", "info", "warning", "error"),
        "info",
        adjustable=True,
    )
    log_format: str = option(
        "--log.format FORMAT", "Format of log lines.", parsing.one_of("text", "json"), "text"
    )
    log_stats_interval: float = option(
        "--log.stats-interval SECONDS",
        "Seconds between log lines of engine statistics; 0 disables them.",
        parsing.seconds,
        10.0,
    )
    # Tables of the file, without flags.
    buckets: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)
    schemas: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shown_buckets: Mapping[str, Bounds] = dataclasses.field(default_factory=dict)

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
        return dataclasses.replace(self, **values), applied, pending


def _text(value: object) -> str:
    """Format an applied setting for the log."""
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
    settings = (*SETTINGS, CONFIG_FILE)
    if found := variables.unknown(environ, [setting.variable for setting in settings]):
        raise ConfigError(variables.description(found))
    file_name = flags.get("config_file") or environ.get(CONFIG_FILE.variable, "")
    file, tables = read_file(file_name) if file_name else ({}, {})
    known = {setting.flag for setting in SETTINGS}
    for key in file:
        if key not in known:
            raise ConfigError(
                f"{file_name}: {key.rstrip('.')} is not a setting; see sidestep serve --help"
            )
    values = {
        setting.key: _parsed(setting, *_find(setting, flags, environ, file, file_name))
        for setting in SETTINGS
    }
    _check_outputs(values)
    _check_records(values)
    _check_thresholds(values)
    return Config(**values, **tables)


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


def _check_thresholds(values: Mapping[str, Any]) -> None:
    """Check the thresholds of stalled engines together.

    Raises:
        ConfigError: The least is larger than the most.
    """
    least, most = values["health_min_threshold"], values["health_max_threshold"]
    if least > most:
        raise ConfigError(
            f"--health.min-threshold {least:g}: must not exceed --health.max-threshold {most:g}"
        )


def _check_records(values: Mapping[str, Any]) -> None:
    """Check the settings of requests' records together.

    Raises:
        ConfigError: Records are filtered, but have no output.
    """
    outputs = ("requests_log", "otlp_traces_endpoint", "otlp_logs_endpoint")
    if values["requests_log_if"] and not any(values[name] for name in outputs):
        raise ConfigError(
            "--requests.log.if: requires --requests.log, --otlp.traces-endpoint or"
            " --otlp.logs-endpoint"
        )


def _check_outputs(values: Mapping[str, Any]) -> None:
    """Check that metrics are served or sent.

    Raises:
        ConfigError: They are neither.
    """
    if not values["web_listen_address"] and not values["otlp_endpoint"]:
        raise ConfigError(
            "metrics are neither served nor sent: set --web.listen-address or --otlp.endpoint"
        )
