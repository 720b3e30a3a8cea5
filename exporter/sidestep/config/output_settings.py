"""Settings of the exporter's outputs: pages, pushed metrics, records of requests and the log."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

from sidestep.catalog.prices import Price
from sidestep.catalog.slo import Objective
from sidestep.config import objectives, parsing, prices
from sidestep.config.scrape_targets import Form, address, without_secrets
from sidestep.config.setting import option

MIN_INTERVAL = 1.0
"""Least seconds between two pushes of metrics."""


def _receiver(path: str) -> Callable[[object], str]:
    """Return the parser of a receiver's URL, which gets ``path`` if it has none; empty: no receiver."""
    form = Form(path=path, usage="a URL", login="OTEL_EXPORTER_OTLP_HEADERS")

    def parse(value: object) -> str:
        given = parsing.text(value).strip()
        return address(given.rstrip("/"), form) if given else ""

    return parse


def _web_page(value: object) -> str:
    """Return the address of a web page; empty: none."""
    given = parsing.text(value).strip()
    if given and urlsplit(given).scheme not in ("http", "https"):
        raise ValueError("must be an http or https address")
    return given


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Settings of the exporter's outputs."""

    # Laid out by hand: name, text, then parser and default.
    # fmt: off
    web_listen_address: tuple[tuple[str, int], ...] = option("--web.listen-address HOST:PORT",
        "Address to serve metrics on; repeatable. An empty host means all addresses; an empty value"
        " disables the HTTP server, for an exporter that only pushes.",
        parsing.optional_address, ("127.0.0.1:9857",),
        collect=lambda addresses: tuple(filter(None, addresses)))
    web_telemetry_path: str = option("--web.telemetry-path PATH",
        "Path of the metrics page.",
        parsing.path, "/metrics")
    web_default_view: Literal["engine", "pod"] = option("--web.default-view VIEW",
        "View of the metrics page for requests that name none: each engine separately, or all engines"
        " aggregated, as request routers expect. See views.md.",
        parsing.one_of("engine", "pod"), "engine")
    web_disable_ui: bool = option("--web.disable-ui",
        "Serve no live page and keep no history for it: / has only links, and /api/v1/live does not"
        " exist. See live.md.",
        parsing.boolean, default=False)
    web_disable_timeline: bool = option("--web.disable-timeline",
        "Keep no recent steps and requests: /api/v1/timeline does not exist, and `sidestep why` and `sidestep"
        " timeline` need files. See why.md.",
        parsing.boolean, default=False)
    web_dashboard_url: str = option("--web.dashboard-url URL",
        "Address of dashboards of these metrics, such as a Grafana folder or board, to which the live page"
        " links; it gets the chosen engine as var-engine and var-model_name. See live.md.",
        _web_page, "", unset="no link")
    web_config_file: str = option("--web.config.file FILE",
        "YAML file in the exporter-toolkit format: TLS, client certificates, passwords, rate limit;"
        " reloaded when it changes. See security.md.",
        unset="plain HTTP, without passwords")
    web_allowed_hosts: tuple[str, ...] = option("--web.allowed-hosts NAME",
        "Host name that requests over loopback may use, besides addresses, localhost and names without a"
        " dot; repeatable. A proxy on this machine needs it if it passes on the host of its own request. See"
        " security.md.",
        parsing.host_name, (), unset="none")
    otlp_endpoint: str = option("--otlp.endpoint URL",
        "OpenTelemetry receiver (OTLP) to push all metrics to, such as http://collector:4318; a URL with a"
        " path is used as it is. Needs the extra otlp. Variables of OpenTelemetry have further settings,"
        " such as OTEL_EXPORTER_OTLP_HEADERS. See opentelemetry.md.",
        _receiver("/v1/metrics"), shown=without_secrets, unset="metrics are not pushed")
    otlp_traces_endpoint: str = option("--otlp.traces-endpoint URL",
        "OpenTelemetry receiver for the spans of each request that ends, where engines send request events. The"
        " URL has the form of --otlp.endpoint and may be the same. See opentelemetry.md.",
        _receiver("/v1/traces"), shown=without_secrets, unset="no spans are sent")
    otlp_logs_endpoint: str = option("--otlp.logs-endpoint URL",
        "OpenTelemetry receiver for a log record of each request that ends, where engines send request events."
        " The URL has the form of --otlp.endpoint and may be the same.",
        _receiver("/v1/logs"), shown=without_secrets, unset="no log records are sent")
    otlp_interval: float = option("--otlp.interval SECONDS",
        "Seconds between pushes of metrics to the receiver.",
        lambda value: parsing.number(value, MIN_INTERVAL, parsing.DAY, "a number of seconds"), 15.0)
    metrics_legacy: bool = option("--metrics.legacy",
        "Also expose metric names that the engines have removed.",
        parsing.boolean, default=False)
    metrics_common: bool = option("--metrics.common",
        "Also expose families under names that are common to all engines.",
        parsing.boolean, default=False)
    histograms: Literal["classic", "native", "both"] = option("--histograms KIND",
        "Buckets of histograms in the protobuf format, which the exporter offers unless this is classic."
        " Text formats always have classic buckets. With both, Prometheus 2.42 stores only native"
        " histograms. See native-histograms.md.",
        parsing.one_of("classic", "native", "both"), "classic")
    metrics_drop_label: tuple[str, ...] = option("--metrics.drop-label NAME",
        "Label to drop from all engine series; series that become equal are merged. Repeatable."
        " See views.md.",
        parsing.droppable_label, (), unset="none")
    metrics_allow: tuple[str, ...] = option("--metrics.allow PATTERN",
        "Expose only engine families whose name matches, with wildcards * and ?; repeatable.",
        parsing.family_pattern, (), unset="all families")
    metrics_deny: tuple[str, ...] = option("--metrics.deny PATTERN",
        "Do not expose engine families whose name matches, even if allowed; repeatable.",
        parsing.family_pattern, (), unset="none")
    metrics_bucket_thinning: int = option("--metrics.bucket-thinning NUMBER",
        "Expose only every NUMBER-th bucket bound of a histogram, including the highest and +Inf.",
        parsing.positive, 1)
    slo: tuple[Objective, ...] = option(f"--slo {objectives.FORM}",
        "Count which requests meet an objective, such as ttft=350ms: ttft, inter_token,"
        " time_per_output_token, e2e or queue; availability; or any name with family=FAMILY."
        " Repeatable; space-separated in the variable. See slo.md.",
        objectives.parse, (), collect=objectives.collect, separator=None, shown=objectives.shown,
        unset="none")
    requests_log: str = option("--requests.log FILE",
        "File that gets a JSON line for each request that ends, where engines send request events; - is the"
        " standard output. See requests.md.",
        unset="no lines are written")
    requests_log_if: str = option("--requests.log.if CONDITION",
        "Condition that a request must meet to get a record, in any output, such as"
        " 'ttft > 2s or reason = abort'.",
        unset="every request gets one")
    requests_log_share: float = option("--requests.log.share SHARE",
        "Share of the requests that get a record, chosen by a hash of their ids.",
        parsing.share, 1.0)
    requests_log_size: int = option("--requests.log.size MIB",
        "Size at which the file is renamed to FILE.1, FILE.1 to FILE.2, and so on.",
        parsing.positive, 100)
    requests_log_files: int = option("--requests.log.files NUMBER",
        "Number of files that are kept, including the present one.",
        parsing.positive, 5)
    tenants_by: str = option("--tenants.by WHAT",
        "Property of a request that names its tenant, where engines send request events: cache-salt,"
        " adapter, priority, id-prefix (the part of the request's id before its first hyphen) or"
        " header:NAME (SGLang's custom label of that name). See tenants.md.",
        parsing.tenant_rule, "", unset="tenants are not counted")
    tenants_max: int = option("--tenants.max NUMBER",
        "Most tenants with series of their own, 120 at most; all others count as __other__.",
        parsing.tenants, 100)
    tenants_show: tuple[str, ...] = option("--tenants.show NAME",
        "Tenant that always has series of its own; repeatable, 120 at most.",
        parsing.text, (), unset="the tenants with the most requests")
    prices_model: tuple[Price, ...] = option(f"--prices.model {prices.FORM}",
        "Prices of a million tokens of a model, for counters of cost, such as"
        " llama,input=0.5,cached=0.05,output=1.5. MODEL is the label model_name, or * for all other models."
        " Without cached, cached tokens cost as much as computed ones. Repeatable; space-separated in the"
        " variable. See tenants.md.",
        prices.parse, (), collect=prices.collect, separator=None, shown=prices.shown,
        unset="cost is not counted", adjustable=True)
    prices_gpu_hour: float | None = option("--prices.gpu-hour PRICE",
        "Price of an hour of a GPU, exposed for recording rules.",
        prices.gpu_hour, unset="not exposed", adjustable=True)
    log_level: str = option("--log.level LEVEL",
        "Lowest log level that is written.",
        parsing.one_of("debug", "info", "warning", "error"), "info", adjustable=True)
    log_format: str = option("--log.format FORMAT",
        "Format of log lines.",
        parsing.one_of("text", "json"), "text")
    log_stats_interval: float = option("--log.stats-interval SECONDS",
        "Seconds between log lines of engine statistics; 0 disables them.",
        parsing.seconds, 10.0)
    # fmt: on
